"""The embedded arithmetic task, tasks from JSONL files, and user-written rewards."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rc.describe import describe
from megatron_rc.tasks import Prompt, Task
from megatron_rc.tasks.arithmetic import (
    LEVELS,
    ArithmeticOptions,
    ArithmeticTask,
    careless_totals,
    encode,
    is_held_out,
    running_totals,
)
from megatron_rc.tasks.jsonl import JsonlOptions, JsonlTask
from megatron_rc.tasks.math_answer import math_answer
from megatron_rc.tasks.registry import OPTIONS, build_task
from megatron_rc.tasks.reward import load_reward

DOCS = Path(__file__).parent.parent / "docs" / "tasks.md"


def arithmetic(**options: Any) -> ArithmeticTask:
    return ArithmeticTask(ArithmeticOptions(**options))


def test_arithmetic_is_a_pure_function_of_seed_and_index() -> None:
    first, again, other = arithmetic(seed=3), arithmetic(seed=3), arithmetic(seed=4)
    assert first.prompts(7, 5) == again.prompts(0, 20)[7:12]
    assert first.demonstrations(7, 5) == again.demonstrations(0, 20)[7:12]
    assert first.eval_prompts() == again.eval_prompts()
    assert first.prompts(0, 20) != other.prompts(0, 20)
    assert first.eval_prompts() != other.eval_prompts()


def test_no_held_out_problem_of_any_seed_is_ever_trained_on() -> None:
    held_out = {p.token_ids for seed in range(3) for p in arithmetic(seed=seed).eval_prompts()}
    task = arithmetic(seed=1)
    trained = {p.token_ids for p in task.prompts(0, 3000)} | {tuple(p) for p, _ in task.demonstrations(0, 3000)}
    assert not held_out & trained


def test_the_held_out_problems_are_an_eighth_and_all_different() -> None:
    task = arithmetic(held_out=300)
    texts = [p.text for p in task.eval_prompts()]
    assert len(set(texts)) == 300
    assert all(map(is_held_out, texts))
    share = sum(is_held_out(f"{i}+1=") for i in range(8000)) / 8000
    assert abs(share - 1 / 8) < 0.015


def test_the_default_held_out_set_has_the_levels_of_the_training_stream() -> None:
    task = arithmetic()
    terms = [[len(re.split("[+-]", p.text)) for p in prompts] for prompts in (task.prompts(0, 2000), task.eval_prompts())]
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
    assert task.vocab_size <= 32 and task.pad_token_id < task.vocab_size
    assert task.pad_token_id not in task.stop_token_ids
    used = {i for prompt, response in task.demonstrations(0, 500) for i in prompt + response}
    assert task.stop_token_ids[0] in used and task.pad_token_id not in used
    assert max(used) < task.vocab_size
    assert task.decode([task.pad_token_id, 99]) == "??"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("85.", 1.0), ("77,85.", 1.0), ("1,2,85.", 1.0), ("85", 0.0), ("58.", 0.0), ("85,.", 0.0), ("8,5.", 0.0),
     (".", 0.0), ("", 0.0), ("85.85.", 0.0), ("-85.", 0.0), ("085.", 0.0), ("40+45=85.", 0.0)],
)  # fmt: skip
def test_the_last_number_of_a_response_that_stopped_counts(response: str, reward: float) -> None:
    prompt = Prompt(tuple(encode("47+38=")), "47+38=", "85")
    assert arithmetic(held_out=1).rewards([prompt], [encode(response)]) == [reward]


def test_demonstrations_of_a_careful_teacher_are_all_right() -> None:
    task = arithmetic(demonstration_error_rate=0.0)
    assert rewards_of_demonstrations(task, 400) == [1.0] * 400


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_each_step_slips_with_the_error_rate(rate: float) -> None:
    task = arithmetic(levels={"2x1": 1.0}, held_out=1, demonstration_error_rate=rate)
    right = sum(rewards_of_demonstrations(task, 2000)) / 2000
    assert abs(right - (1 - rate)) < 4 * (rate * (1 - rate) / 2000) ** 0.5


@given(st.integers(0, 999), st.integers(1, 9), st.sampled_from([1, 10, 100]), st.sampled_from([1, -1]))
def test_a_slip_is_wrong_and_never_below_zero(first: int, digit: int, place: int, sign: int) -> None:
    term = sign * digit * place
    if first + term < 0:
        return
    (total,) = careless_totals([first, term], 1.0, random.Random(0))
    assert total != first + term and total >= 0


def test_a_slip_in_a_carrying_step_loses_the_carry() -> None:
    assert careless_totals([47, 8], 1.0, random.Random(0)) == [45]
    assert careless_totals([52, -8], 1.0, random.Random(0)) == [54]
    assert careless_totals([70, 50], 1.0, random.Random(0)) == [20]


def test_a_slip_is_carried_on_to_the_end() -> None:
    rng = random.Random(5)
    for _ in range(200):
        totals = careless_totals([2, 1, 1, -1], 0.5, rng)
        for before, after, change in zip([2, *totals], totals, [1, 1, -1], strict=False):
            assert after == before + change or abs(after - before - change) == 1


def test_responses_vary_in_length_and_lose_their_steps_on_request() -> None:
    lengths = {len(r) for _, r in arithmetic().demonstrations(0, 500)}
    assert len(lengths) >= 4
    short = arithmetic(written_steps=False, demonstration_error_rate=0.0).demonstrations(0, 50)
    assert all(encode(",")[0] not in response for _, response in short)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"levels": {}}, "levels must give at least one level a weight > 0"),
        ({"levels": {"3x1": 0.0}}, "levels must give at least one level a weight > 0"),
        ({"levels": {"3x1": -1.0, "2x1": 2.0}}, "levels: the weight of '3x1' must be >= 0"),
        ({"levels": {"3xl": 1.0}}, "levels: unknown level '3xl'; did you mean '3x"),
        ({"demonstration_error_rate": 1.5}, "demonstration_error_rate must be in [0, 1], got 1.5"),
        ({"held_out": 0}, "held_out must be >= 1, got 0"),
        ({"held_out": "many"}, "task.options.held_out"),
        ({"levles": {}}, "unknown field 'task.options.levles'; did you mean 'levels'?"),
    ],
)
def test_a_wrong_arithmetic_option_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build_task("arithmetic", options)


def test_more_held_out_problems_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"held_out=500 is more than the \d+ held-out problems"):
        arithmetic(levels={"2x1": 1.0}, held_out=500)


def test_build_task_fills_in_the_seed_of_the_job_and_names_unknown_tasks() -> None:
    assert build_task("arithmetic", {}, seed=9).prompts(0, 5) == arithmetic(seed=9).prompts(0, 5)
    assert build_task("arithmetic", {"seed": 2}, seed=9).prompts(0, 5) == arithmetic(seed=2).prompts(0, 5)
    with pytest.raises(ValueError, match="unknown task 'arithmetics'; did you mean 'arithmetic'"):
        build_task("arithmetics")


def rewards_of_demonstrations(task: ArithmeticTask, count: int) -> list[float]:
    pairs = task.demonstrations(0, count)
    texts = [task.decode(prompt) for prompt, _ in pairs]
    prompts = [Prompt(tuple(encode(t)), t, str(sum(map(int, re.findall(r"[+-]?\d+", t))))) for t in texts]
    return task.rewards(prompts, [response for _, response in pairs])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint folder with a word-level tokenizer, a chat template and two stop tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<user>", "<end>", "what", "is", "the", *map(str, range(40))]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=model, additional_special_tokens=["<user>", "<end>"], **special)
    fast.chat_template = "<user> {{ messages[0]['content'] }} <end>"
    folder = tmp_path_factory.mktemp("checkpoint")
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return str(folder)


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of user-written rewards on the import path."""
    (tmp_path / "user_rewards.py").write_text(
        "import numpy\n"
        "def exact(prompt, response, answer): return float(response == answer)\n"
        "def boolean(prompt, response, answer): return response == answer\n"
        "def numpy_number(prompt, response, answer): return numpy.float32(0.5)\n"
        "def echo(prompt, response, answer): return len(prompt) + 10 * len(response) + 100 * len(answer)\n"
        "def raises(prompt, response, answer): return 1 / 0\n"
        "def nan(prompt, response, answer): return float('nan')\n"
        "def nothing(prompt, response, answer): pass\n"
        "number = 3\n"
    )
    (tmp_path / "broken_rewards.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "user_rewards", raising=False)
    return "user_rewards:exact"


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def numbered(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {i}", "answer": i} for i in range(first, first + count)]


@pytest.fixture
def make(tmp_path: Path, tokenizer: str, rewards: str) -> Any:
    def build(rows: list[Any] | None = None, **options: Any) -> Task:
        path = options.pop("path", None) or write_jsonl(tmp_path / "train.jsonl", numbered(20) if rows is None else rows)
        return build_task("jsonl", {"path": path, "reward": rewards, **options}, tokenizer=tokenizer)

    return build


def test_every_epoch_visits_every_prompt_once_in_another_order(make: Any) -> None:
    task = make(held_out_share=0.25)
    epochs = [[p.text for p in task.prompts(15 * e, 15)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 15 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_cursor_alone_decides_what_comes_next(make: Any) -> None:
    task, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert again.prompts(30, 10) == task.prompts(0, 40)[30:]
    assert task.prompts(3, 4) == again.prompts(0, 40)[3:7]
    assert task.prompts(0, 19) != other.prompts(0, 19)


def test_the_held_out_share_is_disjoint_and_the_same_for_every_seed(make: Any) -> None:
    rows = numbered(20) + numbered(20)
    task, other = make(rows, held_out_share=0.2, seed=1), make(list(reversed(rows)), held_out_share=0.2, seed=2)
    held_out = {p.text for p in task.eval_prompts()}
    assert len(held_out) == 4
    assert held_out == {p.text for p in other.eval_prompts()}
    assert not held_out & {p.text for p in task.prompts(0, 32)}


def test_a_held_out_file_must_not_share_prompts_with_the_training_file(make: Any, tmp_path: Path) -> None:
    task = make(held_out_path=write_jsonl(tmp_path / "test.jsonl", numbered(5, first=30)))
    assert [p.answer for p in task.eval_prompts()] == ["30", "31", "32", "33", "34"]
    assert len({p.text for p in task.prompts(0, 20)}) == 20
    with pytest.raises(ValueError, match=r"^3 training prompts also stand in held_out_path .*train.jsonl line 18$"):
        make(held_out_path=write_jsonl(tmp_path / "test.jsonl", numbered(5, first=17)))


def test_prompts_go_through_the_chat_template_of_the_checkpoint(make: Any) -> None:
    text = make().prompts(0, 1)[0].text
    number = int(text.split()[-1])
    assert make().prompts(0, 1)[0].token_ids == (3, 5, 6, 8 + number, 4)
    assert make(chat_template="never").prompts(0, 1)[0].token_ids == (5, 6, 8 + number)


def test_a_template_that_is_asked_for_must_exist(make: Any, tmp_path: Path, tokenizer: str) -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    assert len(make(tokenizer=str(tmp_path / "plain")).prompts(0, 1)[0].token_ids) == 3
    with pytest.raises(ValueError, match="chat_template is 'always', but tokenizer .* has no chat template"):
        make(tokenizer=str(tmp_path / "plain"), chat_template="always")


def test_ids_come_from_the_tokenizer_and_the_generation_config(make: Any) -> None:
    task = make()
    assert (task.vocab_size, task.stop_token_ids, task.pad_token_id) == (48, (2, 4), 2)
    assert task.decode([5, 6, 7, 2]) == "what is the"


def test_rewards_see_texts_without_special_tokens(make: Any) -> None:
    task = make()
    prompt = Prompt((3, 5, 6, 15, 4), "what is 7", "7")
    assert task.rewards([prompt] * 3, [[15, 2], [16, 4], [15, 15, 2]]) == [1.0, 0.0, 0.0]
    assert make(reward="user_rewards:echo").rewards([prompt], [[15, 16, 2]]) == [9 + 30 + 100.0]
    assert make(reward="user_rewards:boolean").rewards([prompt], [[15, 2]]) == [1.0]
    assert make(reward="user_rewards:numpy_number").rewards([prompt], [[15, 2]]) == [0.5]


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises", "reward 'user_rewards:raises' raised ZeroDivisionError: division by zero for .*train.jsonl line 8"),
        ("nan", "reward 'user_rewards:nan' must return a finite number, got nan for .*train.jsonl line 8"),
        ("nothing", "reward 'user_rewards:nothing' must return a finite number, got None for .*train.jsonl line 8"),
    ],
)
def test_a_reward_that_fails_names_itself_and_the_line_of_the_prompt(make: Any, function: str, sentence: str) -> None:
    task = make(reward=f"user_rewards:{function}")
    prompt = next(p for p in [*task.prompts(0, 19), *task.eval_prompts()] if p.answer == "7")
    with pytest.raises(ValueError, match=sentence) as caught:
        task.rewards([prompt], [[15, 2]])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact", "reward must be given as module:function, got 'exact'"),
        ("user_rewards:", "reward must be given as module:function"),
        ("no_such_module:f", "reward 'no_such_module:f': importing 'no_such_module' failed: ModuleNotFoundError"),
        ("broken_rewards:f", "reward 'broken_rewards:f': importing 'broken_rewards' failed: SyntaxError"),
        ("user_rewards:f", "reward 'user_rewards:f': module 'user_rewards' has no 'f'"),
        ("user_rewards:number", "reward 'user_rewards:number' must be a function, got int"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_before_anything_runs(make: Any, name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make(reward=name)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([], "path: .*train.jsonl' has no prompts"),
        (["", "  "], "path: .*train.jsonl' has no prompts"),
        ([*numbered(2), "{'prompt': 1}"], "train.jsonl line 3 is not valid JSON: .* at column 2$"),
        ([*numbered(2), "", '{"prompt": "a", "ans'], "train.jsonl line 4 is not valid JSON"),
        ([*numbered(1), {"prompt": "a"}], "train.jsonl line 2 has no field 'answer'$"),
        ([{"answer": "a"}], "train.jsonl line 1 has no field 'prompt'$"),
        ([["a", "b"]], "train.jsonl line 1 must be an object .* got list$"),
        ([{"prompt": "  ", "answer": 1}], "train.jsonl line 1: prompt must be a text that is not empty"),
        ([{"prompt": 3, "answer": 1}], "train.jsonl line 1: prompt must be a text"),
        ([{"prompt": "a", "answer": None}], "train.jsonl line 1: answer must be a text or a number, got None"),
        ([{"prompt": "a", "answer": True}], "train.jsonl line 1: answer must be a text or a number, got True"),
        (numbered(1), "has one prompt, so none can be held out; give held_out_path"),
        ([*numbered(3), {"prompt": "1 " * 9, "answer": 1}], r"line 4: the prompt has 11 tokens, max_prompt_tokens is 8$"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence_with_the_line(make: Any, rows: list[Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        make(rows, max_prompt_tokens=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "nowhere.jsonl"}, "path: no such file: 'nowhere.jsonl'"),
        ({"held_out_path": "nowhere.jsonl"}, "held_out_path: no such file: 'nowhere.jsonl'"),
        ({"tokenizer": "nowhere"}, "tokenizer: no such directory: 'nowhere'"),
        ({"tokenizer": str(Path(__file__).parent)}, "holds no usable tokenizer"),
        ({"held_out_share": 1.0}, "held_out_share must be in (0, 1), got 1.0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be >= 1, got 0"),
        ({"chat_template": "perhaps"}, "task.options.chat_template"),
        ({"tokeniser": "a"}, "unknown field 'task.options.tokeniser'; did you mean 'tokenizer'?"),
    ],
)
def test_a_wrong_jsonl_option_is_named(make: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        make(**options)


def test_a_file_that_is_not_text_is_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="path: .*binary.jsonl' is not UTF-8 text"):
        make(path=str(tmp_path / "binary.jsonl"))


def test_jsonl_needs_a_tokenizer_and_has_no_demonstrations(make: Any, tmp_path: Path, rewards: str) -> None:
    with pytest.raises(ValueError, match="the jsonl task has no demonstrations: warmup.steps must be 0"):
        make().demonstrations(0, 1)
    options = JsonlOptions(path=write_jsonl(tmp_path / "train.jsonl", numbered(3)), reward=rewards)
    with pytest.raises(ValueError, match=r"tokenizer must name a directory when model.hf_path does not"):
        JsonlTask(options)


@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="math-verify is an extra")
@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"So the answer is \boxed{\frac{1}{2}}.", "1/2", 1.0),
        (r"So the answer is $0.5$.", r"\frac{1}{2}", 1.0),
        (r"\boxed{3}", "1/2", 0.0),
        ("no idea", "42", 0.0),
        (r"$x = 4$, so it is $\boxed{12}$", "12", 1.0),
    ],
)
def test_math_answers_are_compared_as_mathematics(response: str, answer: str, reward: float) -> None:
    assert load_reward("megatron_rc.tasks.math_answer:math_answer")("", response, answer) == reward


@pytest.mark.skipif(not importlib.util.find_spec("math_verify"), reason="math-verify is an extra")
def test_an_answer_that_is_no_mathematics_is_refused() -> None:
    with pytest.raises(ValueError, match="is not an expression that math-verify can read"):
        math_answer("", "1", "")


def test_math_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"math-verify is not installed: pip install 'megatron-rc\[math\]'"):
        math_answer("", "1", "1")


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_documentation_lists_every_option_with_its_default(kind: str) -> None:
    text = DOCS.read_text()
    required = [f.name for f in dataclasses.fields(OPTIONS[kind]) if f.default is f.default_factory]
    for field in describe(OPTIONS[kind]):
        default = "required" if field.name in required else f"`{field.default}`"
        cells = [f"`{field.name}`", f"`{field.type}`", default, field.doc]
        assert field.doc and "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" in text
