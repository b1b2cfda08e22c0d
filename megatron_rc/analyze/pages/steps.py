"""Pictures over the steps of a run: the gap of each, and of each server."""

from __future__ import annotations

import math
from itertools import takewhile

from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.honesty import Honesty
from megatron_rc.analyze.pages.card import Card
from megatron_rc.report.curves import Series
from megatron_rc.report.heat_map import heat_map
from megatron_rc.report.route_maps import HeatMap
from megatron_rc.report.svg import line_chart

LONGEST_NAME = 9
"""Characters of a server's name that fit beside its row."""

LEAST_SPAN = 1.0
"""Decades of k3 that the colours span at least: hardware and tasks differ by a factor of less than 3."""


def servers(evidence: Evidence, share: bool) -> str:
    """Map of k3 by server and step; empty without these columns or with a single cell."""
    cells = evidence.k3_by_server_and_step
    if len(cells) < 2:
        return ""
    names, steps = sorted({name for name, _ in cells}), sorted({step for _, step in cells})
    values = [[_log10(cells.get((name, step), math.nan)) for step in steps] for name in names]
    labels = [str(i) for i in range(len(names))] if share else short_names([str(name) for name in names])
    shown = HeatMap("k3 by server and step", "", "", values, labels, [str(step) for step in steps], "server", "step")
    return Card(
        shown.title,
        heat_map(shown, least_span=LEAST_SPAN),
        "A row that is darker is a server with other weights or another kernel; a column is a step at which all of "
        "them were off; a row that darkens and then starts anew was restarted.",
        "one colour.",
        "log10 of nats per token",
    ).html()


def over_steps(evidence: Evidence) -> str:
    """k3 of each step and where its change comes from; empty with a single step."""
    panels = {int(step): panel for step, panel in evidence.by_step.items() if panel.k3 > 0}
    if len(panels) < 2:
        return ""
    series = [Series("k3", list(panels), [panel.k3 for panel in panels.values()])]
    steps = sorted(panels)
    change = _change(steps[0], panels[steps[0]], steps[-1], panels[steps[-1]])
    return Card(
        "k3 over steps",
        line_chart(series, title="k3 over steps", logarithmic=True),
        f"The gap of each step. {change}",
        "flat; a slow rise with the entropy is the policy, a rise of sigma is the engine or the weights, a fall at a "
        "restart is a cache.",
        "nats per token",
    ).html()


def _change(first: int, start: Honesty, last: int, end: Honesty) -> str:
    """The change of k3 as that of sigma^2 times that of mean (1 - p)^2, exact where k3 is half of mean l^2."""
    text = f"From step {first} to {last} it changed {end.k3 / start.k3:.2f}-fold"
    if not start.sigma or not end.sigma:
        return f"{text}."
    noise = (end.sigma / start.sigma) ** 2
    return (
        f"{text}: {noise:.2f}-fold by the noise (sigma^2, from {start.sigma:.3f} to {end.sigma:.3f}) and "
        f"{end.k3 / start.k3 / noise:.2f}-fold because the tokens became more or less certain."
    )


def _log10(value: float) -> float:
    return math.log10(value) if value > 0 else math.nan


def short_names(names: list[str]) -> list[str]:
    """Names without the words that all of them begin and end with, cut where they are still too long."""
    first, last = _shared(names), _shared([name[::-1] for name in names])
    parts = [name[first : len(name) - last] for name in names]
    shown = parts if all(parts) else names
    return [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in shown]


def _shared(names: list[str]) -> int:
    """Characters of the whole words with which all names begin."""
    shared = [letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))]
    return max((place + 1 for place, letter in enumerate(shared) if not letter.isalnum()), default=0)
