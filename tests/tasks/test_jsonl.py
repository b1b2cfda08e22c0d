"""Tasks from JSONL files, and rewards written by users."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses

from megatron_rc.settings import job
from megatron_rc.tasks import Prompt, Task
from megatron_rc.tasks.jsonl import JsonlOptions, JsonlTask
from megatron_rc.tasks.math_answer import math_answer
from megatron_rc.tasks.registry import build_task
from megatron_rc.tasks.reward import load_reward


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint folder with a word-level tokenizer, a chat template and two stop tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<user>", "<end>", "what", "is", "the", *map(str, range(40))]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
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
        path = options.pop("path", write_jsonl(tmp_path / "train.jsonl", numbered(20) if rows is None else rows))
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
    with pytest.raises(ValueError, match=r"^3 training prompts are also in held_out_path .*train.jsonl line 18$"):
        make(held_out_path=write_jsonl(tmp_path / "test.jsonl", numbered(5, first=17)))


def test_prompts_go_through_the_chat_template_of_the_checkpoint_and_get_no_second_first_token(make: Any) -> None:
    number = int(make().prompts(0, 1)[0].text.split()[-1])
    assert make().prompts(0, 1)[0].token_ids == (3, 5, 6, 8 + number, 4)
    assert make(chat_template="never").prompts(0, 1)[0].token_ids == (1, 5, 6, 8 + number)


def test_a_template_that_is_asked_for_must_exist(make: Any, tmp_path: Path, tokenizer: str) -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(tokenizer)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    assert len(make(tokenizer=str(tmp_path / "plain")).prompts(0, 1)[0].token_ids) == 4
    with pytest.raises(ValueError, match="chat_template is 'always', but tokenizer .* has no chat template"):
        make(tokenizer=str(tmp_path / "plain"), chat_template="always")


def test_ids_come_from_the_tokenizer_and_the_generation_config(make: Any) -> None:
    task = make()
    assert (task.vocab_size, task.stop_token_ids) == (48, (2, 4))
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
    assert "\n" not in refuses(sentence, task.rewards, [prompt], [[15, 2]])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("exact", "reward must be given as module:function, got 'exact'"),
        ("user_rewards:", "reward must be given as module:function"),
        ("no_such_module:f", "reward 'no_such_module:f': importing 'no_such_module' failed: ModuleNotFoundError"),
        ("no_such_module:f", "; no no_such_module.py lies beside the YAML or the file of task.options.path"),
        ("broken_rewards:f", "reward 'broken_rewards:f': importing 'broken_rewards' failed: SyntaxError"),
        ("user_rewards:f", "reward 'user_rewards:f': module 'user_rewards' has no 'f'"),
        ("user_rewards:number", "reward 'user_rewards:number' must be a function, got int"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_before_anything_runs(make: Any, name: str, sentence: str) -> None:
    refuses(re.escape(sentence), make, reward=name)


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
        (numbered(1), "has one prompt, so none can be held out; set held_out_path"),
        ([*numbered(3), {"prompt": "1 " * 9, "answer": 1}], r"line 4: the prompt has 11 tokens, max_prompt_tokens is"),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence_with_the_line(make: Any, rows: list[Any], sentence: str) -> None:
    assert "\n" not in refuses(sentence, make, rows, max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "nowhere.jsonl"}, "path: no such file: 'nowhere.jsonl'"),
        ({"held_out_path": "nowhere.jsonl"}, "held_out_path: no such file: 'nowhere.jsonl'"),
        ({"tokenizer": "nowhere"}, "tokenizer: no such folder: 'nowhere'"),
        ({"tokenizer": str(Path(__file__).parent)}, "holds no usable tokenizer"),
        ({"held_out_share": 1.0}, "held_out_share must be in (0, 1), got 1.0"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens must be >= 1, got 0"),
        ({"chat_template": "perhaps"}, "task.options.chat_template"),
        ({"tokeniser": "a"}, "unknown field 'task.options.tokeniser'; did you mean 'tokenizer'?"),
    ],
)
def test_a_wrong_jsonl_option_is_named(make: Any, options: dict[str, Any], sentence: str) -> None:
    refuses(re.escape(sentence), make, **options)


def test_a_file_that_is_not_text_is_named(make: Any, tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    refuses("path: .*binary.jsonl' is not UTF-8 text", make, path=str(tmp_path / "binary.jsonl"))


def test_jsonl_needs_a_tokenizer_and_has_no_demonstrations(make: Any, tmp_path: Path, rewards: str) -> None:
    refuses("the jsonl task has no demonstrations: warmup.steps must be 0", make().demonstrations, 0, 1)
    options = JsonlOptions(path=write_jsonl(tmp_path / "train.jsonl", numbered(3)), reward=rewards)
    refuses(r"tokenizer must name a folder when model.hf_path does not", JsonlTask, options)


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
    refuses("is not an expression that math-verify can read", math_answer, "", response, "")


def test_math_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    refuses(r"math-verify is not installed: .* -e '.\[math\]'", math_answer, "", "1", "1")


def test_an_own_reward_lies_beside_the_yaml_or_else_the_prompts(tmp_path: Path) -> None:
    """Both folders have a module of the same name; the import path, which children inherit, stays as it is."""
    for points, name in enumerate(("yaml", "prompts")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_reward.py").write_text(f"def exact(prompt, response, answer): return {points}\n")
    config, before, given = tmp_path / "yaml/job.yaml", list(sys.path), []
    options = {"path": f"{tmp_path}/prompts/train.jsonl", "reward": "own_reward:exact"}
    config.write_text(json.dumps({"task": {"kind": "jsonl", "options": options}}))
    for _ in range(2):
        given.append(load_reward(job.load(config).task.options["reward"])("", "", ""))
        (tmp_path / "yaml/own_reward.py").unlink(missing_ok=True)
    assert given == [0, 1] and sys.path == before
