"""A job says when its correction drops most of a rollout, its clip acts on a fresh one, or no rewards differ."""

import re
from typing import Any

import pytest
from jobs import settings_file, started, train
from warm_models import TASK, warm_model

from megatron_rc import schema
from megatron_rc.correction.warnings import ClipPullWarning
from megatron_rc.report.log import read_metrics
from megatron_rc.settings.job import JobSettings

JOB: dict[str, Any] = {
    "task": TASK,
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8, "max_new_tokens": 6, "dtype": "fp32"},
    "train": {"steps": 3, "dtype": "fp32", "save_interval": 0, "save_hf": False, "eval_interval": 100},
}
CASES = {
    "dropped": ["correction={reject: [{level: token, lower: 1.5}]}", "train.steps=11", "rollout.prompts_per_step=2"],
    "exact sampler": ["correction.old=rollout"],
    "noise": ["correction.old=rollout", "rollout.amplify=0.4"],
    # a response needs a digit and the stop token
    "no reward": ["rollout.max_new_tokens=1", "train.steps=11", "rollout.prompts_per_step=2"],
}
CLIPPED = {"updates": 1.0, "clip_low": 0.04, "clip_high": 0.03}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[dict[str, Any]]]]:
    """What each job said, and its metrics."""
    folder = tmp_path_factory.mktemp("warnings")
    config = settings_file(folder, {**JOB, "model": {"hf_path": str(warm_model("dense", tmp_path_factory))}})
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


def test_the_warning_of_the_clip_names_the_share_and_comes_once() -> None:
    warning = watch()
    assert warning.see(CLIPPED | {"clip_low": 0.01}) is None
    assert "acts on 7% of the tokens of fresh rollouts" in (warning.see(CLIPPED) or "")
    assert warning.see(CLIPPED) is None


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


def test_a_job_with_a_sampler_that_is_off_warns(runs: Any) -> None:
    for name in ("exact sampler", "noise"):
        said, metrics = runs[name]
        clipped = [record["clip_low"] + record["clip_high"] for record in metrics]
        warned = re.findall(r"WARNING, step (\d+): the clip acts on (\d+)% of the tokens", said)
        if name == "exact sampler":
            assert clipped == [0.0] * 3 and not warned
        else:
            first = next(place for place, share in enumerate(clipped) if share > 0.05)
            assert warned == [(str(first + 1), f"{100 * clipped[first]:.0f}")]
