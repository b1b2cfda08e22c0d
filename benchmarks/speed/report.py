"""What a JSON of run.py says, as Markdown: every case, the targets and what was found.

python benchmarks/speed/report.py runs/gpu/gpu-<device>.json
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

from megatron_rc.jobs.describe import table
from speed.cases import Target, cases
from speed.head import IN_PLACE
from speed.peers import EAGER, NOBODY, OURS, TORCH

Value = float | None
Run = Mapping[str, Any]
PLAIN, NOT_RIGHT = ("framework recipe", EAGER, "dense mask"), ("failed", "wrong", "not measured")
Find = Callable[[Run, Run, str], Value]
"""(run, row, provider) -> what was measured, None where it was not, or where the answer was wrong."""


def figure(row: Run, provider: str, name: str) -> Value:
    found = row["providers"].get(provider, {})
    return None if "failed" in found or "wrong" in found else found.get(name)


def time_of(row: Run, provider: str) -> Value:
    """All phases, microseconds."""
    parts = [figure(row, provider, f"{phase}_us") for phase in ("forward", "backward", "call")]
    return sum(part for part in parts if part is not None) or None


def share(run: Run, row: Run, provider: str, phase: str) -> Value:
    """Share of the bandwidth that the card was measured to have: reading for forward, copying for backward."""
    rate = run.get("ceilings", {}).get("read" if phase == "forward" else "copy")
    seconds = over(figure(row, provider, f"{phase}_us"), 1e6)
    return over(over(row.get("bytes", {}).get(phase), seconds), rate)


def bytes_per_logit(run: Run, row: Run, provider: str) -> Value:
    """What could have been moved at the measured rates in the time of both passes."""
    moved = [over(row["bytes"][phase], share(run, row, provider, phase)) for phase in ("forward", "backward")]
    return None if None in moved else sum(moved) / (row["rows"] * row["columns"])  # type: ignore[arg-type]


def best_peer(row: Run) -> tuple[Value, str]:
    """The fastest that is not ours and answers right."""
    theirs = [name for name in row["providers"] if not name.startswith("megatron_rc")]
    return min(((time, name) for name in theirs if (time := time_of(row, name))), default=(None, ""))


def over(one: Value, other: Value) -> Value:
    return None if one is None or other is None else one / other


def _of(name: str, scale: float = 1.0) -> Find:
    return lambda run, row, provider: over(figure(row, provider, name), scale)


AT_LEAST = ("share of reading", "share of copying", "best peer's time / ours", "recipe's wall time / ours")
FIGURES: dict[str, Find] = {
    "launches": _of("launches"),
    "graph µs": _of("graph_us"),
    "host µs": _of("call_host_us"),
    "MB beyond its inputs": _of("extra_bytes", 1e6),
    "ms": lambda run, row, name: over(time_of(row, name), 1e3),
    "share of reading": lambda run, row, name: share(run, row, name, "forward"),
    "share of copying": lambda run, row, name: share(run, row, name, "backward"),
    "bytes per logit": bytes_per_logit,
    "extra bytes per token": lambda run, row, name: over(figure(row, name, "extra_bytes"), row["tokens"]),
    "best peer's time / ours": lambda run, row, name: over(best_peer(row)[0], time_of(row, name)),
    "recipe's wall time / ours": lambda run, row, name: over(
        time_of(row, "framework recipe"), time_of(row, f"{name}, values()")
    ),
    "memory / that of logits": lambda run, row, name: over(
        figure(row, name, "extra_bytes"), figure(row, IN_PLACE, "extra_bytes")
    ),
}


def judge(run: Run, target: Target, names: Iterable[str]) -> tuple[Value, str]:
    """(the worst of these cases, met or missed); None while one of them was not measured: it proves nothing."""
    rows = [run.get("rows", {}).get(name, {}) for name in names]
    found = [FIGURES[target.figure](run, row, target.provider) if "providers" in row else None for row in rows]
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return None, ""
    if target.figure in AT_LEAST:
        return min(known), "met" if min(known) >= target.bound else "missed"
    return max(known), "met" if max(known) <= target.bound else "missed"


def targets(run: Run) -> str:
    """A line per target, for all cases that share it."""
    card = run["machine"]["device"]
    groups: dict[Target, list[str]] = {}
    for case in cases(NOBODY, toy=card == "interpreter"):
        for target in case.targets:
            groups.setdefault(target, []).append(case.name)
    lines = []
    for target, names in groups.items():
        value, verdict = judge(run, target, names)
        of = names[0] if len(names) == 1 else f"{len(names)} cases, {names[0]} to {names[-1]}"
        bound = f"{'≥' if target.figure in AT_LEAST else '≤'} {target.bound:.4g}"
        lines.append([of, target.provider, target.figure, bound, shown(value), verdict])
    return table(("case", "of", "figure", "target (H200)", card, ""), lines)


def counted(run: Run) -> str:
    """Launches of both passes by provider, and the bytes that the interpreter counts over those of the formula."""
    lines = []
    for name, row in run["rows"].items():
        if "providers" not in row or row.get("tp", 1) > 1:
            continue
        ours = row["providers"][OURS]
        amount = sum(value for what, value in ours.items() if what.endswith("_bytes"))
        plain = next((other for other in PLAIN if other in row["providers"]), "")
        cells = [figure(row, who, "launches") for who in (OURS, TORCH, plain)] + [ours.get("waits")]
        lines.append([name, *map(shown, [*cells, over(amount, sum(row.get("bytes", {}).values()) or None)])])
    return table(("case", "launches", "PyTorch path", "plain PyTorch", "waits", "bytes / formula"), lines)


def times(run: Run) -> str:
    """Every case of a card: ours beside the fastest peer."""
    lines = []
    for name, row in run["rows"].items():
        if "providers" in row:
            (theirs, peer), ours = best_peer(row), time_of(row, OURS)
            cells = [over(ours, 1e3), *(share(run, row, OURS, phase) for phase in ("forward", "backward"))]
            cells += [over(over(row.get("flop"), over(ours, 1e6)), run["ceilings"]["matmul"])]
            cells += [figure(row, OURS, "graph_us"), figure(row, OURS, "launches")]
            cells += [over(figure(row, OURS, "extra_bytes"), row["tokens"]), over(theirs, ours)]
            lines.append([name, *map(shown, cells), peer])
    head = ("case", "ms", "of reading", "of copying", "of products", "graph µs", "launches", "extra bytes per token")
    return table((*head, "peer's time / ours", "fastest peer"), lines)


def amiss(run: Run) -> Iterator[tuple[str, str, str]]:
    """(row, provider, what) of those that failed, were wrong or were not measured; no provider of a whole row."""
    for name, row in run.get("rows", {}).items():
        for who, found in {"": row, **row.get("providers", {})}.items():
            yield from ((name, who, f"{what}: {found[what]}") for what in NOT_RIGHT if what in found)


def wrong(run: Run) -> list[str]:
    """Rows that failed and answers of ours that are not right; to be too large for the device is no wrong answer."""
    ours = [one for one in amiss(run) if not one[1] or one[1].startswith("megatron_rc")]
    return [": ".join(one) for one in ours if not one[2].startswith("not measured") and "OutOfMemory" not in one[2]]


def tables(run: Run) -> str:
    """All that a run says."""
    facts = [run[key] for key in ("machine", "peers", "ceilings", "stages") if key in run]
    parts = ["; ".join(f"{name}: {value}" for name, value in part.items()) for part in facts]
    parts += [": ".join(one) for one in amiss(run)]
    if "rows" in run:
        parts += ["", times(run) if "ceilings" in run else counted(run), targets(run)]
    return "\n".join(parts)


def shown(value: Value) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    print(tables(json.loads(Path(sys.argv[1]).read_text())))
