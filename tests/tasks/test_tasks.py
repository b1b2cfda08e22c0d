"""The embedded arithmetic task, problems of reasoning-gym, and the options of tasks."""

import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import create_dataset
from refusals import refuses

from megatron_rc.jobs.describe import describe
from megatron_rc.tasks import Prompt, Task
from megatron_rc.tasks.arithmetic import ALPHABET, LEVELS, careless_totals, running_totals
from megatron_rc.tasks.generated import is_held_out
from megatron_rc.tasks.registry import TASKS, build_task

SUMS = {"datasets": {"chain_sum": {"config": {"max_terms": 3}}, "spell_backward": {"weight": 3}}, "held_out": 20}
FEW = {
    "arithmetic": {},
    "calculator": {"fewest_terms": 2, "most_terms": 2, "digits": 1, "held_out": 8},
    "copy": {"letters": 1, "fewest_lines": 1, "most_lines": 9, "held_out": 15},
}
"""Options under which the problems of training would meet the held-out ones, were these not left out."""


def arithmetic(**options: Any) -> Task:
    return build_task("arithmetic", options)


@pytest.mark.parametrize("kind", ["arithmetic", "calculator", "copy"])
def test_a_task_is_a_pure_function_of_seed_and_index(kind: str) -> None:
    first, again, other = (build_task(kind, {"seed": seed}) for seed in (3, 3, 4))
    assert first.prompts(7, 5) == again.prompts(0, 20)[7:12] != other.prompts(7, 5)
    assert first.demonstrations(7, 2) == again.demonstrations(0, 9)[7:]
    assert first.eval_prompts() == again.eval_prompts() != other.eval_prompts()


@pytest.mark.parametrize("kind", FEW)
def test_no_held_out_problem_of_any_seed_is_ever_trained_on(kind: str) -> None:
    def held_out_of(seed: int) -> set[tuple[int, ...]]:
        return {p.token_ids for p in build_task(kind, {**FEW[kind], "seed": seed}).eval_prompts()}

    task = build_task(kind, {**FEW[kind], "held_out": 1, "seed": 1})
    trained = {p.token_ids for p in task.prompts(0, 2000)}
    trained |= {tuple(shown.prompt_ids) for shown in task.demonstrations(0, 2000)}
    assert not set.union(*map(held_out_of, range(3))) & trained


def test_the_held_out_problems_are_an_eighth_and_all_different() -> None:
    texts = [p.text for p in arithmetic(held_out=300).eval_prompts()]
    assert len(set(texts)) == 300
    assert all(map(is_held_out, texts))
    assert abs(sum(is_held_out(f"{i}+1=") for i in range(8000)) / 8000 - 1 / 8) < 0.015


def test_the_default_held_out_set_has_the_levels_of_the_training_stream() -> None:
    task = arithmetic()
    terms = [[len(re.split("[+-]", p.text)) for p in part] for part in (task.prompts(0, 2000), task.eval_prompts())]
    trained, held_out = ({n: counts.count(n) / len(counts) for n in set(counts)} for counts in terms)
    assert trained.keys() == held_out.keys()
    assert all(abs(trained[n] - held_out[n]) < 0.1 for n in trained)


@pytest.mark.parametrize("level", LEVELS)
def test_answers_are_right_and_every_total_fits_the_digits_of_the_level(level: str) -> None:
    digits = int(level[-1])
    task = arithmetic(levels={level: 1.0}, held_out=4)
    for prompt in task.prompts(0, 50):
        terms = [int(t) for t in re.findall(r"[+-]?\d+", prompt.text)]
        assert len(terms) == int(level[0])
        assert prompt.text.endswith("=") and int(prompt.answer) == sum(terms)
        assert all(0 <= sum(terms[: n + 1]) < 10**digits for n in range(len(terms)))
        assert task.decode(prompt.token_ids) == prompt.text


def test_running_totals_add_one_digit_at_a_time_highest_first() -> None:
    assert running_totals([47, 38, -5]) == [77, 85, 80]
    assert running_totals([100, -30]) == [70]
    assert running_totals([3, 205]) == [203, 208]


