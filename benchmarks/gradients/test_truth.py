"""Bias and variance of estimates of the gradient, against worlds whose every answer can be enumerated."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from enumeration import Batch, World
from pictures import same_picture
from torch import Tensor

from gradients.moments import Moments, Products, jackknife_error
from gradients.picture import draw
from gradients.rows import Row
from gradients.truth import PAGE, PICTURE, ROWS, page
from megatron_rc.correction.settings import RolloutCorrection, Weight
from megatron_rc.files import read_csv

BATCHES = 2
WORLD = World(2, stops=False)
SEQUENCE_IS = RolloutCorrection(Weight("sequence", upper=math.inf))
TOKEN_TIS = RolloutCorrection(Weight("token", upper=1.1))


def estimates(correction: RolloutCorrection) -> tuple[Tensor, Tensor]:
    """([9, P] the library's estimate from each answer alone, [9] its probability under mu)."""
    batch = Batch(WORLD, list(range(len(WORLD.sequences))))
    rows = batch.gradient_of_each(batch.run(correction)).flatten(1)
    return rows, WORLD.probability(WORLD.mu.log())


def expected_moments(rows: Tensor, chances: Tensor) -> Moments:
    """Mean of the measured moments over every pair of batches of one answer of mu and one of pi."""
    exact_rows = WORLD.reward[:, None] * WORLD.scores().flatten(1)
    exact_chances = WORLD.probability(WORLD.log_pi)
    pairs = itertools.product(range(len(rows)), range(len(exact_rows)))
    outcomes = [(rows[y], exact_rows[z], float(chances[y] * exact_chances[z])) for y, z in pairs]
    total = np.zeros(4)
    for drawn in itertools.product(outcomes, repeat=BATCHES):
        products = Products.of(torch.stack([g for g, _, _ in drawn]), torch.stack([f for _, f, _ in drawn]))
        total += math.prod(p for _, _, p in drawn) * np.array(products.moments())
    return Moments(*total.tolist())


@pytest.mark.full
@pytest.mark.parametrize("correction", [SEQUENCE_IS, TOKEN_TIS], ids=["sequence IS", "token TIS"])
def test_measured_moments_are_those_of_the_enumerated_estimator(correction: RolloutCorrection) -> None:
    rows, chances = estimates(correction)
    mean, truth = chances @ rows, WORLD.gradient_of_j().flatten()
    measured = expected_moments(rows, chances)
    squares = [truth @ truth, mean @ mean, mean @ truth, chances @ rows.square().sum(1)]
    assert measured == pytest.approx([float(value) for value in squares], rel=1e-9)
    assert measured.squared_bias == pytest.approx(float((mean - truth).square().sum()), abs=1e-12)
    assert measured.variance == pytest.approx(float(chances @ (rows - mean).square().sum(1)), rel=1e-9)
    assert measured.cosine == pytest.approx(float(torch.cosine_similarity(mean, truth, dim=0)), rel=1e-9)


@pytest.mark.full
def test_sequence_is_has_no_bias_and_truncated_token_ratios_have_the_enumerated_one() -> None:
    truth = WORLD.gradient_of_j()
    rows, chances = estimates(SEQUENCE_IS)
    torch.testing.assert_close(chances @ rows, truth.flatten())
    rho = (WORLD.log_pi.exp() / WORLD.mu).clamp(max=1.1)
    expected = torch.zeros_like(truth)
    for y, p, reward in zip(WORLD.sequences, chances, WORLD.reward, strict=True):
        expected += p * reward * WORLD.score(y, [float(rho[step]) for step in WORLD.steps(y)])
    rows, _ = estimates(TOKEN_TIS)
    torch.testing.assert_close(chances @ rows, expected.flatten())
    assert (expected - truth).norm() > 0.05 * truth.norm()


def test_the_lemma_is_exact_for_a_quadratic_objective() -> None:
    """J = <g, x> - L |x|^2 / 2 from x = 0: E J(lr g_hat) is A + B - C, whatever the distribution of g_hat."""
    rows, chances = estimates(TOKEN_TIS)
    mean, truth, curvature = chances @ rows, WORLD.gradient_of_j().flatten(), 3.0
    parts = (truth @ truth, mean @ mean, mean @ truth, chances @ rows.square().sum(1))
    moments = Moments(*map(float, parts))

    def gain(lr: float) -> float:
        reached = lr * rows
        return float(chances @ (reached @ truth - curvature / 2 * reached.square().sum(1)))

    for lr in (0.01, 0.3, 2.0):
        a, b, c = moments.terms(lr, curvature)
        assert a + b - c == pytest.approx(gain(lr), rel=1e-9)
    best = max(gain(lr) for lr in np.geomspace(1e-3, 1, 4000))
    unbiased = Moments(moments.exact, moments.exact, moments.exact, 2 * moments.exact)
    share = best / (moments.exact / (4 * curvature))
    assert moments.progress(unbiased) == pytest.approx(share, rel=1e-4)


def test_the_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = np.random.default_rng(1).normal(size=20)
    expected = values.std(ddof=1) / math.sqrt(20)
    assert jackknife_error(20, lambda counts: float(counts @ values / counts.sum())) == pytest.approx(expected)


def test_a_plug_in_norm_would_be_too_large_and_the_measured_one_is_not() -> None:
    generator, found, plugged = torch.Generator().manual_seed(2), [], []
    for _ in range(200):
        rows = torch.ones(50) / 50**0.5 + torch.randn(8, 50, generator=generator)
        found.append(Products.of(rows, rows).moments().mean)
        plugged.append(float(rows.mean(0).square().sum()))
    assert np.mean(found) == pytest.approx(1, abs=0.3)
    assert np.mean(plugged) > 6


def test_the_page_ends_with_the_tables_of_the_committed_rows() -> None:
    rows = read_csv(Row, ROWS)
    assert PAGE.read_text().endswith("## Checkpoints\n\n" + page(rows)), "make docs"
    exact = [row for row in rows if row.estimator == "exact"]
    assert len(exact) == len({(row.run, row.step) for row in rows})
    assert all(abs(row.squared_bias) < 3 * row.squared_bias_error for row in exact), "exact rollouts have no bias"


@pytest.mark.full
def test_the_committed_picture_is_that_of_the_code(tmp_path: Path) -> None:
    rows = read_csv(Row, ROWS)
    assert same_picture(draw(rows, tmp_path / "estimates.png"), PICTURE), "make docs"
    other = [row._replace(cosine=0.0) if row.estimator == "token-tis" else row for row in rows]
    assert not same_picture(draw(other, tmp_path / "other.png"), PICTURE)
