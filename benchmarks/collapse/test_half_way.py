"""When a curve leaves its level, over simulated curves with a known step."""

import numpy as np
import pytest

from collapse.reading import half_way


def rising(seed: int, begins: float, noise: float = 0.1) -> np.ndarray:
    """A smooth rise by 4 that is half done at ``begins``."""
    steps = np.arange(120)
    return 4 / (1 + np.exp(-(steps - begins) / 4)) + noise * np.random.default_rng(seed).normal(size=120)


@pytest.mark.parametrize("begins", [38, 50, 57])
def test_a_smooth_rise_is_half_done_where_it_is(begins: int) -> None:
    found = [half_way(sign * rising(seed, begins), falls=sign < 0) for seed in range(8) for sign in (1, -1)]
    assert all(step is not None and abs(step - begins) <= 3 for step in found)


def test_a_curve_that_only_fluctuates_has_not_moved() -> None:
    flat = [np.random.default_rng(seed).normal(size=120) for seed in range(100)]
    assert sum(half_way(values) is not None for values in flat) <= 1


def test_steps_without_a_value_keep_their_place() -> None:
    values = rising(1, 60)
    values[::3] = np.nan
    found = half_way(values)
    assert found is not None and abs(found - 60) <= 3
