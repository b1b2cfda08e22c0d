"""What a user can mend is one sentence and a non-zero exit, and what a correction, a clip or rewards lack a warning."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from jobs import (
    DENSE,
    REWARDS,
    TASK,
    doctored,
    run_together,
    save_tiny_checkpoint,
    settings_file,
    started,
    train,
    warm_model,
)

from megatron_rc import schema
from megatron_rc.correction.warnings import CenteringWarning, ClipPullWarning, Note
from megatron_rc.report.log import read_metrics
from megatron_rc.schema import dump_yaml
from megatron_rc.settings.job import JobSettings

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


WARNED_JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 6, "dtype": "fp32"},
    "train": {"steps": 3, "dtype": "fp32", "save_interval": 0, "save_hf": False, "eval_interval": 100},
}
CASES = {
    "dropped": ["correction={reject: [{level: token, lower: 1.5}]}", "train.steps=11", "rollout.prompts_per_step=2"],
    "exact sampler": ["correction.old=rollout"],
    "noise": ["correction.old=rollout", "rollout.amplify=0.4", "train.steps=9"],
    "fixed noise": ["correction.old=rollout", "rollout.amplify=0.2", "rollout.amplify_fixed=true", "train.steps=9",
                    "rollout.prompts_per_step=24"],
    # a response needs a digit and the stop token
    "no reward": ["rollout.max_new_tokens=1", "train.steps=11", "rollout.prompts_per_step=2"],
}  # fmt: skip
CLIPPED = {"updates": 1.0, "clip_low": 0.04, "clip_high": 0.03}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("warnings")
    config = settings_file(folder, {**WARNED_JOB, "model": {"hf_path": str(warm_model("dense", tmp_path_factory))}})
    found = {}
    for name, chosen in CASES.items():
        status, said = started(config, *train(config, folder / name, *chosen)[2:]).wait()
        assert status == 0, said
        found[name] = said, read_metrics(folder / name)[1:]
    return found


def test_a_correction_that_drops_most_of_the_tokens_warns_once_in_ten_rollouts_with_their_numbers(runs: Any) -> None:
    said, metrics = runs["dropped"]
    assert all(record["old/masked_token"] > 0.5 for record in metrics)
    warnings = dict(re.findall(r"WARNING, step (\d+): (the correction drops 100% of the tokens: .*)", said))
    assert warnings.keys() == {"1", "11"}
    first, length = metrics[0], metrics[0]["old/response_length"]
    assert f"k3 is {first['old/k3']:.3g} nats per token and the mean length {length:.0f} tokens" in warnings["1"]


def test_a_job_whose_rewards_are_all_equal_says_once_in_ten_rollouts_that_it_updates_nothing(runs: Any) -> None:
    said, metrics = runs["no reward"]
    assert {record["updates"] for record in metrics} == {0.0}
    warning = r"WARNING, step (\d+): no group had two different rewards \(their mean is 0\), so there was no update"
    assert re.findall(warning, said) == ["1", "11"] and "no group had" not in runs["noise"][0]


def watch(**fields: Any) -> ClipPullWarning:
    settings = schema.from_dict(JobSettings, {"correction": {"old": "rollout"}, **fields})
    return ClipPullWarning(settings.correction, fresh=settings.fresh)


def seen(warning: ClipPullWarning, *persistence: float, **changed: float) -> list[str | None]:
    return [warning.see(CLIPPED | changed | {"persistence": each}) for each in persistence]


def test_the_clip_is_noted_at_once_and_warned_of_when_the_gap_has_persisted_for_five_rollouts() -> None:
    warning = watch()
    first = warning.see(CLIPPED | {"clip_low": 0.05})
    assert isinstance(first, Note) and "acts on 8.0% of the tokens of fresh rollouts" in first
    *before, last, after = seen(warning, 0.9, 0.8, 0.9, 0.6, 0.8, 0.9, clip_low=0.01)
    assert before == [None] * 4 and after is None and last is not None and not isinstance(last, Note)
    assert "acts on 4.0%" in last and "0.5 times the share of the first one" in last and "persistence 0.80" in last


def test_a_gap_that_is_new_at_every_sync_or_within_the_bounds_is_not_warned_of() -> None:
    anew = seen(watch(), 0.68, 0.94, -0.74, -0.42, 0.7, -0.91, 0.5, 0.5, 0.81, 0.52)
    assert isinstance(anew[0], Note) and anew[1:] == [None] * 9
    assert seen(watch(), *[0.9] * 9, clip_low=0.004, clip_high=0.004) == [None] * 9


@pytest.mark.parametrize(
    ("fields", "metrics"),
    [
        ({"correction": {"old": "recompute"}}, CLIPPED),
        ({"rollout": {"lag": 4}}, CLIPPED),
        ({"train": {"asynchronous": 1}}, CLIPPED),
        ({}, CLIPPED | {"updates": 2.0}),
        ({}, {"updates": 1.0}),
    ],
    ids=["recomputed", "stale", "asynchronous", "moved since", "no clip"],
)
def test_clipping_that_has_another_cause_warns_of_nothing(fields: dict[str, Any], metrics: dict[str, float]) -> None:
    assert watch(**fields).see(metrics) is None


def test_top_ids_that_say_too_little_are_warned_of_once_in_ten_rollouts() -> None:
    mass, clamped = "centering/top_rollout_mass", "centering/tail_ratio_clamped"
    warning = CenteringWarning()
    assert warning.see({}) is None and warning.see({mass: 0.95, clamped: 0.005}) is None
    said = [warning.see({mass: 0.825, clamped: 0.02}) for _ in range(11)]
    assert [bool(each) for each in said] == [True] + [False] * 9 + [True]
    assert "hold 82% of its probability and 2.0% of the tokens have a tail ratio" in str(said[0])
    assert "raise rollout.top_logprobs" in str(said[0])


def test_a_job_with_a_sampler_that_is_off_in_the_same_way_warns(runs: Any) -> None:
    found = {}
    for name in ("exact sampler", "noise", "fixed noise"):
        said, metrics = runs[name]
        # from the second rollout on, and 0 without a gap
        assert ["persistence" in record for record in metrics] == [False] + [True] * (len(metrics) - 1)
        found[name] = re.findall(r"(note|WARNING), step (\d+): the clip acts on", said)
    assert found["exact sampler"] == [] and [kind for kind, _ in found["noise"]] == ["note"]
    assert "WARNING" in dict(found["fixed noise"]), [record.get("persistence") for record in runs["fixed noise"][1]]
