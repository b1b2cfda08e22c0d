"""A training job computes the same with the Triton kernels as with plain PyTorch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, finished_job, settings_file

pytestmark = pytest.mark.interpreter

STEPS = 3
JOB: dict[str, Any] = {
    "task": {"options": {"levels": {"2x1": 1.0}, "held_out": 3}},
    "rollout": {"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 5, "top_p": 0.98, "amplify": 0.05},
    "correction": {
        "weight": {"level": "segment", "mode": "clip", "lower": 0.9, "upper": 1.1},
        "reject": [
            {"statistic": "ratio", "level": "sequence", "reduce": "mean", "lower": 0.9, "upper": 1.1},
            {"statistic": "k3", "level": "token", "upper": 0.02},
        ],
        "normalize": "batch",
    },
    "loss": {"dual_clip": 3.0, "kl_coef": 0.01, "entropy_coef": 0.01},
    "train": {
        "steps": STEPS,
        "optimizer": "sgd",
        "lr": 0.05,
        "micro_batches": 2,
        "eval_interval": 100,
        "backend": "torch",
    },
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that answers some problems."""
    folder = tmp_path_factory.mktemp("warm")
    run(
        folder,
        "warm",
        f"model.config={DENSE}",
        "warmup.steps=60",
        "warmup.lr=5e-3",
        "train.steps=0",
        "train.optimizer=adam",
    )
    return folder / "warm" / "hf"


def run(folder: Path, name: str, *assignments: str) -> dict[int, dict[str, Any]]:
    """Metrics of every reinforcement-learning step."""
    chosen = [f"output={folder / name}", *assignments]
    metrics = finished_job(settings_file(folder, JOB), "--dump", *(w for a in chosen for w in ("--set", a)))
    return {line["step"]: line for line in metrics if line["phase"] == "rl" and line["step"]}


@pytest.mark.parametrize("old", ["recompute", pytest.param("current", marks=pytest.mark.full)])
def test_replayed_steps_agree_in_loss_gradient_norm_and_every_metric(tmp_path: Path, warm: Path, old: str) -> None:
    assignments = [f"model.hf_path={warm}", f"correction.old={old}"]
    if old == "current":
        assignments.append("correction.normalize=none")
    torch = run(tmp_path, "torch", *assignments)
    replay = ["rollout.engine=replay", f"rollout.replay_path={tmp_path / 'torch' / 'dump'}"]
    triton = run(tmp_path, "triton", "train.backend=triton", "train.debug_checks=true", *replay, *assignments)
    assert len(torch) == STEPS and sum(step["updates"] for step in torch.values()) >= 2
    masked = [step["old/masked_token" if old == "recompute" else "current/masked_token"] for step in torch.values()]
    assert any(share > 0 for share in masked)
    for step, expected in torch.items():
        for name, value in expected.items():
            if isinstance(value, float) and not name.startswith(("time/", "tokens_per_second", "eval/")):
                same = math.isnan(value) and math.isnan(triton[step][name])
                assert same or triton[step][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)
