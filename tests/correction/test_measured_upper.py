"""Bounds of what was measured: Weight(upper="measured"), and the gate `standardized`, fair to every length."""

import itertools
import math
from typing import Any

import pytest
import torch
from correction_cases import Case, below_zero, case, correct, on_gaps
from enumeration import Batch, World

from megatron_rc import Corrected, MetricSums, Rejection, RolloutCorrection, Weight
from megatron_rc.correction.measured_upper import FIRST, GRID, SUMS, UNITS, least_error

LEVELS: list[Any] = ["token", "sequence", "geometric"]
GATE = RolloutCorrection(reject=(Rejection("standardized", "sequence", upper=2.0),))
REJECTED = "rejected_standardized_sequence_seq"


def measured(level: Any) -> RolloutCorrection:
    return RolloutCorrection(Weight(level, upper="measured"))


def units_by_the_book(batch: Case, level: str) -> list[tuple[float, float]]:
    """(rho, A) of every token, or of every whole sequence."""
    units, advantages = [], batch.advantages
    if len(advantages) != len(batch.mask):
        advantages = advantages.repeat_interleave(batch.cu_seqlens.diff())
    both = (batch.train - batch.rollout, advantages)
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        logs, of_tokens = (values[a:b][batch.mask[a:b]].tolist() for values in both)
        if level == "token":
            units += [(math.exp(log), A) for log, A in zip(logs, of_tokens, strict=True)]
        elif logs:
            total = sum(logs) / (len(logs) if level == "geometric" else 1)
            units.append((math.exp(total), sum(of_tokens) / len(logs)))
    return units


def error(units: list[tuple[float, float]], upper: float, sequences: int) -> float:
    """MSE(C) by the words of its definition."""
    bias = sum(max(rho - upper, 0) * abs(A) for rho, A in units) / len(units)
    weighted = [min(rho, upper) * A for rho, A in units]
    centre = sum(weighted) / len(units)
    return bias**2 + sum((w - centre) ** 2 for w in weighted) / len(units) / sequences


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_the_metric_is_the_c_of_the_grid_with_the_least_error(level: Any, per_token: bool) -> None:
    gap = {"token": 0.7, "sequence": 0.15, "geometric": 3.0}[level]
    batch = case([30, 5, 80, 0, 41, 17] * 40, density=0.9, gap=gap, dtype=torch.float64)
    if per_token:
        batch.advantages = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(3)).double()
    found = correct(*batch.arguments, correction=measured(level), measured_upper=FIRST, **batch.options)
    units = units_by_the_book(batch, level)
    errors = [error(units, upper, 200) for upper in GRID]
    assert found.metrics.values()["measured_upper"] == GRID[errors.index(min(errors))]
    assert 1 < found.metrics.values()["measured_upper"] < 100


@pytest.mark.parametrize("level", LEVELS)
def test_the_weight_is_truncated_at_the_c_of_the_rollout_before(level: Any) -> None:
    batch = case([30, 5, 80, 41], gap=0.7)
    given = correct(*batch.arguments, correction=measured(level), measured_upper=1.31, **batch.options)
    fixed = correct(*batch.arguments, correction=RolloutCorrection(Weight(level, upper=1.31)), **batch.options)
    assert torch.equal(given.weights, fixed.weights) and given.correction == measured(level)
    values = given.metrics.values()
    assert {name: values[name] for name in fixed.metrics.values()} == pytest.approx(fixed.metrics.values(), nan_ok=True)


