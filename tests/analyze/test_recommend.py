"""The recommended correction: what comes before any, the level, the bound C, and the file that other commands read."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from refusals import refuses
from simulated_dumps import diagnosed, renormalised_top_p, world, write_dump
from typer.testing import CliRunner

from megatron_rc.analyze import diagnose
from megatron_rc.analyze.chunk import Chunk
from megatron_rc.analyze.diagnosis import Diagnosis
from megatron_rc.analyze.lab_range import FAILED_K3, LAB, LabRange
from megatron_rc.analyze.recommendation import Recommendation, recommend
from megatron_rc.analyze.rules.rule import Level, Verdict
from megatron_rc.analyze.statistics.bound import CUSTOMARY, TRIED, advantages, sequence_terms, token_terms
from megatron_rc.cli import app
from megatron_rc.correction.settings import RolloutCorrection
from megatron_rc.integrations.run_script import patch_settings
from megatron_rc.settings import job as settings


@pytest.fixture(scope="module")
def truncated() -> Chunk:
    return renormalised_top_p(world(1, sequences=48), 0.95)


WIDE = LabRange(depth=1e3, length=(1, 1e6), vocabulary=100)
"""A lab that has seen everything."""


def noise(size: float, length: int = 100, sequences: int = 80, seed: int = 1, token_id: int = 7) -> Diagnosis:
    """Log-ratios of N(-s^2 / 2, s^2), which honest logs give to first order."""
    random = np.random.default_rng(seed)
    log_mu = -random.exponential(1, (sequences, length)) - 5 * size
    log_pi = log_mu + size * random.normal(size=log_mu.shape) - size**2 / 2
    return diagnose(log_pi, log_mu, token_id=np.full(log_mu.size, token_id))


def within(diagnosis: Diagnosis) -> Recommendation:
    """The recommendation where the lab has covered the regime."""
    return recommend(diagnosis.evidence, diagnosis.verdicts, WIDE)


def test_a_tiny_gap_needs_no_correction() -> None:
    found = noise(0.001).recommendation
    assert (found.method, found.correction) == ("none", RolloutCorrection())
    assert found.variation < 0.01 and found.agreement == 1.0
    assert found.headline.startswith("No correction is needed")


def test_a_small_gap_is_weighted_by_sequence_and_a_large_one_by_token() -> None:
    small, large = within(noise(0.05)), within(noise(0.3))
    assert small.method.startswith("seq-tis") and large.method.startswith("token-tis")
    assert small.kl == pytest.approx(100 * 0.05**2 / 2, rel=0.1)
    # W is log-normal with variance s^2 of its log: the total variation is 2 Phi(s / 2) - 1
    assert small.variation == pytest.approx(math.erf(0.5 / 2 / math.sqrt(2)), rel=0.15)
    assert small.variation_interval[0] < small.variation < small.variation_interval[1]
    assert small.correction.weight.level == "sequence"


def test_weights_of_sequences_with_a_heavy_tail_are_not_recommended() -> None:
    diagnosis = noise(0.05)
    tail = dataclasses.replace(diagnosis.evidence.sequence_tail, k=0.9)
    found = recommend(dataclasses.replace(diagnosis.evidence, sequence_tail=tail), diagnosis.verdicts, WIDE)
    assert found.method.startswith("token-tis") and "tail" in found.reason
    assert within(noise(0.05, sequences=20)).method.startswith("token-tis"), "too few to know the tail"


def test_the_agreement_is_low_at_the_border_between_two_levels() -> None:
    # KL of a response 0.5 nats: 100 tokens of 0.005
    assert 0.1 < within(noise(0.1, sequences=40)).agreement < 0.95
    assert within(noise(0.05)).agreement == within(noise(0.4)).agreement == 1.0


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"length": 100}, "responses 13.9 times as long as the longest tested (7.2 tokens)"),
        ({"length": 2}, "responses 3.4 times as short as the shortest tested (6.7 tokens)"),
        ({"length": 7, "token_id": 151_935}, "a vocabulary 9,496 times the largest tested (16 ids)"),
        ({"length": 7, "size": 3.0}, f" times the largest tested ({LAB.depth})"),
    ],
)
def test_beyond_the_labs_tests_dimension_factor_and_direction_are_said(given: dict[str, float], missing: str) -> None:
    found = noise(**{"size": 0.2, "sequences": 400} | given).recommendation
    assert "beyond what our lab tested" in found.headline
    assert any(missing in each for each in found.untested) and missing in found.reason


def test_a_factor_of_one_and_a_half_beyond_the_lab_is_not_mentioned() -> None:
    assert noise(0.05, length=10).recommendation.untested == ()
    assert noise(0.05, length=11).recommendation.untested != ()


@pytest.mark.parametrize(("size", "length"), [(0.3, 1), (0.9, 7), (0.9, 100)])
def test_none_is_never_recommended_at_a_gap_at_which_runs_have_failed(size: float, length: int) -> None:
    found = noise(size, length=length, sequences=400).recommendation
    assert found.k3 > FAILED_K3 and found.method not in ("", "none")
    assert "none first" not in found.to_dict()["sentence"]


def test_sequence_weights_are_recommended_up_to_the_horizon_and_never_at_twice_its_length() -> None:
    """k3 is 0.005, so T* is 100 tokens."""
    assert noise(0.1, length=50, sequences=400).recommendation.method.startswith("seq-tis")
    assert noise(0.1, length=200, sequences=400).recommendation.method.startswith("token-tis")
    small = noise(0.1, length=100, sequences=400).recommendation
    assert f"Try none first, then {small.method}." in small.to_dict()["sentence"]


def test_inside_the_ranges_of_the_lab_nothing_is_called_untested() -> None:
    found = noise(0.2, length=7, sequences=400, token_id=LAB.vocabulary - 1).recommendation
    assert found.method.startswith("seq-tis") and found.untested == ()
    assert "untested" not in found.headline and "lab" not in found.reason


def test_a_dump_without_token_ids_has_an_unknown_vocabulary() -> None:
    log_mu = np.full((50, 7), -1.0)
    assert diagnose(log_mu, log_mu).recommendation.untested == ("an unknown vocabulary (tested: 16 ids)",)


def test_a_bug_comes_before_any_correction(truncated: Chunk) -> None:
    found = diagnosed(truncated).recommendation
    assert (found.method, found.correction, found.first) == ("", None, ("RC102",))
    assert (found.headline, found.reason) == ("A correction would hide a bug: fix RC102 first.", "")


def test_a_suspect_is_decided_first() -> None:
    found = recommend(noise(0.05).evidence, [Verdict(Level.SUSPECT, "a prompt may differ", {}, code="RC205")], WIDE)
    assert found.correction and found.suspects == ("RC205",)
    assert found.headline.startswith("Recommended once RC205 is decided: seq-tis")


def test_the_error_of_a_bound_is_squared_bias_plus_variance() -> None:
    random = np.random.default_rng(1)
    lengths = random.integers(1, 30, 40)
    log_ratio = random.normal(size=lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    advantage = random.normal(size=40)
    chunk = Chunk(log_ratio - 9, np.full(log_ratio.size, -9.0), offsets, {}, {"advantage": advantage})
    per_token, product = np.repeat(advantage, lengths), np.exp(np.add.reduceat(log_ratio, offsets[:-1]))
    for terms, ratio, a in (
        (token_terms(chunk, 500), np.exp(log_ratio), per_token),
        (sequence_terms(chunk, 500), product, advantage),
    ):
        bound = terms.bound(np.ones(40))
        for index, c in enumerate(TRIED):
            bias = (np.maximum(ratio - c, 0) * np.abs(a)).mean()
            assert bound.error[index] == pytest.approx(bias**2 + (np.minimum(ratio, c) * a).var() / 500)
        assert bound.theory == pytest.approx(math.sqrt(2 * (1 + np.square(ratio - 1).mean())))
        assert bound.error[np.flatnonzero(bound.upper == TRIED)[0]] <= 1.01 * bound.error.min()
        twice = terms.bound(np.arange(40) % 2 * 2.0)
        odd = chunk.select_sequences(np.arange(40) % 2 == 1)
        again = (token_terms if ratio.size > 40 else sequence_terms)(odd, 500).bound(np.ones(20))
        assert twice.error == pytest.approx(again.error), "a sequence that is drawn twice counts twice"


def test_without_advantages_the_error_is_that_of_random_signs() -> None:
    random = np.random.default_rng(1)
    log_ratio, signs = random.normal(size=200_000), random.choice([-1.0, 1.0], 200_000)
    plain = Chunk(log_ratio - 9, np.full(200_000, -9.0), np.arange(1001) * 200)
    signed = dataclasses.replace(plain, tokens={"advantage": signs})
    errors = [token_terms(chunk, 500).bound(np.ones(1000)).error for chunk in (plain, signed)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)


def test_more_tokens_per_step_loosen_the_bound_and_a_flat_error_keeps_the_customary_one() -> None:
    log_ratio = 1.2 * np.random.default_rng(1).normal(size=20_000)
    chunk = Chunk(log_ratio - 9, np.full(20_000, -9.0), np.arange(201) * 100)
    uppers = [token_terms(chunk, n).bound(np.ones(200)).upper for n in (10, 1_000, 1_000_000)]
    assert uppers == sorted(uppers) and uppers[0] < uppers[-1]
    flat = Chunk(np.full(100, -1.0), np.full(100, -1.0), np.arange(11) * 10)
    assert token_terms(flat, 100).bound(np.ones(10)).upper == CUSTOMARY


def test_an_advantage_that_is_not_finite_counts_as_0() -> None:
    values = np.array([math.nan, 1.0, math.inf])
    found = advantages(Chunk(np.zeros(3), np.zeros(3), np.arange(4), {}, {"advantage": values}))
    assert found.tolist() == [0, 1, 0]


@pytest.mark.parametrize("size", [0.001, 0.05, 0.3])
def test_the_file_is_read_by_train_and_by_the_patches(size: float, tmp_path: Path) -> None:
    found = noise(size).recommendation
    file = tmp_path / "rc.yaml"
    found.write(file)
    assert patch_settings(file).correction == found.correction
    assert settings.load(file).correction == found.correction


def test_no_file_is_written_over_a_bug_or_into_no_folder(truncated: Chunk, tmp_path: Path) -> None:
    file = tmp_path / "rc.yaml"
    refuses("would hide a bug, fix RC102 first", diagnosed(truncated).recommendation.write, file)
    assert not file.exists()
    refuses("no such folder", noise(0.05).recommendation.write, tmp_path / "none" / "rc.yaml")


def test_the_command_writes_the_file_and_shows_the_table_where_asked(tmp_path: Path) -> None:
    dump = str(write_dump(noise(0.05).evidence.sample, tmp_path / "dump.parquet"))
    shown = CliRunner().invoke(app, ["analyze", dump, "--no-html", "--rc", str(tmp_path / "rc.yaml")])
    assert shown.exit_code == 0 and "Recommended: seq-tis" in shown.output and "geo-mask" not in shown.output
    assert patch_settings(tmp_path / "rc.yaml").correction == noise(0.05).recommendation.correction
    assert "What if" in CliRunner().invoke(app, ["analyze", dump, "--no-html", "--what-if"]).output
    for flag in ("--what-if", "--no-what-if"):
        data = json.loads(CliRunner().invoke(app, ["analyze", dump, "--no-html", "--json", flag]).output)
        assert (data["what_if"] is not None) == (flag == "--what-if") and data["recommendation"]["method"]


def test_conditions_are_judged_before_the_file_is_refused(truncated: Chunk, tmp_path: Path) -> None:
    dump = str(write_dump(truncated, tmp_path / "dump.parquet"))
    arguments = ["analyze", dump, "--no-html", "--require", "k3<1", "--rc", str(tmp_path / "rc.yaml")]
    refused = CliRunner().invoke(app, arguments)
    assert "holds" in refused.output and "would hide a bug" in str(refused.exception)
