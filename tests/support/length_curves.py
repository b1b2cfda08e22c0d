"""Simulated curves of the mean response length, and how well a detector locates their surge."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from megatron_rc.surge import SurgeDetector


def length_curves(
    runs: int,
    steps: int = 400,
    *,
    base: float = 1000.0,
    peak: float = 3500.0,
    at: float = 110.0,
    width: float = 4.0,
    drift: float = 0.0,
    cv: float = 0.15,
    correlation: float = 0.0,
    seed: int = 0,
) -> list[list[float]]:
    """``runs`` curves of ``steps`` rollouts, 1-based: a logistic surge times a linear drift times log-normal noise.

    L_t = (base + (peak - base) / (1 + exp(-(t - at) / width))) (1 + drift t / 100) exp(s z_t - s^2 / 2),
    s^2 = log(1 + cv^2), so the surge is half done at ``at`` and goes from 10 % to 90 % in 4.4 widths.

    Args:
        cv: coefficient of variation of the batch mean.
        correlation: of the noise of neighbouring rollouts.
    """
    generator = torch.Generator().manual_seed(seed)
    t = torch.arange(1, steps + 1, dtype=torch.float64)
    mean = (base + (peak - base) * torch.sigmoid((t - at) / width)) * (1 + drift * t / 100)
    z = torch.randn(runs, steps, generator=generator, dtype=torch.float64)
    for i in range(1, steps if correlation else 0):
        z[:, i] = correlation * z[:, i - 1] + math.sqrt(1 - correlation**2) * z[:, i]
    s = math.sqrt(math.log1p(cv**2))
    return (mean * torch.exp(s * z - s**2 / 2)).tolist()


def surge_steps(curves: Sequence[Sequence[float]], **constants: float) -> list[int | None]:
    """The surge step that a fresh detector finds on each curve."""
    found = []
    for curve in curves:
        detector = SurgeDetector(**constants)  # type: ignore[arg-type]
        # a surge that is found stays: the rest of the curve need not be read
        found.append(next((step for length in curve if (step := detector.update(length)) is not None), None))
    return found


def share_within(found: Sequence[int | None], at: float, distance: float) -> float:
    """Share of the curves whose surge was located at most ``distance`` rollouts from ``at``."""
    return sum(step is not None and abs(step - at) <= distance for step in found) / len(found)
