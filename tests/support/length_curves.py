"""Curves of the mean response length, the paper's schedule, and how well a detector locates a surge."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc import LengthDecayLR, SurgeDetector


def length_curves(
    runs: int, steps: int = 400, *, peak: float = 3500.0, at: float = 110.0, width: float = 4.0, drift: float = 0.0,
    cv: float = 0.15, seed: int = 0,
) -> list[list[float]]:  # fmt: skip
    """``runs`` curves of ``steps`` rollouts, 1-based: a logistic surge times a linear drift times log-normal noise.

    L_t = (1000 + (peak - 1000) / (1 + exp(-(t - at) / width))) (1 + drift t / 100) exp(s z_t - s^2 / 2),
    s^2 = log(1 + cv^2), so the surge is half done at ``at`` and goes from 10 % to 90 % in 4.4 widths.

    Args:
        cv: coefficient of variation of the batch mean.
    """
    t = rollouts(steps)
    mean = (1000 + (peak - 1000) * torch.sigmoid((t - at) / width)) * (1 + drift * t / 100)
    return noisy(mean, runs, cv=cv, seed=seed)


def rollouts(steps: int) -> Tensor:
    """1, 2, ..., steps in fp64."""
    return torch.arange(1, steps + 1, dtype=torch.float64)


def noisy(mean: Tensor, runs: int, *, cv: float = 0.1, correlation: float = 0.0, seed: int = 0) -> list[list[float]]:
    """``runs`` curves around ``mean`` [steps], with the noise of `length_curves`, correlated from one to the next."""
    steps = len(mean)
    z = torch.randn(runs, steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for i in range(1, steps if correlation else 0):
        z[:, i] = correlation * z[:, i - 1] + math.sqrt(1 - correlation**2) * z[:, i]
    s = math.sqrt(math.log1p(cv**2))
    return (mean * torch.exp(s * z - s**2 / 2)).tolist()


def capped(mean: Tensor, cap: float, sigma: float = 0.5) -> tuple[Tensor, Tensor]:
    """Mean and truncated share of log-normal response lengths that are cut off at ``cap`` tokens.

    Args:
        mean: [steps], of the lengths without a cap.
        sigma: of their logarithms.
    """
    z = (math.log(cap) - (mean.log() - sigma**2 / 2)) / sigma
    truncated = torch.special.ndtr(-z)
    return mean * torch.special.ndtr(z - sigma) + cap * truncated, truncated


QUIET: dict[str, dict[str, Any]] = {
    "flat, cv 0.03": {"cv": 0.03},
    "flat, cv 0.08": {"cv": 0.08},
    "flat, cv 0.15": {"cv": 0.15},
    "noise correlated 0.9": {"correlation": 0.9},
    "growth of 15 % in 100 rollouts": {"shape": lambda t: 1 + 0.15 * t / 100},
    "growth of 50 % in 100 rollouts": {"shape": lambda t: 1 + 0.5 * t / 100},
    "a dip to half for 20 rollouts": {"shape": lambda t: torch.where((t > 150) & (t <= 170), 0.5, 1.0)},
    "a spike to 3x for 2 rollouts": {"shape": lambda t: torch.where((t > 150) & (t <= 152), 3.0, 1.0)},
    "a collapse to 30 tokens": {"shape": lambda t: torch.where(t > 200, 0.03, 1.0)},
    "two data sets of 700 and 1600 tokens in turn": {"shape": lambda t: torch.where(t % 2 == 0, 1.6, 0.7)},
}
"""Curves around 1000 tokens without a surge: the noise, and what the mean is multiplied by; see `quiet_curves`."""


def quiet_curves(name: str, runs: int, steps: int = 400, seed: int = 7) -> list[list[float]]:
    noise = dict(QUIET[name])
    return noisy(1000 * noise.pop("shape", torch.ones_like)(rollouts(steps)), runs, seed=seed, **noise)


def surge_steps(
    curves: Sequence[Sequence[float]], truncated: Sequence[float] | None = None, **constants: float
) -> list[int | None]:
    """The surge step that a fresh detector finds on each curve; ``truncated`` are the shares of every curve."""
    shares = [None] * len(curves[0]) if truncated is None else truncated
    found = []
    for curve in curves:
        detector = SurgeDetector(**constants)  # type: ignore[arg-type]
        # a surge that is found stays: the rest of the curve need not be read
        steps = (detector.update(length, share) for length, share in zip(curve, shares, strict=True))
        found.append(next((step for step in steps if step is not None), None))
    return found


def share_within(found: Sequence[int | None], at: float, distance: float) -> float:
    """Share of the curves whose surge was located at most ``distance`` rollouts from ``at``."""
    return sum(step is not None and abs(step - at) <= distance for step in found) / len(found)


def algorithm_1(initial_lr: float, period: int, min_lr_ratio: float, steps: int) -> list[float]:
    """The paper's loop: learning rates of steps 1 .. steps."""
    lr, found = initial_lr, []
    for t in range(1, steps + 1):
        if t % period == 0:
            lr = max(lr / 2, min_lr_ratio * initial_lr)
        found.append(lr)
    return found


def rates(decay: LengthDecayLR, lengths: list[float] | list[None]) -> list[float]:
    return [decay.step(length) for length in lengths]


def jump(at: int, steps: int, low: float = 1000.0, high: float = 3000.0) -> list[float]:
    """Without noise: ``high`` from rollout ``at`` on. The fast average passes the threshold at the third of them."""
    return [high if t >= at else low for t in range(1, steps + 1)]


def assert_every_state_resumes(make: Callable[[], Any], rollouts: Sequence[tuple[Any, ...]]) -> list[Any]:
    """A rule that takes a state over goes on as the one that gave it; rate, metrics and news after every rollout."""
    whole = make()
    states, expected = [json.dumps(whole.state_dict())], []
    for values in rollouts:
        expected.append((whole.step(*values), whole.metrics(), whole.news))
        states.append(json.dumps(whole.state_dict()))
    for done, state in enumerate(states):
        resumed = make()
        resumed.load_state_dict(json.loads(state))
        assert resumed.rollouts == done and resumed.lr == (expected[done - 1][0] if done else resumed.initial_lr)
        rest = [(resumed.step(*values), resumed.metrics(), resumed.news) for values in rollouts[done:]]
        assert rest == expected[done:]
    return expected
