"""Published cases of a gap, rebuilt from the numbers in their threads: does an analysis answer as the thread ended?

Each builder says what is published and what is made up. The published numbers are met exactly or to the digits given.
"""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import brentq
from simulated_dumps import diagnosed, levels

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.rules.rule import Level


def solve(function: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a rising function has the value ``target``."""
    return float(brentq(lambda x: function(x) - target, low, high))


def probabilities(random: np.random.Generator, tokens: int) -> np.ndarray:
    """Made up: log mu is -0.5 nats on average."""
    return np.maximum(random.random(tokens) ** 0.5, 1e-6)


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
    p = probabilities(random, sequences * length).reshape(sequences, length)
    targets = np.full(sequences, error if outlier_errors is None else 1.03)
    if outlier_errors is not None:
        low, high = outlier_errors
        shape = solve(lambda x: float((low + (high - low) * np.linspace(0, 1, 10) ** (1 / x)).mean()), error, 0.01, 20)
        targets[20:30] = low + (high - low) * np.linspace(0, 1, 10) ** (1 / shape)
    log_ratio = np.empty((sequences, length))
    for row, target in enumerate(targets):
        weight = 1 - p[row] if target < 2 else np.ones(length)

        def made(size: float, row: int = row, weight: np.ndarray = weight) -> np.ndarray:
            return size * weight * noise[row] - (size * weight) ** 2 / 2

        log_ratio[row] = made(solve(lambda size: multiplicative_error(made(size)), float(target), 0.0, 6.0))
    log_mu = np.log(p) - np.maximum(log_ratio, 0)
    columns = {"group": np.arange(sequences) // 2, "step": np.zeros(sequences, dtype=np.int64)}
    return Chunk((log_mu + log_ratio).reshape(-1), log_mu.reshape(-1), np.arange(sequences + 1) * length, {}, columns)


def trl_6789() -> Chunk:
    """The row top_p=0.8, top_k=1024 of the table in huggingface/trl#7269, which fixes huggingface/trl#6789.

    Published: 2,048 tokens; mean ratio 0.896, median 0.895, 51.8 % of the ratios outside [0.9, 1.1]; kept mass 0.895;
    the sampler logs log-probs renormalised over what it keeps.
    Made up: the law of the kept mass (two pieces), noise of 0.002, the probabilities, and that a single id was kept
    wherever the mass is above 0.9 and in a third of the other places: its log-prob is 0.
    """
    random, tokens = np.random.default_rng(6789), 2048
    inside = round(0.482 * tokens)
    outside = tokens - inside
    kept = np.concatenate([np.linspace(0.902, 1.0, inside), 0.8 + 0.0985 * np.linspace(0, 1, outside) ** 1.2])
    noise = 0.002 * random.normal(size=tokens)
    # the noise must not carry a ratio over 0.9
    ratio = kept * np.exp(np.where((kept * np.exp(noise) >= 0.9) == (kept >= 0.9), noise, 0.0))
    ratio = np.minimum(ratio * (0.896 / ratio.mean()), 1.0)
    single = (kept >= 0.9) | (random.random(tokens) < 1 / 3)
    log_mu = np.where(single, 0.0, np.log(probabilities(random, tokens)))
    order = random.permutation(tokens)
    return Chunk(
        (log_mu + np.log(ratio))[order], log_mu[order], np.arange(17) * 128, {}, {"step": np.zeros(16, dtype=np.int64)}
    )


def verl_7242(carriers: float) -> Chunk:
    """The run of verl-project/verl#7242.

    Published: k1 = mean(-l) = 0.00535 and k3 = 0.00519 nats per token.
    Made up: 100 responses of 500 tokens, normal noise on the logits; two numbers of it are set so that both hold. The
    noise of a logit that follows depends on the made-up probabilities.

    Args:
        carriers: share of the tokens with ten times the noise of the others: 1 is a dense model, a few percent are what
            a mixture of experts looks like.
    """
    random, tokens = np.random.default_rng(7242), 50_000
    p = probabilities(random, tokens)
    scale = (1 - p) * np.where(random.random(tokens) < carriers, 1.0, 0.1)
    noise = scale * random.normal(size=tokens)

    def made(size: float) -> np.ndarray:
        """l with k1 = 0.00535."""
        values = size * noise - (size * scale) ** 2 / 2
        return values - values.mean() - 0.00535

    log_ratio = made(solve(lambda size: float((np.expm1(made(size)) - made(size)).mean()), 0.00519, 0.0, 5.0))
    log_mu = np.log(p) - np.maximum(log_ratio, 0)
    return Chunk(log_mu + log_ratio, log_mu, np.arange(101) * 500, {}, {"step": np.zeros(100, dtype=np.int64)})


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
    assert found.level is Level.SUSPECT
    assert max(evidence.profiles, key=lambda name: evidence.profiles[name].explained) == "group"
    assert evidence.profiles["group"].explained > 0.5
    assert evidence.significant(evidence.factor_tests["group"])
    assert not evidence.significant(evidence.whole.z_ratio), "an engine that logs what it draws is honest"


def test_top_p_renormalised_by_the_sampler_alone_is_rc102() -> None:
    chunk = trl_6789()
    ratio = chunk.ratio
    assert ratio.mean() == pytest.approx(0.896, abs=5e-4)
    assert np.median(ratio) == pytest.approx(0.895, abs=2e-3)
    assert ((ratio < 0.9) | (ratio > 1.1)).mean() == pytest.approx(0.518, abs=5e-4)
    (verdict,) = diagnosed(chunk).verdicts
    assert (verdict.code, verdict.level) == ("RC102", Level.BUG)
    assert verdict.numbers["mean_ratio"] == pytest.approx(0.896, abs=5e-4)


@pytest.mark.parametrize(("carriers", "level"), [(0.05, Level.NUMERICS), (1.0, Level.SUSPECT)])
def test_equal_k1_and_k3_are_honest_and_few_tokens_that_carry_them_are_numerics(carriers: float, level: Level) -> None:
    """k1 and k3 do not say whether every token is off, which no rounding that was measured does by so much."""
    found = diagnosed(verl_7242(carriers))
    whole = found.evidence.whole
    assert -whole.mean_log_ratio == pytest.approx(0.00535, rel=1e-6)
    assert whole.k3 == pytest.approx(0.00519, rel=1e-6)
    assert whole.kappa == pytest.approx(1, abs=0.2) and whole.kappa_counts
    assert not found.evidence.significant(whole.z_ratio)
    (verdict,) = found.verdicts
    assert (verdict.code, verdict.level) == ("RC501", level)
    assert "routes_shifted decides" in verdict.sentence
