"""The tables of docs/gradients.md, from the committed rows."""

import math
import statistics
from collections.abc import Sequence

from gradients.rows import MEASURED, Z90, Row
from megatron_rc.jobs.describe import table


def page(rows: Sequence[Row]) -> str:
    """The tables at the end of the page."""
    oldest = "## Rollouts as old as those of the run, lowest to highest over its checkpoints"
    return f"{_checkpoints(rows)}\n{oldest}\n\n{_glance(rows)}\n## All rows\n\n{all_rows(rows)}"


def all_rows(rows: Sequence[Row]) -> str:
    """One line per row."""
    heads = ("step", "lag", "k3", "estimator", "cosine", "norm ratio", "bias²", "variance", "dropped", "A", "B", "C")
    lines = []
    for r in rows:
        *most, progress = [_between(getattr(r, name), getattr(r, f"{name}_error")) for name in MEASURED]
        terms = [f"{r.dropped:.1%}", *(f"{term:.2g}" for term in (r.a, r.b, r.c))]
        lines.append([f"{r.step}", f"{r.lag}", f"{r.k3:.2g}", f"`{r.estimator}`", *most, *terms, progress])
    return table((*heads, "best progress"), lines)


def _checkpoints(rows: Sequence[Row]) -> str:
    """What is known of g* and the rollouts at each checkpoint."""
    heads = ("step", "lag", "k3", "T / T*", "tokens", "‖g*‖", "cosine of its halves", "η", "L")
    lines = []
    for r in {(r.step, r.lag): r for r in rows if r.lag}.values():
        gap = [f"{r.step}", f"{r.lag}", f"{r.k3:.2g}", f"{r.horizon_ratio:.2g}", f"{r.length:.1f}"]
        exact = [f"{r.exact_norm:.2f}", f"{r.halves_cosine:.2f}", f"{r.lr:.2g}"]
        lines.append([*gap, *exact, f"{r.curvature:.2g} ± {Z90 * r.curvature_error:.1g}"])
    return table(heads, lines)


def _glance(rows: Sequence[Row]) -> str:
    """Each estimator's lowest to highest value over the checkpoints, the best mean progress first."""
    oldest = max(r.lag for r in rows)
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.lag in (0, oldest):
            groups.setdefault(row.estimator, []).append(row)
    order = sorted(groups, key=lambda name: -statistics.fmean(r.progress for r in groups[name]))
    lines = []
    for name in order:
        members = groups[name]
        values = [[getattr(r, field) for r in members] for field in ("cosine", "norm_ratio", "variance", "progress")]
        lines.append([f"`{name}`", *(f"{min(v):.2f} to {max(v):.2f}" for v in values)])
    return table(("estimator", "cosine", "norm ratio", "variance", "best progress"), lines)


def _between(value: float, error: float) -> str:
    """The value and half of its 90 % interval."""
    return "" if math.isnan(value) else f"{value:.2f} ± {Z90 * error:.2f}"
