"""A job whose clip on pi / mu acts on fresh rollouts says so, once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jobs import settings_file, started
from warm_models import TASK, warm_model

from megatron_rc import schema
from megatron_rc.alarms import ClipPullWarning
from megatron_rc.report.log import read_metrics
from megatron_rc.settings import JobSettings

CLIPPED = {"updates": 1.0, "clip_low": 0.04, "clip_high": 0.03}


def watch(**fields: Any) -> ClipPullWarning:
    return ClipPullWarning(schema.from_dict(JobSettings, {"correction": {"old": "rollout"}, **fields}))


def test_the_warning_names_the_share_and_comes_once() -> None:
    warning = watch()
    assert warning.see(CLIPPED | {"clip_low": 0.01}) is None
    assert "acts on 7% of the tokens of fresh rollouts" in (warning.see(CLIPPED) or "")
    assert warning.see(CLIPPED) is None


@pytest.mark.parametrize(
    ("fields", "metrics"),
    [
        ({"correction": {"old": "recompute"}}, CLIPPED),
        ({"rollout": {"staleness": 4}}, CLIPPED),
        ({"train": {"asynchronous": 1}}, CLIPPED),
        ({}, CLIPPED | {"updates": 2.0}),
        ({}, {"updates": 1.0}),
    ],
    ids=["recomputed", "stale", "asynchronous", "moved since", "no clip"],
)
def test_clipping_that_has_another_cause_warns_of_nothing(fields: dict[str, Any], metrics: dict[str, float]) -> None:
    assert watch(**fields).see(metrics) is None


@pytest.mark.parametrize("amplify", [0.0, 0.4], ids=["exact sampler", "noise"])
def test_a_job_with_a_sampler_that_is_off_warns(
    amplify: float, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings = {
        "model": {"hf_path": str(warm_model("dense", tmp_path_factory))},
        "task": TASK,
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 8,
            "max_new_tokens": 6,
            "dtype": "fp32",
            "amplify": amplify,
        },
        "correction": {"old": "rollout"},
        "train": {"steps": 3, "dtype": "fp32", "save_interval": 0, "save_hf": False, "eval_interval": 100},
    }
    status, said = started(settings_file(tmp_path, settings), "--set", f"output={tmp_path / 'out'}").wait()
    assert status == 0, said
    clipped = [record["clip_low"] + record["clip_high"] for record in read_metrics(tmp_path / "out/metrics.jsonl")[1:]]
    warned = re.findall(r"WARNING, step (\d+): the clip acts on (\d+)% of the tokens", said)
    if not amplify:
        assert clipped == [0.0] * 3 and not warned
    else:
        first = next(place for place, share in enumerate(clipped) if share > 0.05)
        assert warned == [(str(first + 1), f"{100 * clipped[first]:.0f}")]
