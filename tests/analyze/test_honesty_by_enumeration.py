"""The expectations behind the honesty panel, summed over every sequence of small policies."""

import itertools

import numpy as np
import pytest
from scipy.special import softmax

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.statistics.sums import FIELDS, sequence_sums

VOCABULARY, LENGTH = 4, 3


def policies(seed: int, noise: float) -> tuple[dict[tuple[int, ...], np.ndarray], dict[tuple[int, ...], np.ndarray]]:
    """Probabilities [V] of trainer and sampler after every prefix."""
    random = np.random.default_rng(seed)
    trainer, sampler = {}, {}
    for length in range(LENGTH):
        for prefix in itertools.product(range(VOCABULARY), repeat=length):
            logits = random.normal(size=VOCABULARY) * 2
            trainer[prefix] = softmax(logits)
            sampler[prefix] = softmax(logits + noise * random.normal(size=VOCABULARY))
    return trainer, sampler


def expected(trainer: dict, drawn_from: dict, logged: dict, name: str) -> float:
    """Expectation of a sum over a response, when ``drawn_from`` draws it and ``logged`` is what the dump says."""
    ids = [s for s in itertools.product(range(VOCABULARY), repeat=LENGTH)]
    weights = np.array([np.prod([drawn_from[s[:t]][s[t]] for t in range(LENGTH)]) for s in ids])
    ids, weights = [s for s, w in zip(ids, weights, strict=True) if w > 0], weights[weights > 0]
    pi = np.array([np.log(trainer[s[:t]][s[t]]) for s in ids for t in range(LENGTH)])
    mu = np.array([np.log(logged[s[:t]][s[t]]) for s in ids for t in range(LENGTH)])
    entropy = np.array([-(trainer[s[:t]] * np.log(trainer[s[:t]])).sum() for s in ids for t in range(LENGTH)])
    rows = sequence_sums(Chunk(pi, mu, np.arange(len(ids) + 1) * LENGTH, {"entropy": entropy}))
    return float(weights @ rows[:, FIELDS.index(name)])


@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
def test_honest_logs_give_zero_expectations_at_any_size_of_mismatch(noise: float) -> None:
    trainer, sampler = policies(1, noise)
    assert abs(expected(trainer, sampler, sampler, "excess")) < 1e-12
    assert abs(expected(trainer, sampler, sampler, "surprise")) < 1e-12
    assert expected(trainer, sampler, sampler, "log_ratio") < 0


def test_truncated_logs_lower_the_mean_ratio_by_the_mass_that_was_cut() -> None:
    trainer, _ = policies(2, 0.0)
    cut = {prefix: np.where(probs >= probs.max(), 1.0, 0.0) for prefix, probs in trainer.items()}
    lost, reached = 0.0, {(): 1.0}
    for length in range(LENGTH):
        for prefix in [p for p in reached if len(p) == length]:
            lost += reached[prefix] * (1 - trainer[prefix].max())
            reached[(*prefix, int(trainer[prefix].argmax()))] = reached[prefix]
    assert expected(trainer, cut, cut, "excess") == pytest.approx(-lost)


def test_a_hidden_temperature_shows_in_the_surprise_alone() -> None:
    trainer, _ = policies(3, 0.0)
    colder = {prefix: softmax(np.log(probs) / 0.7) for prefix, probs in trainer.items()}
    assert abs(expected(trainer, colder, trainer, "excess")) < 1e-12
    assert expected(trainer, colder, trainer, "surprise") < -0.1


def test_raw_logs_raise_the_mean_log_ratio_above_zero() -> None:
    raw, _ = policies(4, 0.0)
    tempered = {prefix: softmax(np.log(probs) / 0.7) for prefix, probs in raw.items()}
    assert expected(tempered, tempered, raw, "log_ratio") > 0.05
    assert expected(tempered, tempered, raw, "excess") > 0.05
