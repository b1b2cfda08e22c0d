"""Published cases of a gap, rebuilt from the numbers in their threads: does an analysis answer as the thread ended?

Each builder says what is published and what is made up. The published numbers are met exactly or to the digits given.
"""

import numpy as np
import pytest
from scipy.optimize import brentq
from simulated_dumps import diagnosed, levels

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.rules.rule import Level


def multiplicative_error(log_ratio: np.ndarray) -> float:
    """TME of NeMo-RL: the mean of exp |log pi - log mu| over tokens."""
    return float(np.exp(np.abs(log_ratio)).mean())


def nemo_rl_2141(error: float, outlier_errors: tuple[float, float] | None) -> Chunk:
    """One pair of the triangle of NVIDIA-NeMo/RL#2141, which explains #2100.

    Published: TME 322.49 of vLLM's decode against its own prefill, 313.13 of decode against Megatron, 1.0306 of
    prefill against Megatron; in #2100, 15 to 20 % of the sequences (10 of 64) at about 100 to 670, the same prompts in
    every run, the others near normal. The two figures of the triangle are taken as means over the outliers.
    Made up: 32 prompts of 2 responses with 200 tokens, log-normal ratios, and normal sequences at 1.03.

    Args:
        error: TME of the outliers, or of all sequences where there are none.
        outlier_errors: smallest and largest TME of an outlier, None without outliers.
    """
    random, sequences, length = np.random.default_rng(2141), 64, 200
    noise = random.normal(size=(sequences, length))
    p = np.maximum(random.random((sequences, length)) ** 0.5, 1e-6)  # made up: log mu is -0.5 nats on average
    targets = np.full(sequences, error if outlier_errors is None else 1.03)
    if outlier_errors is not None:
        low, high = outlier_errors
        shape = brentq(lambda x: (low + (high - low) * np.linspace(0, 1, 10) ** (1 / x)).mean() - error, 0.01, 20)
        targets[20:30] = low + (high - low) * np.linspace(0, 1, 10) ** (1 / shape)
    log_ratio = np.empty((sequences, length))
    for row, target in enumerate(targets):
        weight = 1 - p[row] if target < 2 else np.ones(length)

        def made(size: float, row: int = row, weight: np.ndarray = weight) -> np.ndarray:
            return size * weight * noise[row] - (size * weight) ** 2 / 2

        log_ratio[row] = made(
            brentq(lambda x, wanted: multiplicative_error(made(x)) - wanted, 0.0, 6.0, args=(target,))
        )
    log_mu = np.log(p) - np.maximum(log_ratio, 0)
    columns = {"group": np.arange(sequences) // 2, "step": np.zeros(sequences, dtype=np.int64)}
    return Chunk((log_mu + log_ratio).reshape(-1), log_mu.reshape(-1), np.arange(sequences + 1) * length, {}, columns)


def test_prefill_of_both_engines_is_numerics() -> None:
    chunk = nemo_rl_2141(1.030557, None)
    assert multiplicative_error(chunk.log_ratio) == pytest.approx(1.030557, rel=1e-4)
    found = diagnosed(chunk)
    assert found.level is Level.NUMERICS and [*levels(found)] == ["RC501"]


@pytest.mark.parametrize("error", [322.490753, 313.127106])
def test_decode_against_prefill_is_suspect_and_the_prompts_explain_it(error: float) -> None:
    chunk = nemo_rl_2141(error, (100.0, 670.0))
    errors = np.array([multiplicative_error(row) for row in chunk.log_ratio.reshape(64, -1)])
    outliers = errors[errors > 2]
    assert outliers.size == 10 and outliers.mean() == pytest.approx(error, rel=1e-3)
    assert outliers.min() == pytest.approx(100, rel=1e-3) and outliers.max() == pytest.approx(670, rel=1e-3)
    found = diagnosed(chunk)
    evidence = found.evidence
    assert levels(found) == {"RC402": Level.SUSPECT} and found.verdicts[0].numbers["failed"] == 10
    assert max(evidence.profiles, key=lambda name: evidence.profiles[name].explained) == "group"
    assert evidence.profiles["group"].explained > 0.5
    assert evidence.significant(evidence.factor_tests["group"])
    assert not evidence.significant(evidence.whole.z_ratio), "an engine that logs what it draws is honest"
