"""Every rule answers to its trap and to no other, on simulated dumps and on committed ones of real engines."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import simulated_dumps
from simulated_dumps import (
    TRAPS,
    contradictions,
    diagnosed,
    hidden_temperature,
    honest,
    levels,
    log_softmax,
    sampled,
    world,
)

from diagnosis.traps import planted, server
from diagnosis.traps.dumps import EXAMPLES, TESTS, slug
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.diagnosis import diagnose_dump
from megatron_rc.analyze.headline import HEADLINES, headline
from megatron_rc.analyze.known import Known
from megatron_rc.analyze.rules import rc203
from megatron_rc.analyze.rules.rc101 import LEAST_EXPLAINED, PROVES
from megatron_rc.analyze.rules.rule import LEAST_TOKENS, Level

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
    chunk = TRAPS["padded vocabulary"][1](world(1, sequences=96))
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
    ids = simulated_dumps.draw(random, np.repeat(mu, 6000, axis=0))
    chunk = Chunk(pi[0, ids], mu[0, ids], np.arange(601) * 10, {"entropy": np.full(6000, -(np.exp(pi) * pi).sum())})
    assert [*levels(diagnosed(chunk))] == ["RC501"]


NUMERICS = HEADLINES[Level.NUMERICS]


def test_a_bug_in_fewer_tokens_than_a_rule_was_tried_on_is_only_suspected() -> None:
    _, make = TRAPS["renormalised top-p .95"]
    chunk = make(world(1, sequences=16))
    enough, few = (diagnosed(chunk.select_sequences(np.arange(16) < count)) for count in (16, 12))
    assert few.evidence.whole.tokens < LEAST_TOKENS < enough.evidence.whole.tokens
    assert levels(enough) == {"RC102": Level.BUG}
    assert levels(few) == {"RC102": Level.SUSPECT}
    assert "fewer than 2,000 tokens" in few.verdicts[0].sentence


def test_a_bug_in_a_model_that_is_surer_than_those_a_rule_was_tried_on_is_only_suspected() -> None:
    sure = Chunk(np.full(7680, -0.002), np.full(7680, -0.001), np.arange(49) * 160)
    assert levels(diagnosed(sure)) == {"RC106": Level.SUSPECT}


def test_twice_the_fault_that_a_report_excludes_is_found_and_a_third_of_it_is_not() -> None:
    made = partial(world, 1, sequences=48)
    power = diagnosed(honest(made())).power
    assert power.temperature is not None and power.missing_mass is not None
    for size, found in ((2, True), (0.3, False)):
        hidden = hidden_temperature(made(), 1 - size * power.temperature)
        assert ("RC103" in levels(diagnosed(hidden))) == found
        whole = honest(made())
        cut = replace(whole, log_pi=whole.log_pi - np.log1p(size * power.missing_mass))
        assert bool({"RC102", "RC106"} & set(levels(diagnosed(cut)))) == found


def test_logs_of_four_decimals_are_no_temperature() -> None:
    """Log-probs between -5e-5 and 0 become 0, so l follows from the logged log-prob, by less than a nat in 10,000."""
    log_pi = -np.exp(np.random.default_rng(0).uniform(np.log(1e-5), np.log(1e-3), 96 * 160))
    diagnosis = diagnosed(Chunk(log_pi, np.round(log_pi, 4), np.arange(97) * 160))
    assert diagnosis.evidence.profiles["log_mu"].explained_sign > 0.1
    assert diagnosis.evidence.significant(diagnosis.evidence.sign_test)
    assert levels(diagnosis) == {"RC501": Level.NUMERICS}


def test_shifted_experts_without_their_column_are_numerics_and_the_text_names_the_column() -> None:
    chunk = TRAPS["expert flips"][1](world(1, sequences=48))
    tokens = {name: values for name, values in chunk.tokens.items() if name != "routes_shifted"}
    (verdict,) = diagnosed(replace(chunk, tokens=tokens)).verdicts
    assert (verdict.code, verdict.level) == ("RC501", Level.NUMERICS)
    assert verdict.numbers["sigma"] > 3 * verdict.numbers["sigma_typical"]
    assert "column routes_shifted decides" in verdict.sentence


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_no_size_of_noise_is_called_a_bug_or_a_suspect(noise: float) -> None:
    """l holds the noise of log mu, and explains itself by regression: by a fifth of its variance at 0.5."""
    found = diagnosed(simulated_dumps.small_honest(1, sequences=300, noise=noise))
    assert levels(found) == {"RC501": Level.NUMERICS}
    assert headline(found).startswith("CANNOT TELL") and "--model-kind" in found.verdicts[0].sentence
    assert (
        headline(diagnosed(simulated_dumps.small_honest(1, sequences=300, noise=noise), known=Known(kind="moe")))
        == NUMERICS
    )


def test_a_floor_of_the_users_own_is_what_the_gap_is_compared_with() -> None:
    chunk = simulated_dumps.small_honest(1, sequences=300, noise=0.5)
    assert "above three times the measured floor" in diagnosed(chunk, known=Known(floor=0.1)).verdicts[0].sentence
    for known in (Known(floor=0.5), Known("int4", floor=0.1), Known("int8", floor=0.3)):
        assert headline(diagnosed(chunk, known=known)) == NUMERICS and not known.fine


def test_a_floor_of_zero_counts_as_the_rounding_of_fp32_and_leaves_experts_and_a_precision_what_is_usual() -> None:
    exact, bf16 = (simulated_dumps.small_honest(1, sequences=300, noise=noise) for noise in (3e-4, 0.06))
    assert "(--precision allows" in diagnosed(bf16, known=Known(floor=0)).verdicts[0].sentence
    for chunk, known in ((exact, Known()), (bf16, Known("bf16")), (bf16, Known(kind="moe"))):
        assert headline(diagnosed(chunk, known=replace(known, floor=0.0))) == NUMERICS


def test_a_temperature_between_a_map_of_training_and_a_proof_is_suspected_with_both_causes() -> None:
    w = world(1, noise=0.3, sequences=96)
    found = diagnosed(sampled(w, 0.85 * w.noisy))
    (verdict,) = [v for v in found.verdicts if v.code == "RC101"]
    assert LEAST_EXPLAINED < verdict.numbers["explained"] < PROVES
    assert verdict.level is Level.SUSPECT and verdict.one_of == ("RC101", "RC502")
    size = found.evidence.sequences
    versions = {"version": np.full(w.sequence.size, 3), "trainer_version": np.full(size, 19)}
    again = world(1, noise=0.3, sequences=96)
    assert levels(diagnosed(sampled(again, 0.85 * again.noisy, **versions))) == {"RC502": Level.LAG}


def test_noise_of_logits_is_compared_before_the_division_by_the_temperature() -> None:
    """Half of the responses at 0.5: their log-ratios are twice as large, of the same noise."""
    w = world(1, sequences=96)
    temperature = np.where(np.arange(96) % 2, 1.0, 0.5)
    divided = temperature[w.sequence][:, None]
    log_mu = log_softmax(w.noisy / divided)
    server = np.array(["cold", "warm"])[np.arange(96) % 2]
    chunk = simulated_dumps.chunk_of(
        w, simulated_dumps.draw(w.random, log_mu), log_softmax(w.logits / divided), log_mu, server=server
    )
    known = replace(chunk, sequences={**chunk.sequences, "temperature": temperature})
    cold = server[w.sequence] == "cold"
    assert diagnosed(known).evidence.noise.contrast(cold, ~cold).ratio == pytest.approx(1, abs=0.05)
    assert diagnosed(chunk).evidence.noise.contrast(cold, ~cold).ratio > 1.3
    assert diagnosed(known).evidence.noise.typical == pytest.approx(0.03, rel=0.15)
    assert levels(diagnosed(known)) == {"RC501": Level.NUMERICS}


@pytest.mark.parametrize("place", ["start", "server", "turn"])
def test_a_place_where_the_model_is_less_sure_is_no_fault(place: str) -> None:
    """k3 is four times larger there, of the same noise on every logit."""
    w = world(1, sequences=96)
    server = np.array(["open", "sure"])[np.arange(96) % 2]
    there = {"start": w.position < 20, "server": server[w.sequence] == "open", "turn": w.position >= 85}[place]
    sure = np.where(there, 0.4, 9.0)[:, None]
    surer = replace(w, logits=w.logits * sure, noisy=w.logits * sure + w.noisy - w.logits)
    mask = (w.position < 75) | (w.position >= 85)
    found = diagnosed(sampled(surer, surer.noisy, server=server, loss_mask=mask))
    k3, kept = found.evidence.sample.k3, there[mask]
    assert k3[kept].mean() > 4 * k3[~kept].mean()
    assert levels(found) == {"RC501": Level.NUMERICS}


def test_weights_that_are_updated_in_flight_are_no_other_prompt() -> None:
    """All responses start on weights that are three updates older, and the dump says so."""
    w = world(1, sequences=96)
    older = w.position < 30
    moved = w.noisy + np.where(older, 0.3, 0.0)[:, None] * w.random.normal(size=w.noisy.shape)
    versions = {"version": np.where(older, 7, 10), "trainer_version": np.full(96, 10)}
    assert levels(diagnosed(sampled(w, moved, **versions))) == {"RC502": Level.LAG}
    unlabelled = diagnosed(sampled(world(1, sequences=96), moved))
    assert levels(unlabelled) == {"RC205": Level.BUG}


WRONG_TENSOR = ("wrong-conversion-of-one-tensor", "server-wrong-conversion")
"""Size alone accuses nobody."""
EXPECTED = {slug(name): {trap.answer: Level(trap.level)} for name, trap in (planted.TRAPS | server.TRAPS).items()}
EXPECTED["expert-flips"]["RC501"] = Level.NUMERICS
# 0.5 % of the probability: a top-k would take as much
EXPECTED["padded-vocabulary"] = {"RC102": Level.BUG}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_dump_is_answered_by_the_rule_of_its_cause_and_by_no_other(name: str) -> None:
    found = diagnose_dump(TESTS / f"{name}.parquet")
    assert levels(found) == EXPECTED[name]
    assert contradictions(found) == []


@pytest.mark.parametrize("name", WRONG_TENSOR)
def test_the_size_of_a_gap_is_doubted_until_the_precision_is_known(name: str) -> None:
    found = diagnose_dump(TESTS / f"{name}.parquet")
    assert headline(found).startswith("CANNOT TELL") and "--precision" in found.verdicts[0].sentence
    bf16, int8 = (diagnose_dump(TESTS / f"{name}.parquet", known=Known(kind)) for kind in ("bf16", "int8"))
    assert "above what bf16 usually gives" in bf16.verdicts[-1].sentence
    assert headline(int8) == HEADLINES[Level.NUMERICS]


def test_every_committed_dump_is_judged_here() -> None:
    assert {file.stem for file in TESTS.glob("*.parquet")} == EXPECTED.keys()


def test_the_committed_dumps_stay_small() -> None:
    examples = list(EXAMPLES.glob("*.parquet"))
    assert len(examples) == 2 and all(file.stat().st_size <= 200_000 for file in examples)
    assert sum(file.stat().st_size for file in TESTS.glob("*.parquet")) <= 3_000_000
