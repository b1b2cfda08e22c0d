"""What the kernels should reach on an H200, and what a run of the benchmark says about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kernel_bench import OURS
from kernel_model import logits_bytes

Run = dict[str, Any]
"""The JSON of one run."""
Value = float | None

RECIPE = "framework recipe"
HIDDEN = 4096
"""Width of the model whose output layer the logits are compared with."""


class Target(NamedTuple):
    text: str
    bound: float
    at_least: bool
    unit: str
    value: Callable[[Run], Value]
    counted: bool = False
    """A count, which needs no GPU."""

    def judge(self, *runs: Run | None) -> tuple[Value, str]:
        """(found, "met", "missed" or "" when nothing was measured) of the first run that tells."""
        tell = [run for run in runs if run is not None and (self.counted or run["device"]["kind"] == "cuda")]
        value = next((found for run in tell if (found := self.value(run)) is not None), None)
        if value is None:
            return None, ""
        return value, "met" if (value >= self.bound if self.at_least else value <= self.bound) else "missed"


def figure(row: Run, provider: str, name: str) -> Value:
    """What was measured, None where it was not, or where the answer was wrong."""
    found = row["providers"].get(provider, {})
    return found["measured"].get(name) if found.get("correct") else None


def both(row: Run, provider: str) -> Value:
    """Forward and backward, microseconds."""
    parts = [figure(row, provider, f"{phase}_us") for phase in ("forward", "backward")]
    return None if None in parts else sum(parts)  # type: ignore[arg-type]


def best_peer(row: Run) -> tuple[str, float] | None:
    """The fastest that is not ours, answers right, and can be used at this tensor-parallel size."""
    times = {
        name: time
        for name, provider in row["providers"].items()
        if not name.startswith("megatron_rc")
        and (row["tp"] == 1 or provider.get("vocab_parallel") or "entropy" in row["outputs"])
        and (time := both(row, name)) is not None
    }
    return min(times.items(), key=lambda item: item[1]) if times else None


def share(run: Run, row: Run, phase: str) -> Value:
    """Of the bandwidth that the machine was measured to have: reading for forward, copying for backward."""
    rate, time = run["ceilings"]["read" if phase == "forward" else "copy"]["best"], figure(row, OURS, f"{phase}_us")
    return None if rate is None or time is None else logits_bytes(row, phase) / (time * 1e-6) / rate


def ratio(row: Run) -> Value:
    """Time of the best peer over ours, forward and backward."""
    peer, ours = best_peer(row), both(row, OURS)
    return None if peer is None or ours is None else peer[1] / ours


def of_head(run: Run, row: Run) -> Value:
    """Time of forward and backward over that of the matrix product that made the logits, at the measured bf16 rate."""
    rate, time = run["ceilings"]["matmul"]["best"], both(row, OURS)
    flop = 2 * row["tokens"] * HIDDEN * row["columns"]
    return None if rate is None or time is None else time * 1e-6 / (flop / rate)


def rows_of(run: Run, kind: str, **facts: Any) -> list[Run]:
    return [r for r in run["rows"] if r["kind"] == kind and all(r.get(name) == value for name, value in facts.items())]


def _worst_share(phase: str) -> Callable[[Run], Value]:
    return lambda run: _least(share(run, row, phase) for row in rows_of(run, "logits"))


def _worst_ratio(chosen: Callable[[Run], bool]) -> Callable[[Run], Value]:
    def worst(run: Run) -> Value:
        rows = [row for row in rows_of(run, "logits") if chosen(row)]
        # where no peer fits into memory there is nothing to be faster than
        return _least(ratio(row) for row in rows if best_peer(row) or both(row, OURS) is None)

    return worst


def _least(values: Iterator[Value]) -> Value:
    """The least of all of them, None when one is missing: a row that was not measured proves nothing."""
    found = list(values)
    return None if not found or None in found else min(found)  # type: ignore[type-var]


def _of_correct(name: str) -> Callable[[Run], Value]:
    return lambda run: next((figure(row, OURS, name) for row in rows_of(run, "correct", tokens=65_536)), None)


def _launches(kind: str) -> Callable[[Run], Value]:
    return lambda run: next((figure(row, OURS, "launches") for row in rows_of(run, kind)), None)


def _over_recipe(run: Run) -> Value:
    for row in rows_of(run, "correct", tokens=65_536):
        recipe, ours = figure(row, RECIPE, "wall_us"), figure(row, f"{OURS}, values()", "wall_us")
        return None if recipe is None or ours is None else recipe / ours
    return None


def _bytes_a_token(run: Run) -> Value:
    found = [
        None if (extra := figure(row, OURS, "extra_bytes")) is None else extra / row["tokens"]
        for row in rows_of(run, "logits", outputs="logprobs, entropy")
    ]
    return None if not found or None in found else max(found)  # type: ignore[type-var]


TARGETS = (
    Target("row statistics, share of the read bandwidth, worst shape", 0.92, True, "%", _worst_share("forward")),
    Target("row gradient, share of the copy bandwidth, worst shape", 0.92, True, "%", _worst_share("backward")),
    Target(
        "log-probs and gradient, one rank: best peer's time / ours, worst shape",
        *(1.0, True, "x", _worst_ratio(lambda row: row["tp"] == 1 and row["outputs"] == "logprobs")),
    ),
    Target(
        "log-probs and gradient of a tensor-parallel shard: best vocabulary-parallel peer's time / ours, worst shape",
        *(1.5, True, "x", _worst_ratio(lambda row: row["tp"] > 1 and row["outputs"] == "logprobs")),
    ),
    Target(
        "log-probs, entropy and the gradient of both: best peer's time / ours, worst shape",
        *(1.5, True, "x", _worst_ratio(lambda row: row["outputs"] != "logprobs")),
    ),
    Target("`correct` on 65,536 tokens, replayed as a CUDA graph", 12.0, False, "µs", _of_correct("graph_us")),
    Target("`correct` on 65,536 tokens, host time of the eager call", 150.0, False, "µs", _of_correct("host_us")),
    Target("`correct` and its metrics as floats, framework recipe's wall time / ours", 15.0, True, "x", _over_recipe),
    Target("`correct`, launches", 4.0, False, "", _launches("correct"), counted=True),
    Target("update path, one rank, launches", 5.0, False, "", _launches("update"), counted=True),
    Target("log-probs, entropy and gradient, memory beyond the logits a token", 32.0, False, "bytes", _bytes_a_token),
)


def shown(value: Value, unit: str) -> str:
    if value is None or math.isnan(value):
        return ""
    number = f"{100 * value:.1f}" if unit == "%" else f"{value:.2f}" if unit == "x" else f"{value:.4g}"
    return f"{number} {unit}".strip()
