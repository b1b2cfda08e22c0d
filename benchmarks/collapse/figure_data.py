"""The numbers that each figure shows, from the committed results alone."""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from collapse.intervals import Interval, log_rank, mean, median, share, survival
from collapse.rows import SIGNALS, UNSEEN, Row
from collapse.rules import later_than_k3
from collapse.runs import PLAIN, Results, by_arm, is_exact, lives

Data = dict[str, Any]
Kind = Literal["curves", "strength", "survival", "diagram", "controls", "order"]
SHALLOW = 0.01
"""Gaps of a smaller T / T* are counted together."""
BEFORE, AFTER = 50, 20
"""Steps before and after a fall that curves are shown for."""


@dataclass(frozen=True)
class FigureSettings:
    """One figure of the page."""

    name: str
    """The name of its file in docs/images/collapse, without the ending."""
    kind: Kind
    title: str
    arms: dict[str, dict[str, Any]]
    """Maps the label of an arm to the columns of its runs; without `lr`, those of the usual learning rate count."""
    columns: int = 3
    """Panels side by side."""


class Picture(NamedTuple):
    """One drawing of a figure."""

    name: str
    runs: list[Row]
    data: Data


def pictures(figure: FigureSettings, results: Results) -> list[Picture]:
    """The drawings of a figure: one per world whose runs make at least two arms, or one of all worlds.

    The world with most runs comes first, and its drawing has the name of the figure.
    Survival is drawn where the first arm has runs, with which the others are compared.
    """
    arms = {label: results.select(PLAIN | where) for label, where in figure.arms.items()}
    if figure.kind in ("diagram", "order"):
        return _picture(figure, figure.name, figure.title, arms, results)
    drawn = []
    labels = results.worlds()
    sizes = Counter(row.world for row in results.rows)
    for world, label in sorted(labels.items(), key=lambda pair: (-sizes[pair[0]], pair[1])):
        lr = Counter(row.lr for row in results.rows if row.world == world).most_common(1)[0][0]
        here = {
            name: [row for row in rows if row.world == world and ("lr" in figure.arms[name] or row.lr == lr)]
            for name, rows in arms.items()
        }
        compared = figure.kind != "survival" or next(iter(here.values()))
        if compared and sum(map(bool, here.values())) > 1:
            name = figure.name if not drawn else f"{figure.name}-{world}"
            drawn += _picture(figure, name, f"{figure.title} ({label})", here, results)
    return drawn


def _picture(
    figure: FigureSettings, name: str, title: str, arms: Mapping[str, Sequence[Row]], results: Results
) -> list[Picture]:
    arms = {label: rows for label, rows in arms.items() if rows}
    data = MADE[figure.kind](arms, results) if arms else {}
    if not any(data.values()):
        return []
    runs = {(row.stage, *row.key): row for rows in arms.values() for row in rows}
    shown = _plain({"title": title, "columns": figure.columns, **data})
    return [Picture(name, list(runs.values()), shown)]


