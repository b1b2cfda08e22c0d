"""Records of a small made-up run, and the log that holds them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rc.report.log import MetricsLog


def warmup(steps: Sequence[int]) -> list[dict[str, Any]]:
    return [{"phase": "warmup", "step": s, "cross_entropy": 2 / s} for s in steps]


def rl(steps: Sequence[int]) -> list[dict[str, Any]]:
    return [{"phase": "rl", "step": s, "reward/mean": s / 100, "old/k3": 1e-5 * (s + 1)} for s in steps]


def write_all(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    with MetricsLog(folder) as log:
        for record in records:
            log.write(record)
