"""Means, spreads and runs of Python floats, NaN where there are none."""

import math
from typing import Any


def runs(tokens: list[int]) -> list[list[int]]:
    """Contiguous runs."""
    found: list[list[int]] = []
    for t in tokens:
        if found and found[-1][-1] == t - 1:
            found[-1].append(t)
        else:
            found.append([t])
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def std(values: list[float]) -> float:
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values])) if values else math.nan


def ess(values: list[float]) -> float:
    squares = sum(v**2 for v in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else math.nan


def extreme(pick: Any, values: list[float]) -> float:
    return pick(values) if values else math.nan


def share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
