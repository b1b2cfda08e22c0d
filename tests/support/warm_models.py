"""Checkpoints of policies that answer some problems, and what the recordings of jobs on them are compared by."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jobs import DENSE, MOE, finished_job, settings_file

TASK: dict[str, Any] = {"options": {"levels": {"2x1": 1.0}, "held_out": 3}}
MODELS = {"dense": DENSE, "moe": MOE}


def warm_model(kind: str, factory: pytest.TempPathFactory) -> Path:
    """The session's checkpoint of that kind, for jobs that need no warm-up: whoever comes first trains it."""
    worker = "PYTEST_XDIST_WORKER" in os.environ
    folder = factory.getbasetemp().parent if worker else factory.getbasetemp()
    output = folder / f"warm-{kind}"
    with open(folder / f"warm-{kind}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (output / "hf/config.json").exists():
            warmup = {"steps": 100, "lr": 5e-3, "batch_size": 64}
            settings = {"model": {"config": MODELS[kind]}, "task": TASK, "warmup": warmup, "train": {"steps": 0}}
            finished_job(settings_file(folder / f"warm-{kind}-settings", settings), "--set", f"output={output}")
    return output / "hf"


def timeless(records: list[dict[str, Any]], *others: str) -> list[dict[str, Any]]:
    """The records without their times, and without ``others``."""
    left_out = ("tokens_per_second", *others)
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k not in left_out} for r in records]


def doctored(folder: Path, name: str, change: Callable[[list[float]], list[float]]) -> str:
    """A recording of a good run in which the log-probs of one response of step 2 were changed."""
    target = folder / name
    target.mkdir()
    for file in sorted((folder / "good" / "dump").glob("*.parquet")):
        table = pq.read_table(file)
        if file.name == "step-000002.parquet":
            column = table["rollout_logprobs"].to_pylist()
            column[1] = change(column[1])
            place = table.schema.get_field_index("rollout_logprobs")
            table = table.set_column(place, table.schema.field(place), pa.array(column, table.schema.field(place).type))
        pq.write_table(table, target / file.name)
    return str(target)
