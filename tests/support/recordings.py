"""A job that is long enough to be interrupted, and what its recordings are compared by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from warm_models import TASK

LONG_JOB: dict[str, Any] = {
    "task": TASK,
    "warmup": {"steps": 2, "lr": 1e-3, "batch_size": 32},
    "rollout": {"prompts_per_step": 6, "samples_per_prompt": 4, "max_new_tokens": 6},
    "correction": "token-tis",
    "train": {"steps": 8, "lr": 1e-3, "lr_decay_style": "cosine", "save_interval": 3, "eval_interval": 2},
}
"""It starts from the dense checkpoint of `warm_models`, and warms up for the sake of the two phases."""


def timeless(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("time/") and k != "tokens_per_second"} for r in records]


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
