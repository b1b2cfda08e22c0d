"""What a user can mend is one sentence naming the field, file or sequence, a non-zero exit, and no lost step."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, REWARDS, doctored, run_together, save_tiny_checkpoint, settings_file, train

from megatron_rc.report.log import read_metrics
from megatron_rc.schema import dump_yaml

JOB: dict[str, Any] = {
    "model": {"config": DENSE},
    "task": {"options": {"levels": {"2x1": 1.0}, "held_out": 3}},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    "train": {"steps": 3, "save_interval": 1, "eval_interval": 100, "save_hf": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings, a tokenizer with a tiny model, data files, rewards, and doctored recordings."""
    folder = tmp_path_factory.mktemp("bad")
    settings_file(folder, JOB)
    (folder / "grading.py").write_text(REWARDS)
    (folder / "not.yaml").write_text("train: [")
    (folder / "grid.yaml").write_text(dump_yaml({"job": JOB, "axes": {}}))
    others = [json.dumps({"prompt": f"d {i}", "answer": ""}) for i in range(9)]
    (folder / "good.jsonl").write_text("\n".join([json.dumps({"prompt": "a b", "answer": "c"})] * 4 + others))
    (folder / "held_out.jsonl").write_text(json.dumps({"prompt": "n o p", "answer": "held out"}))
    save_tiny_checkpoint(folder / "hf")
    return folder


def jsonl(folder: Path, file: str, reward: str, **options: Any) -> list[str]:
    chosen = {"path": str(folder / file), "reward": f"grading:{reward}", **options}
    task = json.dumps({"kind": "jsonl", "options": chosen})
    return [f"model.hf_path={folder / 'hf'}", "model.config={}", f"task={task}"]


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, tuple[int, str]]:
    """How every job of this file ended; those of one stage run in one process."""
    config = folder / "settings.yaml"

    def job(name: str, *assignments: str) -> list[str]:
        return train(config, folder / name, *assignments)

    reward = "raises_at_the_second_evaluation"
    failing = jsonl(folder, "good.jsonl", reward, held_out_path=str(folder / "held_out.jsonl"))
    first = {
        "good": [*job("good"), "--dump"],
        "wrong value": job("x", "train.lr=fast"),
        "not yaml": train(folder / "not.yaml", folder / "x"),
        "no such file": train(folder / "nothing.yaml", folder / "x"),
        "layout": job("x", "parallel.tensor=2"),
        "missing package": job("package", "log.mlflow=experiment"),
        "context": job("context", "model.config.max_position_embeddings=6"),
        "vocabulary": job("x", "model.config.vocab_size=8"),
        "no model": job("x", "model.hf_path=none/Qwen"),
        "a grid": train(folder / "grid.yaml", folder / "x"),
        "a job": ["grid", str(config)],
        "reward raises": job("raises", *jsonl(folder, "good.jsonl", "raises_later")),
        "evaluation raises": job("evaluation", *failing, "train.eval_interval=2", "train.save_interval=100"),
        "other shape": job("good", "model.config.hidden_size=64"),
        "not a job": ["report", str(folder / "hf")],
    }
    out = dict(zip(first, run_together(list(first.values()), folder, missing=["mlflow"]), strict=True))
    missing = doctored(folder, "missing", lambda v: v[:-1])
    nan = doctored(folder, "nans", lambda v: [math.nan] * len(v))
    second = {
        "missing log-prob": job("short", "rollout.engine=recorded", f"rollout.recorded_path={missing}"),
        "NaN log-prob": job("corrupt", "rollout.engine=recorded", f"rollout.recorded_path={nan}"),
        "no dump": job("x", "rollout.engine=recorded", f"rollout.recorded_path={folder / 'hf'}"),
    }
    return out | dict(zip(second, run_together(list(second.values()), folder), strict=True))


EXPECTED = {
    "wrong value": "train.lr: Input should be a valid number.*got 'fast'",
    "not yaml": "not.yaml is not valid YAML: .*line 1",
    "no such file": "no such file: .*nothing.yaml",
    "layout": "takes 2 processes, .* by torchrun .* 2 -m megatron_rc train .*settings.yaml --set .* parallel.tensor=2$",
    "missing package": r"log.mlflow needs the package mlflow: .* -e '.\[mlflow\]'",
    "context": "max_new_tokens=4 after a prompt of 4 tokens is longer than the model's context .* of 6",
    "vocabulary": "the tokenizer of task 'arithmetic' has 16 ids, .* is 8: set model.config.vocab_size=16",
    "no model": "hf_path='none/Qwen' has no config.json: .*hf download OWNER/Qwen --local-dir none/Qwen.*model.config",
    "a grid": "this is a grid of jobs: megatron-rc grid .*/grid.yaml",
    "a job": "this is one job, not a grid: megatron-rc train .*/settings.yaml",
    "reward raises": "grading.py:raises_later.*no such grade",
    "evaluation raises": "grading.py:raises_at_the_second_evaluation.*no such grade",
    "other shape": "good was made with other settings: model.config.hidden_size 32 -> 64; --fresh starts anew",
    "not a job": "holds no metrics.jsonl",
    "missing log-prob": "sample 1: the engine returned . log-probs for . tokens",
    "NaN log-prob": "nonfinite_share must be <= 0.01, got . of .* NaN or infinite log-probs",
    "no dump": "holds no dump",
}


@pytest.mark.parametrize("case", EXPECTED)
def test_the_sentence_names_what_to_mend(ended: dict[str, tuple[int, str]], case: str):
    status, said = ended[case]
    assert status == 2, said
    lines = [line for line in said.splitlines() if line.strip()]
    assert len(lines) == 1, said
    assert lines[0].startswith("megatron-rc: error: ")
    assert re.search(EXPECTED[case], lines[0]), lines[0]


@pytest.mark.parametrize(("output", "steps"), [("raises", 2), ("evaluation", 2), ("short", 1), ("corrupt", 1)])
def test_finished_steps_survive_an_error_in_a_later_one(ended: Any, folder: Path, output: str, steps: int):
    records = read_metrics(folder / output / "metrics.jsonl")
    assert [r["step"] for r in records if "reward/mean" in r] == list(range(1, steps + 1))
    assert (folder / output / "checkpoints" / f"rl-{steps:06d}" / "state.json").is_file()


def test_some_errors_are_found_before_anything_is_built_and_a_good_job_ends_with_0(ended: Any, folder: Path) -> None:
    for case, output in (("context", "context"), ("missing package", "package")):
        assert ended[case][0] == 2 and not (folder / output).exists()
    assert ended["good"][0] == 0, ended["good"][1]