@pytest.mark.parametrize("samples", [4, 40, 400, 4000])
def test_the_measured_c_has_the_least_enumerated_error_and_loosens_as_samples_grow(samples: int) -> None:
    """Over every sequence of a world, for a batch of so many: exact bias and variance of mean min(rho, C) A."""
    world = World(4, stops=False, seed=2, gap=0.9)
    batch = Batch.population(world)
    options: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "advantages": batch.world.reward[batch.which]}
    metrics = correct(*batch.arguments, correction=measured("sequence"), measured_upper=FIRST, **options).metrics
    found = {name: metrics._fetch()[""][name] for name in (*SUMS, UNITS)} | {"sequences": float(samples)}
    mu, rho, A = world.probability(world.mu.log()), world.rho(), world.reward
    errors = []
    for upper in GRID:
        weighted = rho.clamp(max=upper) * A
        bias_bound = (mu * (rho - upper).clamp(min=0) * A.abs()).sum()
        mean = (mu * weighted).sum()
        assert abs(mean - (mu * rho * A).sum()) <= bias_bound + 1e-12
        errors.append((bias_bound**2 + (mu * (weighted - mean) ** 2).sum() / samples).item())
    assert least_error(found) == GRID[errors.index(min(errors))]
    if samples > 4:
        assert least_error(found) >= least_error(found | {"sequences": samples / 10})


@pytest.mark.parametrize("given", [None, 0.0, math.nan])
def test_a_caller_without_a_c_of_the_rollout_before_is_refused(given: float | None) -> None:
    batch = case([4, 5])
    with pytest.raises(ValueError, match="measured_upper must be the metric measured_upper of the previous rollout"):
        correct(*batch.arguments, correction=measured("token"), measured_upper=given, **batch.options)
    with pytest.raises(ValueError, match="advantages must be given for upper='measured'"):
        correct(*batch.arguments, correction=measured("token"), measured_upper=2.0, cu_seqlens=batch.cu_seqlens)
    with pytest.raises(ValueError, match="upper must be a number in my hook, which keeps no bound"):
        measured("token").check_one_micro_batch("my hook")