def test_the_vocabulary_is_small_and_covers_everything_written() -> None:
    task = arithmetic()
    assert ALPHABET.padding < task.vocab_size <= 32 and ALPHABET.padding not in task.stop_token_ids
    used = {i for shown in task.demonstrations(0, 500) for i in shown.prompt_ids + shown.output_ids}
    assert task.stop_token_ids[0] in used and ALPHABET.padding not in used
    assert max(used) < task.vocab_size
    assert task.decode([ALPHABET.padding, 99]) == "??"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("85.", 1.0), ("77,85.", 1.0), ("1,2,85.", 1.0), ("85", 0.0), ("58.", 0.0), ("85,.", 0.0), ("8,5.", 0.0),
     (".", 0.0), ("", 0.0), ("85.85.", 0.0), ("-85.", 0.0), ("085.", 0.0), ("40+45=85.", 0.0)],
)  # fmt: skip
def test_the_last_number_of_a_response_that_stopped_counts(response: str, reward: float) -> None:
    prompt = Prompt(tuple(ALPHABET.encode("47+38=")), "47+38=", "85")
    assert arithmetic(held_out=1).rewards([prompt], [ALPHABET.encode(response)]) == [reward]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_the_error_rate_is_the_share_of_wrong_demonstrations(rate: float) -> None:
    task = arithmetic(levels={"2x1": 1.0, "4x1": 1.0, "3x3": 1.0}, held_out=1, demonstration_error_rate=rate)
    shown = task.demonstrations(0, 2000)
    texts = [task.decode(one.prompt_ids) for one in shown]
    prompts = [Prompt(tuple(ALPHABET.encode(t)), t, str(sum(map(int, re.findall(r"[+-]?\d+", t))))) for t in texts]
    right = sum(task.rewards(prompts, [one.output_ids for one in shown])) / 2000
    assert abs(right - (1 - rate)) <= 4 * (rate * (1 - rate) / 2000) ** 0.5


@pytest.mark.parametrize(
    ("terms", "totals"),
    [
        ([4, 3, -2], {(7,), (7, 4), (7, 6), (8, 6), (6, 4)}),
        ([1, 8], {(1,), (8,)}),
        ([8, -7], {(8,), (0,), (2,)}),
        ([47, 8], {(47,), (45,)}),
        ([52, -8], {(52,), (54,)}),
        ([47, 38], {(77,), (77, 75), (67, 75), (87, 95)}),
        ([70, 50], {(70,), (20,)}),
    ],
)
def test_a_careless_teacher_stops_early_or_slips_once(terms: list[int], totals: set[tuple[int, ...]]) -> None:
    rng = random.Random(0)
    assert {tuple(careless_totals(terms, rng)) for _ in range(200)} == totals


@given(st.sampled_from(LEVELS), st.integers(0, 10_000))
def test_a_careless_teacher_is_wrong_and_never_below_zero(level: str, seed: int) -> None:
    prompt = arithmetic(levels={level: 1.0}, held_out=1).prompts(seed, 1)[0]
    totals = careless_totals([int(t) for t in re.findall(r"[+-]?\d+", prompt.text)], random.Random(seed))
    assert totals[-1] != int(prompt.answer) and min(totals) >= 0


def test_responses_vary_in_length_and_lose_their_steps_on_request() -> None:
    assert len({len(shown.output_ids) for shown in arithmetic().demonstrations(0, 500)}) >= 4
    short = arithmetic(written_steps=False, demonstration_error_rate=0.0).demonstrations(0, 50)
    assert all(ALPHABET.encode(",")[0] not in response for _, response, _ in short)


