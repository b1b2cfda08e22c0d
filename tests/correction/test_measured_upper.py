"""Weight(upper="measured"): the bound that the rollout before measured, and how the next one is measured."""

import itertools
import math
from typing import Any

import pytest
import torch
from correction_cases import Case, case, correct
from enumeration import Batch, World

from megatron_rc.correction.measured_upper import FIRST, GRID, SUMS, UNITS, least_error
from megatron_rc.correction.settings import RolloutCorrection, Weight

LEVELS: list[Any] = ["token", "sequence", "geometric"]


def measured(level: Any) -> RolloutCorrection:
    return RolloutCorrection(Weight(level, upper="measured"))


def units_by_the_book(batch: Case, level: str) -> list[tuple[float, float]]:
    """(rho, A) of every token, or of every whole sequence."""
    units, advantages = [], batch.advantages
    if len(advantages) != len(batch.mask):
        advantages = advantages.repeat_interleave(batch.cu_seqlens.diff())
    for a, b in itertools.pairwise(batch.cu_seqlens.tolist()):
        logs, of_tokens = (
            values[a:b][batch.mask[a:b]].tolist() for values in (batch.train - batch.rollout, advantages)
        )
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
