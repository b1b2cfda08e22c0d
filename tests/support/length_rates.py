"""The paper's schedule, and curves without noise, for tests of the length decay."""

from __future__ import annotations

from megatron_rc import LengthDecayLR


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
