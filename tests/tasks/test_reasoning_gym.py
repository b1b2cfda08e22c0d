"""Problems and verifiers of reasoning-gym as a task."""

import random
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import create_dataset

from megatron_rc.tasks import Task
from megatron_rc.tasks.generated import is_held_out
from megatron_rc.tasks.registry import build_task

SUMS = {"datasets": {"chain_sum": {"config": {"max_terms": 3}}, "spell_backward": {"weight": 3}}, "held_out": 20}


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
    backward = sum("backward" in prompt.text for prompt in prompts)
    assert 33 <= backward <= 57  # three of four; p < 1e-3 outside


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
        ({"max_prompt_tokens": 5}, "max_prompt_tokens=5 has no room for the problems"),
        ({"datasets": {"chain_sum": {"config": {"max_terms": 2, "max_digits": 1}}}, "held_out": 60}, "is more than"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options: dict[str, Any], sentence: str, tokenizer: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        task_of(tokenizer, **options)
    assert "\n" not in str(error.value)


def test_a_missing_library_is_named(tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(ValueError, match=r"reasoning-gym is not installed: .*\[real\]"):
        task_of(tokenizer)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer: .* holds no usable tokenizer"):
        task_of(str(tmp_path))
