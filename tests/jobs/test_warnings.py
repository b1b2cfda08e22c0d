"""A job says when its correction drops most of a rollout, its clip acts on a fresh one, or no rewards differ."""

import re
from typing import Any

import pytest
from jobs import TASK, settings_file, started, train, warm_model

from megatron_rc import schema
from megatron_rc.correction.warnings import CenteringWarning, ClipPullWarning, Note
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