WRONG_OPTIONS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "arithmetic": [
        ({"levels": {}}, "levels must give at least one level a weight > 0"),
        ({"levels": {"3x1": 0.0}}, "levels must give at least one level a weight > 0"),
        ({"levels": {"3x1": -1.0, "2x1": 2.0}}, "levels: the weight of '3x1' must be >= 0"),
        ({"levels": {"3xl": 1.0}}, "levels: unknown level '3xl'; did you mean '3x"),
        ({"levels": {"2x1": 1.0}, "held_out": 500}, "held_out=500 is more than the "),
        ({"demonstration_error_rate": 1.5}, "demonstration_error_rate must be in [0, 1], got 1.5"),
        ({"held_out": 0}, "held_out must be >= 1, got 0"),
        ({"held_out": "many"}, "task.options.held_out"),
        ({"levles": {}}, "unknown field 'task.options.levles'; did you mean 'levels'?"),
    ],
    "calculator": [
        ({"fewest_terms": 1}, "2 <= fewest_terms <= most_terms <= 26, got fewest_terms=1 most_terms=6"),
        ({"fewest_terms": 7}, "fewest_terms <= most_terms"),
        ({"digits": 7}, "digits must be in [1, 6], got 7"),
        ({"max_turns": 5}, "max_turns must be >= 6, got 5"),
        ({"digits": 4, "max_turn_tokens": 10}, "max_turn_tokens must be >= 11, got 10"),
        ({"held_out": 0}, "held_out must be >= 1, got 0"),
        ({"terms": 3}, "unknown field 'task.options.terms'"),
    ],
    "copy": [
        ({"fewest_lines": 0}, "fewest_lines must be >= 1, got 0"),
        ({"letters": 0}, "letters must be >= 1, got 0"),
        ({"most_lines": 100}, "most_lines must be in [fewest_lines, 99], got fewest_lines=64 most_lines=100"),
        ({"most_lines": 63}, "most_lines must be in [fewest_lines, 99]"),
        ({"alphabet": 21}, "alphabet must be in [2, 20], got 21"),
        ({"demonstration_error_rate": -0.1}, "demonstration_error_rate must be in [0, 1]"),
        ({"letters": 1, "alphabet": 2, "held_out": 50}, "held_out=50 is more than the "),
        ({"lines": 3}, "unknown field 'task.options.lines'"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "sentence"), [(kind, *row) for kind, rows in WRONG_OPTIONS.items() for row in rows]
)
def test_a_wrong_option_is_named(kind: str, options: dict[str, Any], sentence: str) -> None:
    refuses(re.escape(sentence), build_task, kind, options)


def test_build_task_fills_in_the_seed_of_the_job_and_names_unknown_tasks() -> None:
    assert build_task("arithmetic", {}, seed=9).prompts(0, 5) == arithmetic(seed=9).prompts(0, 5)
    assert build_task("arithmetic", {"seed": 2}, seed=9).prompts(0, 5) == arithmetic(seed=2).prompts(0, 5)
    refuses("task.kind must be one of .*got 'arithmetics'; did you mean 'arithmetic'", build_task, "arithmetics")


