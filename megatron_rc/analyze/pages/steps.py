"""Pictures over the steps of a run: the gap of each, and of each server."""

import math
from itertools import takewhile

from megatron_rc.analyze import report_text
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.evidence import Evidence
from megatron_rc.analyze.pages.card import card
from megatron_rc.analyze.statistics.decomposition import between
from megatron_rc.drawing.axes import linear_axis, tight_log_axis
from megatron_rc.drawing.heat_map import HeatMap, heat_map
from megatron_rc.drawing.series import Mark, Series
from megatron_rc.drawing.svg import Line, chart, line_chart, thinned

LONGEST_NAME = 7
"""Characters of a server's name that fit next to its row."""

LINEAR_UP_TO = 4.0
"""Factors that span more are drawn on a logarithmic axis."""
LEAST_SPAN = 1.0
"""Fewest decades of k3 that the colours span: hardware and tasks alone differ by a factor of less than 3."""


def servers(evidence: Evidence, share: bool) -> str:
    """Map of k3 by server and step; empty without these columns or with a single cell."""
    cells = evidence.k3_by_server_and_step
    if len(cells) < 2:
        return ""
    names, steps = sorted({name for name, _ in cells}), sorted({step for _, step in cells})
    logs = {cell: math.log10(k3) if k3 > 0 else math.nan for cell, k3 in cells.items()}
    values = [[logs.get((name, step), math.nan) for step in steps] for name in names]
    labels = [str(i) for i in range(len(names))] if share else short_names([str(name) for name in names])
    shown = HeatMap("k3 by server and step", "", "", values, labels, [str(step) for step in steps], "server", "step")
    return card(
        shown.title,
        heat_map(shown, least_span=LEAST_SPAN),
        "A row that is darker is a server with other weights or another kernel; a column is a step at which all of "
        "them were off; a row that darkens and then starts over is a server that was restarted.",
        "one colour.",
        "log10 of nats per token",
    )


def over_steps(diagnosis: Diagnosis) -> str:
    """k3 of each step, with its jumps; empty with a single step."""
    steps = [step for step in diagnosis.evidence.steps if step.k3 > 0]
    if len(steps) < 2:
        return ""
    marks = []
    if (line := diagnosis.timeline) is not None:
        marks = [Mark(jump.step, "jump") for jump in line.jumps]
        marks += [] if line.surge.step is None else [Mark(line.surge.step, "surge")]
    series = [Series("k3", [step.step for step in steps], [step.k3 for step in steps])]
    change = f"; {growth}" if (growth := report_text.growth(diagnosis)) else ""
    return card(
        "k3 over steps",
        line_chart(series, title="k3 over steps", logarithmic=True, marks=marks),
        f"The gap of each step{change}.",
        "flat; a slow rise with the entropy is the policy, a rise of sigma is the engine or the weights, a fall at a "
        "restart is a cache.",
        "nats per token",
    )


def split(diagnosis: Diagnosis) -> str:
    """What engine, entropy, tail and length multiply the gap by, step by step; empty where nothing can be split."""
    steps = diagnosis.evidence.steps
    first = diagnosis.decomposition
    if first is None or diagnosis.lagged:
        return ""
    before = [step for step in steps if step.step <= first.before.last_step]
    found = [(step.step, parts) for step in steps if (parts := between(before, [step])) is not None]
    if len(found) < 2:
        return ""
    places = [step for step, _ in found]
    by_part = zip(*(parts.parts for _, parts in found), strict=True)
    series = [Series(parts[0].name, places, [part.factor for part in parts]) for parts in by_part]
    values = [value for each in series for value in each.values]
    low, high = min(values), max(values)
    shown = [thinned(each) for each in series]
    lines = [Line(each.steps, each.values, f"c{i}", dots=True) for i, each in enumerate(shown)]
    horizontal = linear_axis(places[0], places[-1], whole=True)
    vertical = tight_log_axis(low, high) if high > LINEAR_UP_TO * low else linear_axis(low, high)
    drawn = chart(lines, horizontal, vertical, title="what multiplied the gap", across="step", hover=shown)
    of = report_text.steps_of(first.before.first_step, first.before.last_step)
    return card(
        "Engine, policy or length?",
        drawn,
        f"The gap of each step against {of}, as factors: k3 is multiplied by engine (sigma^2: kernels and weights), "
        "entropy (mean (1 - p)^2: how certain the policy is) and tail (a few tokens of large l); the gap of a whole "
        "response by length, too.",
        "engine and tail at 1; entropy follows the policy, length the responses.",
        legend=[(f"c{i}", each.label) for i, each in enumerate(series)],
    )


def short_names(names: list[str]) -> list[str]:
    """Names without the words that all of them begin or end with, cut if they are still too long."""
    first, last = _shared(names), _shared([name[::-1] for name in names])
    parts = [name[first : len(name) - last] for name in names]
    shown = parts if all(parts) else names
    return [name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}" for name in shown]


def _shared(names: list[str]) -> int:
    """Number of characters in the whole words that all names begin with."""
    shared = [letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))]
    return max((place + 1 for place, letter in enumerate(shared) if not letter.isalnum()), default=0)
