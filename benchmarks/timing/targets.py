"""What the kernels should reach on an H200, and what a run of the benchmark says about it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from timing.bench import OURS
from timing.head_forms import LOGITS, LOSS, MANY, MOST_MB, MOST_MS, Form
from timing.moved import logits_bytes
from timing.plan import HeadShape

Run = dict[str, Any]
"""The JSON of one run."""
Value = float | None

RECIPE, FLASH = "framework recipe", "flash-attention Triton"
HIDDEN = 4096
"""Width of the model whose output layer the logits are compared with."""


class Target(NamedTuple):
    text: str
    bound: float
    at_least: bool
    unit: str
    value: Callable[[Run], Value]
    beside: str = ""
    """What it is measured against, and why it is not higher."""
    counted: bool = False
    """A count, which needs no GPU."""

    def judge(self, *runs: Run | None) -> tuple[Value, str]:
        """(value, "met", "missed" or "" when nothing was measured), from the first run that has the value."""
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
    """Share of the bandwidth that the machine was measured to have: reading for forward, copying for backward."""
    rate, time = run["ceilings"]["read" if phase == "forward" else "copy"]["best"], figure(row, OURS, f"{phase}_us")
    return None if rate is None or time is None else logits_bytes(row, phase) / (time * 1e-6) / rate


def ratio(row: Run) -> Value:
    """Time of the best peer over ours, forward and backward."""
    peer = best_peer(row)
    return None if peer is None else _over(peer[1], both(row, OURS))


def of_head(run: Run, row: Run) -> Value:
    """Time of forward and backward over that of the matrix product that made the logits, at the measured bf16 rate."""
    rate, time = run["ceilings"]["matmul"]["best"], both(row, OURS)
    flop = 2 * row["tokens"] * HIDDEN * row["columns"]
    return None if rate is None or time is None else time * 1e-6 / (flop / rate)


def rows_of(run: Run, kind: str, **facts: Any) -> list[Run]:
    return [r for r in run["rows"] if r["kind"] == kind and all(r.get(name) == value for name, value in facts.items())]


def shapes_of(run: Run, **facts: Any) -> list[Run]:
    """The rows about logits, or none where one of the plan is missing: the worst of some is not the worst of all."""
    missing = [*run["skipped"], *(row["name"] for row in rows_of(run, "failed"))]
    return [] if any(name.startswith("logits") for name in missing) else rows_of(run, "logits", **facts)


def bytes_per_logit(run: Run, row: Run) -> Value:
    """What could have been moved at the measured rates in the time of forward and backward; 6 is the least in bf16."""
    shares = [share(run, row, phase) for phase in ("forward", "backward")]
    if None in shares:
        return None
    least = [logits_bytes(row, phase) for phase in ("forward", "backward")]
    moved = sum(amount / part for amount, part in zip(least, shares, strict=True))  # type: ignore[operator]
    return moved / (row["tokens"] * row["columns"])


def _worst_share(phase: str, one_rank: bool) -> Callable[[Run], Value]:
    return lambda run: _least(share(run, row, phase) for row in shapes_of(run) if (row["tp"] == 1) is one_rank)


def _most_bytes(outputs: str) -> Callable[[Run], Value]:
    return lambda run: _most(bytes_per_logit(run, row) for row in shapes_of(run, outputs=outputs, tp=1))


def _worst_ratio(run: Run) -> Value:
    rows = shapes_of(run, outputs="logprobs")
    # where no peer fits into memory there is nothing to be faster than
    return _least(ratio(row) for row in rows if best_peer(row) or both(row, OURS) is None)


def _flash_attention_ratio(run: Run) -> Value:
    rows = [row for row in shapes_of(run, outputs="logprobs") if FLASH in row["providers"]]
    return _least(_over(both(row, FLASH), both(row, OURS)) for row in rows)


def _over(theirs: Value, ours: Value) -> Value:
    return None if theirs is None or ours is None else theirs / ours


def _least(values: Iterable[Value]) -> Value:
    """The least of all of them, None when one is missing: a row that was not measured proves nothing."""
    found = list(values)
    return None if not found or None in found else min(found)  # type: ignore[type-var]


def _most(values: Iterable[Value]) -> Value:
    least = _least(None if value is None else -value for value in values)
    return None if least is None else -least


def _of_correct(name: str) -> Callable[[Run], Value]:
    return lambda run: next((figure(row, OURS, name) for row in rows_of(run, "correct", tokens=65_536)), None)


def _launches(kind: str) -> Callable[[Run], Value]:
    return lambda run: next((figure(row, OURS, "launches") for row in rows_of(run, kind)), None)


def _over_recipe(run: Run) -> Value:
    for row in rows_of(run, "correct", tokens=65_536):
        recipe, ours = figure(row, RECIPE, "wall_us"), figure(row, f"{OURS}, values()", "wall_us")
        return _over(recipe, ours)
    return None


def _bytes_per_token(run: Run) -> Value:
    return _most(
        None if (extra := figure(row, OURS, "extra_bytes")) is None else extra / row["tokens"]
        for row in shapes_of(run, outputs="logprobs, entropy")
    )


def head_us(row: Run, form: Form) -> Value:
    """Microseconds of one call that takes hidden states, with its backward if it has one."""
    return both(row, form.provider) if form.gradient else figure(row, form.provider, "forward_us")


def _of_head(form: Form, head: HeadShape, value: Callable[[Run], Value]) -> Callable[[Run], Value]:
    return lambda run: next((value(row) for row in rows_of(run, form.kind, **head._asdict())), None)


def _scaled(value: Value, by: float) -> Value:
    return None if value is None else value * by


def _head_targets() -> list[Target]:
    """The times and the memory of the head on an H200, and the memory of the longest batch over that of its logits."""
    times = [
        Target(f"{form.name}: {head.size}", most, False, "ms",
               _of_head(form, head, lambda row, f=form: _scaled(head_us(row, f), 1e-3)),  # type: ignore[misc]
               f"{form.operations} N H V operations; the table of the head says what is predicted")
        for (head, form), most in MOST_MS.items()
    ]  # fmt: skip
    peaks = [
        Target(f"{form.name}, memory beyond its inputs: {head.size}", most, False, "MB",
               _of_head(form, head, lambda row, f=form: _scaled(figure(row, f.provider, "extra_bytes"), 1e-6)),  # type: ignore[misc]
               "one chunk of logits or dW in bf16, and the gradient of the states")
        for (head, form), most in MOST_MB.items()
    ]  # fmt: skip
    share = Target(
        f"{LOSS.name}, memory beyond its inputs over that of logits in place: {MANY.size}", 1 / 7, False, "%",
        _of_head(LOSS, MANY, lambda row: _over(*(figure(row, f.provider, "extra_bytes") for f in (LOSS, LOGITS)))),
        "the same loss over logits whose gradient is in place; as many operations, so no gain in time is predicted",
    )  # fmt: skip
    return [*times, *peaks, share]


_BYTES = "at the measured bandwidth, bytes per logit, one rank, worst shape"
_SHARD = "a row is short there: its epilogue and the last wave weigh more"
_LEAST = "two passes move 6 at least; one pass would move 4, but a row would have to stay in the L2 cache"
_PEERS = "the fastest peer present that answers right; the best of them move 6 to 8 bytes per logit, as this does"

TARGETS = (
    Target("row statistics, share of the read bandwidth, one rank, worst shape", 0.90, True, "%",
           _worst_share("forward", one_rank=True), "the fastest read of the same card"),
    Target("row statistics, share of the read bandwidth, a tensor-parallel shard, worst shape", 0.75, True, "%",
           _worst_share("forward", one_rank=False), _SHARD),
    Target("row gradient, share of the copy bandwidth, one rank, worst shape", 0.92, True, "%",
           _worst_share("backward", one_rank=True), "the fastest copy of the same card"),
    Target("row gradient, share of the copy bandwidth, a tensor-parallel shard, worst shape", 0.85, True, "%",
           _worst_share("backward", one_rank=False), _SHARD),
    Target(f"log-probs and gradient, {_BYTES}", 6.6, False, "bytes", _most_bytes("logprobs"), _LEAST),
    Target(f"log-probs, entropy and gradient, {_BYTES}", 6.6, False, "bytes", _most_bytes("logprobs, entropy"), _LEAST),
    Target("log-probs and gradient: best peer's time / ours, worst shape", 1.0, True, "x", _worst_ratio, _PEERS),
    Target("log-probs and gradient: flash-attention's time / ours, worst shape", 1.0, True, "x",
           _flash_attention_ratio, "flash-attention's Triton file, its gradient in place, its group of one rank"),
    Target("`correct` on 65,536 tokens, replayed as a CUDA graph", 20.0, False, "µs", _of_correct("graph_us"),
           "three launches, each after the other; the bytes alone would take less than 1 µs"),
    Target("`correct` on 65,536 tokens, host time of the eager call", 150.0, False, "µs", _of_correct("host_us"),
           "Python and three launches"),
    Target("`correct` and its metrics as floats, framework recipe's wall time / ours", 10.0, True, "x", _over_recipe,
           "padded PyTorch, one `.item()` per metric"),
    Target("`correct`, launches", 4.0, False, "", _launches("correct"), "the same call on a CPU", counted=True),
    Target("update path, one rank, launches", 5.0, False, "", _launches("update"), "the same call on a CPU",
           counted=True),
    *_head_targets(),
    Target("log-probs, entropy and gradient, memory beyond the logits per token", 32.0, False, "bytes",
           _bytes_per_token, "the allocator's peak, gradient in place"),
)  # fmt: skip


def judgement(run: Run) -> str:
    """The targets and what a run says about each, a line each."""
    lines = []
    for target in TARGETS:
        value, verdict = target.judge(run)
        bound = f"{'>=' if target.at_least else '<='} {shown(target.bound, target.unit)}"
        lines.append(
            f"{verdict or 'not measured':12} {target.text}: {shown(value, target.unit) or '-'} (target {bound})"
        )
    return "\n".join(lines)


def shown(value: Value, unit: str) -> str:
    if value is None or math.isnan(value):
        return ""
    number = f"{100 * value:.1f}" if unit == "%" else f"{value:.2f}" if unit == "x" else f"{value:.4g}"
    return f"{number} {unit}".strip()