def gaussian(length: int, k3: float, tokens: int = 160_000, seed: int = 0) -> torch.Tensor:
    """[S, T] honest log-ratios of whole sequences: variance 2 K, and the mean -K that E[rho] = 1 asks for."""
    noise = torch.randn(max(tokens // length, 64), length, generator=torch.Generator().manual_seed(seed))
    return noise.mul_(math.sqrt(2 * k3)).sub_(k3)


def gated(log_ratios: torch.Tensor, **options: Any) -> Corrected:
    mask = torch.ones_like(log_ratios, dtype=torch.bool)
    pair = below_zero(log_ratios, torch.zeros_like(log_ratios))
    return correct(*pair, mask, correction=GATE, backend="torch", **options)


@pytest.mark.parametrize("k3", [1e-5, 1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("length", [40, 400, 2000, 16_000])
def test_94_to_96_percent_of_honest_sequences_are_kept_at_every_length_and_gap(length: int, k3: float) -> None:
    # the distribution of a sum is known: many sequences cost no more than their sums
    generator = torch.Generator().manual_seed(length)
    sums = torch.randn(20_000, generator=generator).mul(math.sqrt(2 * length * k3)).sub(length * k3)
    measured = gated(gaussian(length, k3)).mean_k3
    assert measured is not None and measured.item() == pytest.approx(k3, rel=0.02)
    # a sequence of two tokens represents one of T: of K T / 2 each
    kept = 1 - gated(torch.stack([sums / 2, sums / 2], 1), mean_k3=measured * length / 2).metrics.values()[REJECTED]
    assert 0.93 <= kept <= 0.97
    assert kept == pytest.approx(0.9545, abs=0.015)


@pytest.mark.parametrize("k3", [3e-4, 1e-3, 1e-2])
def test_one_odd_token_among_50_000_moves_the_kept_share_by_less_than_a_point(k3: float) -> None:
    honest = gaussian(100, k3, tokens=50_000)
    odd = honest.clone()
    odd[7, 3] = 10.0
    before, after = gated(honest), gated(odd)
    assert abs(after.mask.double().mean() - before.mask.double().mean()) < 0.01
    assert not after.mask[7].any()
    # without the cap on k3, K would be that of the odd token
    assert not gated(odd, mean_k3=torch.tensor(math.exp(10) / 50_000)).mask.any()


@pytest.mark.parametrize("noise", [0.0, 3e-7])
def test_an_exact_engine_keeps_everything(noise: float) -> None:
    corrected = gated(noise * torch.randn(9, 4000, generator=torch.Generator().manual_seed(1)).sign())
    assert corrected.mask.all()
    assert corrected.metrics.values()["pi_mass_kept"] == 1


def test_a_sequence_on_the_bound_is_kept_and_beyond_it_is_dropped() -> None:
    # T = 4 and K = 1/32: z = (S + 1/8) / (1/2) is 2 at S = 7/8 and at S = -9/8
    mean_k3 = torch.tensor(1 / 32)
    for edge, step in ((7 / 8, 1e-6), (-9 / 8, -1e-6)):
        for total, kept in ((edge, True), (edge + step, False)):
            assert on_gaps(GATE, total, 0.0, 0.0, 0.0, mean_k3=mean_k3).mask.all() == kept, total


@pytest.mark.parametrize(("spread", "percent"), [(0.5, 84), (2.0, 50), (16.0, 0.0128)])
def test_the_gate_keeps_ever_less_of_what_pi_would_sample(spread: float, percent: float) -> None:
    """What it costs to be an outlier filter: pi_mass_kept, against a draw from pi."""
    found = gated(gaussian(40, spread / 40), mean_k3=torch.tensor(spread / 40)).metrics.values()["pi_mass_kept"]
    assert 100 * found == pytest.approx(percent, rel=0.05)
    # under pi, log rho(y) is Gaussian with the same variance and the mean +T K
    draws = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = (draws * math.sqrt(2 * spread) + 2 * spread) / math.sqrt(2 * spread)
    assert found == pytest.approx((z.abs() <= 2).double().mean().item(), abs=5e-3)


def test_a_given_mean_k3_makes_every_cut_into_micro_batches_equal() -> None:
    batch, gate = case([30, 5, 80, 0, 41, 17], density=0.9), Rejection("standardized", "segment", upper=1.0)
    correction = RolloutCorrection(reject=(gate,))
    whole = correct(*batch.arguments, correction=correction, cu_seqlens=batch.cu_seqlens)
    masks, sums = [], MetricSums()
    for first, last in ((0, 1), (1, 4), (4, 6)):
        part = batch.part(first, last)
        found = correct(*part.arguments, correction=correction, cu_seqlens=part.cu_seqlens, mean_k3=whole.mean_k3)
        masks.append(found.mask)
        sums.merge(found.metrics)
    assert torch.equal(torch.cat(masks), whole.mask)
    assert 0 < whole.mask.sum() < batch.mask.sum()
    assert sums.values() == pytest.approx(whole.metrics.values(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_k3_is_returned_in_fp64_whatever_was_given(dtype: torch.dtype) -> None:
    given = torch.tensor(1 / 32, dtype=dtype)
    for mean_k3 in (None, given):
        found = on_gaps(GATE, 0.5, 0.0, -0.25, mean_k3=mean_k3).mean_k3
        assert found is not None and found.dtype == torch.float64 and found > 0
    assert found == given


def test_the_mean_k3_is_on_the_device_of_the_batch_and_a_single_number() -> None:
    with pytest.raises(ValueError, match=r"mean_k3 must be 0-d and on cpu, got \(1,\) on cpu"):
        gated(torch.zeros(2, 3), mean_k3=torch.zeros(1))


def test_a_caller_of_one_micro_batch_refuses_it() -> None:
    with pytest.raises(ValueError, match="reject must not use 'standardized' in my hook, which sees one micro-batch"):
        GATE.check_one_micro_batch("my hook")
    RolloutCorrection.preset("geo-mask").check_one_micro_batch("my hook")
