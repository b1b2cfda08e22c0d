"""Every rule answers to its trap and to no other, on simulated dumps whose every probability is known."""

from dataclasses import replace

import numpy as np
import pytest
from headlines import contradictions
from simulated_dumps import TRAPS, diagnosed, draw, honest, levels, log_softmax, padded_vocabulary, world

from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.rules import rc203
from megatron_rc.analyze.rules.rule import Level

BENIGN = {"RC404", "RC501", "RC502"}
SUSPECTS = {"RC307", "RC402"}
"""Rules that say what it looks like and never whose fault it is."""


@pytest.mark.parametrize("name", TRAPS)
def test_a_rule_answers_to_its_trap_and_to_no_other(name: str) -> None:
    code, make = TRAPS[name]
    found = diagnosed(make(world(1, sequences=96)))
    verdicts = levels(found)
    assert contradictions(found) == []
    if code in BENIGN:
        # where staleness explains the gap, nothing is said of the engines' noise
        assert set(verdicts) == ({code} if code == "RC502" else {code, "RC501"})
        assert not {Level.BUG, Level.SUSPECT} & set(verdicts.values())
    else:
        assert verdicts == {code: Level.SUSPECT if code in SUSPECTS else Level.BUG}


def test_codes_that_one_rule_tells_apart_are_selected_and_ignored_one_by_one() -> None:
    chunk = padded_vocabulary(world(1, sequences=96), 2)
    assert [*levels(diagnosed(chunk, select=("RC106",)))] == ["RC106"]
    assert [*levels(diagnosed(chunk, select=("RC102",)))] == []
    assert "RC106" not in levels(diagnosed(chunk, ignore=("RC106",)))


@pytest.mark.parametrize(
    ("zeros", "place"),
    [
        (np.arange(1200) < 150, ", in 5 whole responses of zeros (missing log-probs filled in?)"),
        (np.arange(1200) % 30 == 7, ", nearly all of token id 7 (a forced token?)"),
        (np.arange(1200) % 30 // 10 == 1, ", in spans (tool results inside the loss mask?)"),
        (np.arange(1200) % 2 == 0, ""),
    ],
)
def test_impossible_zeros_are_placed_by_what_they_share(zeros: np.ndarray, place: str) -> None:
    log_pi, ids = np.full(1200, -1.0), np.arange(1200) % 30
    chunk = Chunk(log_pi, np.where(zeros, 0.0, -1.0), np.arange(41) * 30, {"token_id": ids})
    evidence = diagnosed(chunk).evidence
    without = replace(evidence, sample=replace(chunk, log_mu=log_pi))
    for found, said in ((evidence, place), (without, "")):
        assert f"less than one half{said}; no sampler" in rc203.check(found).sentence


def test_the_order_of_pieces_does_not_change_what_is_measured() -> None:
    chunk = honest(world(2, sequences=48))
    halves = [chunk.select_sequences(np.arange(48) // 7 % 2 == part) for part in (0, 1)]
    whole, parts = (diagnosed(*chunks).evidence for chunks in ([chunk], halves))
    assert parts.whole.z_ratio.z == pytest.approx(whole.whole.z_ratio.z, rel=1e-12)
    assert parts.growth.ess == pytest.approx(whole.growth.ess, rel=1e-9)
    assert parts.token_tail.k == pytest.approx(whole.token_tail.k, rel=1e-9)
    for name, profile in whole.profiles.items():
        assert parts.profiles[name].explained == pytest.approx(profile.explained, rel=1e-9, abs=1e-12)


def test_a_rounding_that_each_id_repeats_is_no_temperature() -> None:
    """16 ids whose log-probs are off by the same few 1e-3 nats at every occurrence: significant, and harmless."""
    random = np.random.default_rng(1)
    pi = np.log(random.dirichlet(np.full(16, 0.5), size=1))
    mu = log_softmax(pi + 0.003 * random.normal(size=(1, 16)))
    ids = draw(random, np.repeat(mu, 6000, axis=0))
    chunk = Chunk(pi[0, ids], mu[0, ids], np.arange(601) * 10, {"entropy": np.full(6000, -(np.exp(pi) * pi).sum())})
    assert [*levels(diagnosed(chunk))] == ["RC501"]
