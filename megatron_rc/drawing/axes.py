"""Axes of charts: ends, round ticks, and the text of a tick."""

import math
from typing import NamedTuple

TINY = 1e-300
"""Values up to this size count as 0: the steps of an axis between smaller ones could not be represented."""


class Axis(NamedTuple):
    low: float
    high: float
    ticks: list[float]
    logarithmic: bool
    """Logarithmic in the size of the values, which are all positive or all negative."""

    def share(self, value: float) -> float:
        """Position of ``value`` between the ends, from 0 to 1."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = (math.log10(abs(v)) for v in (low, high, value))
        return (value - low) / (high - low)


def linear_axis(low: float, high: float, *, whole: bool = False) -> Axis:
    """An axis over [low, high] with 4 to 8 round ticks; ``whole``: ticks at integers, and ends where the data end."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-12 * size, TINY):
        margin = abs(high) / 10
        low, high = (low, high + 1.0) if whole or size <= TINY else (low - margin, high + margin)
    rough = (high - low) / 6
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
        first = math.ceil(low / step)
        return Axis(low, high, [step * i for i in range(first, math.floor(high / step) + 1)], False)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return Axis(step * first, step * last, [step * i for i in range(first, last + 1)], False)


def log_axis(low: float, high: float) -> Axis:
    """An axis over the decades around [low, high]."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    last = max(last, first + 1)
    return Axis(10.0**first, 10.0**last, _decades(first, last), True)


def tight_log_axis(low: float, high: float) -> Axis:
    """A logarithmic axis that ends where the data end; both ends > 0, or both < 0."""
    if low == high:
        high = 2 * low if low > 0 else low / 2
    small, large = sorted((abs(low), abs(high)))
    first, last = math.ceil(math.log10(small) - 1e-9), math.floor(math.log10(large) + 1e-9)
    sizes = _decades(first, last)
    if len(sizes) < 3:
        sizes = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5) if small <= m * 10.0**e <= large]
    return Axis(low, high, [math.copysign(size, low) for size in sizes], True)


def label_of(value: float) -> str:
    """Text of a tick, such as 12, 0.25, 40k or 1e-5."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value / 1000:g}k" if size >= 1e4 else f"{float(f'{value:.6g}'):g}"


def _decades(first: int, last: int) -> list[float]:
    every = max(1, math.ceil((last - first) / 8))
    return [10.0**e for e in range(first, last + 1, every)]
