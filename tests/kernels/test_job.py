"""A training job computes the same with the Triton kernels as with plain PyTorch."""

import math
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, finished_job, letters_task, save_tiny_checkpoint, settings_file

pytestmark = pytest.mark.interpreter

STEPS = 2
JOB: dict[str, Any] = {
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
    "train": {"steps": STEPS, "optimizer": "sgd", "lr": 0.05, "micro_batches": 2, "eval_interval": 100,
              "backend": "torch"},
}  # fmt: skip


def run(folder: Path, name: str, *assignments: str) -> dict[int, dict[str, Any]]:
    chosen = [f"output={folder / name}", *assignments]
    settings = settings_file(folder, JOB | {"task": letters_task(folder)})
    metrics = finished_job(settings, "--dump", *(w for a in chosen for w in ("--set", a)))
    return {line["step"]: line for line in metrics if line["phase"] == "rl" and line["step"]}


@pytest.mark.parametrize("old", ["recompute", pytest.param("current", marks=pytest.mark.full)])
def test_replayed_steps_agree_in_loss_gradient_norm_and_every_metric(tmp_path: Path, old: str) -> None:
    # certain enough of its letters for the bounds above to be crossed
    save_tiny_checkpoint(tmp_path / "hf", DENSE | {"initializer_range": 0.3})
    assignments = [f"model.hf_path={tmp_path / 'hf'}", f"correction.old={old}"]
    if old == "current":
        assignments.append("correction.normalize=none")
    torch = run(tmp_path, "torch", *assignments)
    replay = ["rollout.engine=recorded", f"rollout.recorded_path={tmp_path / 'torch' / 'dump'}"]
    triton = run(tmp_path, "triton", "train.backend=triton", "train.debug_checks=true", *replay, *assignments)
    assert len(torch) == STEPS and sum(step["updates"] for step in torch.values()) >= 2
    masked = [step["old/masked_token" if old == "recompute" else "current/masked_token"] for step in torch.values()]
    assert any(share > 0 for share in masked)
    for step, expected in torch.items():
        for name, value in expected.items():
            if isinstance(value, float) and not name.startswith(("time/", "tokens_per_second", "eval/")):
                same = math.isnan(value) and math.isnan(triton[step][name])
                assert same or triton[step][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)
