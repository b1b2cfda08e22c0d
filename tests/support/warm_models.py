"""Checkpoints of policies that answer some problems, for jobs that start from one instead of warming up themselves."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, MOE, finished_job, settings_file

TASK: dict[str, Any] = {"options": {"levels": {"2x1": 1.0}, "held_out": 3}}
MODELS = {"dense": DENSE, "moe": MOE}


def warm_model(kind: str, factory: pytest.TempPathFactory) -> Path:
    """The session's checkpoint of that kind: whoever comes first, on whichever xdist worker, trains it."""
    worker = "PYTEST_XDIST_WORKER" in os.environ
    folder = factory.getbasetemp().parent if worker else factory.getbasetemp()
    output = folder / f"warm-{kind}"
    with open(folder / f"warm-{kind}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / "hf/config.json").exists():
            warmup = {"steps": 100, "lr": 5e-3}
            settings = {"model": {"config": MODELS[kind]}, "task": TASK, "warmup": warmup, "train": {"steps": 0}}
            config = settings_file(folder / f"warm-{kind}-settings", settings)
            finished_job(config, "--set", f"output={output}")
    return output / "hf"