def digest(data: Data) -> str:
    """Fingerprint of the numbers of a figure, which its file carries."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _curves(arms: Mapping[str, Sequence[Row]], results: Results) -> Data:
    """All seeds of every arm, and their mean."""
    panels = {}
    for label, rows in arms.items():
        curves = {row.seed: [(point.step, point.accuracy) for point in results.curve(row)] for row in rows}
        seeds = {seed: [pair for pair in curve if not math.isnan(pair[1])] for seed, curve in curves.items()}
        hits, runs = results.count(rows, "failed")
        panels[label] = {"seeds": seeds, "mean": _mean_line(list(seeds.values())), "failed": hits, "runs": runs}
        panels[label]["grad_norm"] = _known_mean(rows, "grad_norm")
    exact = next((panels[label]["mean"] for label, rows in arms.items() if all(map(is_exact, rows))), [])
    return {"panels": panels, "exact": exact}


def _mean_line(lines: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, float]]:
    """Mean at the steps that all seeds have."""
    shared = set.intersection(*({step for step, _ in line} for line in lines)) if lines else set()
    return [(step, float(np.mean([dict(line)[step] for line in lines]))) for step in sorted(shared)]


def _strength(arms: Mapping[str, Sequence[Row]], results: Results) -> Data:
    """Share of failures of every strength of an arm, at the early k3 of runs with the same gap that correct nothing.

    Empty unless two arms have a gap that shows in k3: there would be nothing to compare.
    """
    series = {}
    for label, rows in arms.items():
        points = []
        for strength in sorted({(row.mechanism, row.strength) for row in rows}):
            runs = [row for row in rows if (row.mechanism, row.strength) == strength]
            hits, known = results.count(runs, "failed")
            if known:
                logs = [math.log(max(row.k3_early, UNSEEN / 2)) for row in results.uncorrected(runs[0])]
                k3 = float(np.exp(np.mean(logs)))
                points.append({"k3": k3, "share": list(share(hits, known)), "runs": len(runs), "strength": strength[1]})
        series[label] = sorted(points, key=lambda point: point["k3"])
    compared = sum(any(point["k3"] >= UNSEEN for point in points) for points in series.values())
    return {"series": {label: points for label, points in series.items() if points}} if compared > 1 else {}


def _survival(arms: Mapping[str, Sequence[Row]], results: Results) -> Data:
    """Share of runs that have not collapsed, and the log-rank test of every arm against the first."""
    first = next(iter(arms))
    series = {}
    for label, rows in arms.items():
        group = lives(rows)
        end = max(life.step for life in group)
        p = None if label == first else log_rank(group, lives(arms[first])).p
        series[label] = {"curve": survival(group), "end": end, "runs": len(group), "p": p}
    return {"series": series}


def _diagram(arms: Mapping[str, Sequence[Row]], results: Results) -> Data:
    """Share of failures of every group of seeds, by learning rate and T/T* of runs that correct nothing."""
    panels = {}
    for label, rows in arms.items():
        together: dict[tuple[float, float], list[Row]] = {}
        for arm, runs in by_arm(rows).items():
            depth = float(np.median([row.depth for row in results.uncorrected(runs[0])]))
            together.setdefault((max(depth, SHALLOW), arm.lr), []).extend(runs)
        counts = {place: results.count(runs, "failed") for place, runs in sorted(together.items())}
        panels[label] = [
            {"depth": depth, "lr": lr, "share": hits / known, "runs": known}
            for (depth, lr), (hits, known) in counts.items()
            if known
        ]
    return {"panels": {label: cells for label, cells in panels.items() if cells}}


def _controls(arms: Mapping[str, Sequence[Row]], results: Results) -> Data:
    """Final accuracy of every seed, its mean with its interval, and what training was like."""
    series = {}
    for label, rows in arms.items():
        finals = [row.end for row in rows]
        hits, runs = results.count(rows, "failed")
        series[label] = {"finals": sorted(finals), "mean": _finite(mean(finals)), "failed": hits, "runs": runs}
        series[label] |= {name: _known_mean(rows, name) for name in ("grad_norm", "dropped")}
    return {"series": series}


def _known_mean(rows: Sequence[Row], name: str) -> float | None:
    known = [value for row in rows if not math.isnan(value := getattr(row, name))]
    return float(np.mean(known)) if known else None


def _finite(interval: Interval) -> list[float] | None:
    return list(interval) if all(map(math.isfinite, interval)) else None


def _order(arms: Mapping[str, Sequence[Row]], results: Results) -> Data:
    """Steps by which each signal moves later than k3, and all signals around the fall, in the runs that fell."""
    fallen = [row for rows in arms.values() for row in rows if row.fell]
    others = [row for rows in arms.values() for row in rows if not row.fell and row.k3_seen]
    if not fallen:
        return {}
    gaps = {}
    for name in (*SIGNALS[1:], "accuracy"):
        known = sorted(gap for row in fallen if not math.isnan(gap := later_than_k3(row, name)))
        if known:
            gaps[name] = {"gaps": known, "median": _finite(median(known))}
    around: dict[str, dict[int, list[float]]] = {name: {} for name in (*SIGNALS, "accuracy")}
    for row in fallen:
        for point in results.curve(row):
            offset = int(point.step - row.fell_at)
            if -BEFORE <= offset <= AFTER:
                for name, values in around.items():
                    value = getattr(point, name)
                    if not math.isnan(value):
                        values.setdefault(offset, []).append(value)
    curves = {
        name: [(offset, float(np.mean(values[offset]))) for offset in sorted(values)] for name, values in around.items()
    }
    return {
        "gaps": gaps,
        "curves": {name: curve for name, curve in curves.items() if curve},
        "runs": len(fallen),
        "others": [sum(not math.isnan(row.half_k3) for row in others), len(others)],
    }


MADE = {
    **{"curves": _curves, "strength": _strength, "survival": _survival},
    **{"diagram": _diagram, "controls": _controls, "order": _order},
}


def _plain(value: Any) -> Any:
    """Four significant digits, as the committed files have; keys are texts, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    return float(f"{value:.4g}")
