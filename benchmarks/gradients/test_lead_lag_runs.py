"""Which curve moves first, over several simulated runs with a known lag."""

import numpy as np
import pytest

from gradients.lead_lag_runs import Curves, half_way, lead_lag_of_runs, rise_gap
from megatron_rc.analyze.statistics.lead_lag import LAGS


def wandering(seed: int, lag: int, noise: float) -> Curves:
    """A random walk of 120 steps, and the same ``lag`` steps later with noise."""
    random = np.random.default_rng(seed)
    moves = np.cumsum(random.normal(size=130))
    return moves[5:125], np.roll(moves, lag)[5:125] + noise * random.normal(size=120)


def rising(seed: int, begins: float, noise: float = 0.1) -> np.ndarray:
    """A smooth rise by 4 that is half done at ``begins``."""
    steps = np.arange(120)
    return 4 / (1 + np.exp(-(steps - begins) / 4)) + noise * np.random.default_rng(seed).normal(size=120)


@pytest.mark.parametrize("lag", [-3, 0, 2])
def test_many_noisy_runs_show_a_lag_that_no_single_one_does(lag: int) -> None:
    runs = [wandering(seed, lag, noise=3.0) for seed in range(12)]
    found = lead_lag_of_runs(runs)
    assert found is not None
    assert found.lag == (lag, lag, lag) and found.runs == 12
    mean, low, high = found.correlations
    at = LAGS.index(lag)
    assert 0 < low[at] < mean[at] < high[at]
    assert (high[abs(np.array(LAGS) - lag) > 1] < low[at]).all()


def test_intervals_cover_the_correlation_of_unrelated_runs_as_often_as_they_say() -> None:
    """The percentile bootstrap of 10 runs covers about 0.85 where 0.9 is meant."""
    inside = 0
    for number in range(25):
        runs = [
            (wandering(2 * i, 0, 0.0)[0], wandering(2 * i + 1, 0, 0.0)[0]) for i in range(10 * number, 10 * number + 10)
        ]
        found = lead_lag_of_runs(runs, resamples=400)
        assert found is not None
        _, low, high = found.correlations
        inside += int(((low <= 0) & (high >= 0)).sum())
    assert 0.76 <= inside / (25 * len(LAGS)) <= 0.94


@pytest.mark.parametrize("gap", [-12, 0, 7])
def test_the_gap_between_two_smooth_rises_is_measured(gap: int) -> None:
    runs = [(rising(3 * i, 50 + i), -rising(3 * i + 1, 50 + i + gap)) for i in range(8)]
    found = rise_gap(runs, falls=True)
    assert found is not None and found.runs == 8
    assert found.low <= gap <= found.high and found.high - found.low <= 3


def test_a_curve_that_only_fluctuates_has_not_moved() -> None:
    flat = [np.random.default_rng(seed).normal(size=120) for seed in range(100)]
    assert sum(half_way(values) is not None for values in flat) <= 1
    assert rise_gap([(rising(1, 50), flat[0])]) is None


def test_steps_without_a_value_keep_their_place() -> None:
    values = rising(1, 60)
    values[::3] = np.nan
    found = half_way(values)
    assert found is not None and abs(found - 60) <= 3


def test_short_runs_are_left_out() -> None:
    long, short = wandering(1, 2, 0.1), (np.arange(10.0), np.arange(10.0))
    found = lead_lag_of_runs([long, short])
    assert found is not None and found.runs == 1
    assert lead_lag_of_runs([short]) is None
