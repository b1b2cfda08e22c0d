"""What a chart draws: series of values over steps, their moving average, and marks at steps."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Mark(NamedTuple):
    step: float
    label: str


class Series(NamedTuple):
    label: str
    steps: Sequence[float]
    values: Sequence[float]


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean over the ``window`` values around each one; fewer at the ends."""
    half, total = window // 2, list(itertools.accumulate(values, initial=0.0))
    spans = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(total[end] - total[start]) / (end - start) for start, end in spans]


def smoothed(values: Sequence[float]) -> list[float]:
    """The moving average that is drawn on top of a noisy curve."""
    return moving_average(values, max(5, len(values) // 12))