@pytest.mark.parametrize("kind", TASKS)
def test_the_documentation_lists_every_option_with_its_default(kind: str) -> None:
    text = (Path(__file__).parents[2] / "docs/tasks.md").read_text()
    required = [f.name for f in dataclasses.fields(TASKS[kind].options) if f.default is f.default_factory]
    for field in describe(TASKS[kind].options):
        default = "required" if field.name in required else f"`{field.default}`"
        cells = [f"`{field.name}`", f"`{field.type}`", default, field.doc]
        assert field.doc and "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" in text


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer of bytes and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_ = Tokenizer(models.BPE(vocab={"</s>": 0, **{c: i + 1 for i, c in enumerate(letters)}}, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_, eos_token="</s>")
    fast.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    folder = tmp_path_factory.mktemp("checkpoint")
    fast.save_pretrained(folder)
    return str(folder)


def task_of(tokenizer: str, **options: Any) -> Task:
    return build_task("reasoning_gym", SUMS | options, seed=5, tokenizer=tokenizer)


def test_a_stream_is_a_function_of_seed_and_index_and_never_meets_the_held_out_problems(tokenizer: str) -> None:
    task, again = task_of(tokenizer), task_of(tokenizer)
    prompts = task.prompts(0, 60)
    assert again.prompts(40, 20) == prompts[40:] and again.eval_prompts() == task.eval_prompts()
    assert task_of(tokenizer, seed=6).prompts(0, 60) != prompts
    held_out = {prompt.text for prompt in task.eval_prompts()}
    assert len(held_out) == 20 and all(map(is_held_out, held_out))
    assert not any(is_held_out(prompt.text) for prompt in prompts)
    assert 33 <= sum("backward" in prompt.text for prompt in prompts) <= 57  # three of four; p < 1e-3 outside


def test_the_systems_message_and_the_problem_go_through_the_chat_template(tokenizer: str) -> None:
    task = task_of(tokenizer, system_prompt="Be brief.")
    prompt = task.prompts(3, 1)[0]
    assert task.decode(prompt.token_ids) == f"[system] Be brief.\n[user] {prompt.text}\n"
    plain = task_of(tokenizer, system_prompt="", chat_template="never").prompts(3, 1)[0]
    assert task.decode(plain.token_ids) == plain.text == prompt.text


def test_a_demonstration_has_the_reward_of_a_right_answer_and_others_that_of_the_library(tokenizer: str) -> None:
    task = task_of(tokenizer)
    shown = task.demonstrations(0, 12)
    # demonstrations are another stream than prompts
    prompts = [task._training("demonstration", index) for index in range(12)]  # type: ignore[attr-defined]
    assert [list(prompt.token_ids) for prompt in prompts] == [one.prompt_ids for one in shown]
    assert task.rewards(prompts, [one.output_ids for one in shown]) == [1.0] * 12
    assert {one.output_ids[-1] for one in shown} == set(task.stop_token_ids)
    library = create_dataset("chain_sum", seed=0, size=2**31 - 1, max_terms=3)
    (number, prompt) = next((i, p) for i, p in enumerate(prompts) if p.answer.startswith("chain_sum"))
    entry = library[int(prompt.answer.partition("/")[2])]
    assert entry["question"] == prompt.text
    encode = task._chat.encode_response  # type: ignore[attr-defined]
    for said in (f"It is {entry['answer']}", entry["answer"], f"<answer>7</answer> no: <answer> {entry['answer']} "):
        bare = said.rpartition("<answer>")[2].strip()
        assert task.rewards([prompt], [encode(said)]) == [library.score_answer(bare, entry)]
    noise = random.Random(0)
    garbage = [[noise.randrange(1, 257) for _ in range(30)] for _ in range(20)]
    assert all(0 <= reward <= 1 for reward in task.rewards([prompts[number]] * 20, garbage))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"datasets": {"chain_sm": {}}}, r"reasoning-gym has no 'chain_sm'; did you mean 'chain_sum'\?"),
        ({"datasets": {"chain_sum": {"config": {"terms": 3}}}}, "datasets.chain_sum.config: .* argument 'terms'"),
        ({"datasets": {"chain_sum": {"config": {"min_terms": 9, "max_terms": 3}}}}, "max_terms must be >= min_terms"),
        ({"datasets": {"chain_sum": {"weight": 0}}}, "datasets.chain_sum.weight must be > 0, got 0"),
        ({"datasets": {"chain_sum": 3}}, r"datasets.chain_sum must be \{weight: ..., config: ...\}, got 3"),
        ({"datasets": {}}, "datasets must name at least one"),
        ({"tokenizer": str(Path(__file__).parent)}, "tokenizer: .* holds no usable tokenizer"),
        ({"max_prompt_tokens": 5}, "max_prompt_tokens=5 has no room for the problems"),
        ({"datasets": {"chain_sum": {"config": {"max_terms": 2, "max_digits": 1}}}, "held_out": 60}, "is more than"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], sentence: str, tokenizer: str) -> None:
    assert "\n" not in refuses(sentence, task_of, **{"tokenizer": tokenizer, **options})


def test_a_missing_library_is_named(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    refuses(r"reasoning-gym is not installed: .*\[real\]", task_of, tokenizer)
