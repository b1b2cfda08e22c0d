"""A training sample of slime or miles as a row: both keep the same columns.

Their ``rewards`` are normalised within the group and are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_rc.analyze.readers import rows
from megatron_rc.analyze.readers.torch_file import value_of

LOG_PI, LOG_MU = "log_probs", "rollout_log_probs"
PER_TOKEN = {"loss_mask": "loss_masks", "entropy": "entropy", "advantage": "advantages"}
"""Columns of response tokens by their name here, with the name of the host."""

READ = (
    LOG_PI,
    LOG_MU,
    *PER_TOKEN.values(),
    "tokens",
    "response_lengths",
    "total_lengths",
    "truncated",
    "weight_versions",
)
"""Columns that are read from disk."""


def row_of(sample: Mapping[str, Any], known: Mapping[str, Any]) -> rows.Row:
    """The response of a sample; ``known`` holds columns of the sequence that stand elsewhere in the file."""
    # routes and images may be many times as large as all of these
    values = {name: value_of(sample[name]) for name in READ if name in sample}
    response, total = (rows.size(values.get(name), name) for name in ("response_lengths", "total_lengths"))
    log_pi, log_mu = (rows.log_probs(values.get(name), name) for name in (LOG_PI, LOG_MU))
    columns = {name: values[key] for name, key in PER_TOKEN.items() if values.get(key) is not None}
    tokens = {n: (rows.flags if n == "loss_mask" else rows.numbers)(v, PER_TOKEN[n]) for n, v in columns.items()}
    if values.get("tokens") is not None:
        ids = rows.whole_numbers(values["tokens"], "tokens")
        if ids.size != total:
            raise rows.BadRow(f"tokens has {ids.size} values, total_lengths says {total}")
        tokens["token_id"] = ids[total - response :]
    for name, column in {LOG_PI: log_pi, LOG_MU: log_mu, **tokens}.items():
        if column.size != response:
            raise rows.BadRow(f"{name} has {column.size} values, response_lengths says {response}")
    if total < response:
        raise rows.BadRow(f"total_lengths says {total}, response_lengths says {response}")
    if (version := only_version(values.get("weight_versions"))) is not None:
        tokens["version"] = np.full(response, version, dtype=np.int64)
    sequence: dict[str, Any] = {"prompt_length": total - response, **known}
    if values.get("truncated") is not None:
        sequence["finish_reason"] = "length" if rows.size(values["truncated"], "truncated") else "stop"
    return rows.Row(log_pi, log_mu, tokens, sequence)


def only_version(versions: Any) -> int | None:
    """The version of the weights where all turns of a sample have the same number; the host does not say which tokens
    belong to which turn."""
    numbers = set(map(str, versions)) if isinstance(versions, list) and {*map(type, versions)} <= {str, int} else set()
    text = numbers.pop() if len(numbers) == 1 else ""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 18 else None
