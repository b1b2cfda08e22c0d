"""examples/rollout_correction.py, which owners copy into their trainer, computes what `correct` computes."""

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from torch import Tensor

from megatron_rc import Rejection, RolloutCorrection, Weight, policy_loss
from megatron_rc import correct as correct_of_library

PATH = Path(__file__).parents[2] / "examples/rollout_correction.py"
BOUNDS = st.sampled_from([(None, 2.0), (0.5, 2.0), (0.5, None), (0.9, 1.1), (0.5, 5.0)])
VALUES = st.sampled_from([math.nan, math.inf, -math.inf, 0.5, 5e-4, -80.0])
PLACES = st.tuples(st.integers(0, 1), st.integers(0, 5), st.integers(0, 8), VALUES)


@pytest.fixture(scope="module")
def copied() -> ModuleType:
    """The file as an owner's module."""
    module = ModuleType("copied_rollout_correction")
    sys.modules[module.__name__] = module
    exec(compile(PATH.read_text(), str(PATH), "exec"), module.__dict__)
    return module


def batch(seed: int, spread: float, damage: list[tuple[int, int, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of both policies and the mask [6, 9]; ``damage`` is (side, row, column, value)."""
    made = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(6, 9, generator=made)
    both = torch.stack([(rollout + spread * torch.randn(6, 9, generator=made)).clamp(max=0), rollout])
    for side, row, column, value in damage:
        both[side, row, column] = value
    return both[0], both[1], torch.rand(6, 9, generator=made) < 0.7


@given(
    st.integers(0, 999), st.sampled_from([1e-3, 0.1, 1.0, 9.0]), st.lists(PLACES, max_size=4),
    st.sampled_from(["token", "sequence", "geometric"]), st.sampled_from(["none", "truncate", "clip", "mask"]),
    BOUNDS, st.none() | BOUNDS,
)  # fmt: skip
def test_it_gives_the_weights_the_mask_and_the_metrics_of_the_library(
    copied: ModuleType, seed: int, spread: float, damage: Any, level: Any, mode: Any, bounds: Any, keep: Any
) -> None:
    lower, upper = (None, bounds[1] or 3.0) if mode == "truncate" else (bounds[0] or 0.7, bounds[1] or 1.4)
    if mode == "mask":
        lower, upper = bounds
    low, high = keep or (None, None)
    tensors = batch(seed, spread, damage)
    found = copied.correct(*tensors, copied.Settings(level, mode, lower, upper, low, high))
    gates = () if keep is None else (Rejection("ratio", "sequence", "mean", lower=low, upper=high),)
    weight = None if mode == "none" else Weight(level, mode, lower, upper)
    expected = correct_of_library(*tensors, correction=RolloutCorrection(weight, gates))
    assert torch.equal(found.mask, expected.mask)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-6, atol=1e-30)
    theirs = expected.metrics.values()
    for name, value in copied.metrics(found.sums).items():
        assert value == pytest.approx(theirs[name], rel=1e-6, abs=1e-12, nan_ok=True), name


def test_sums_of_parts_add_up_and_dropped_tokens_stay_in_the_denominator(copied: ModuleType) -> None:
    old, rollout, mask = batch(1, 0.5, [(0, 2, 3, math.nan)])
    settings = copied.Settings("token", "mask", 0.8, 1.25)
    whole = copied.correct(old, rollout, mask, settings)
    parts = [copied.correct(*(t[rows] for t in (old, rollout, mask)), settings) for rows in (slice(2), slice(2, 6))]
    torch.testing.assert_close(parts[0].sums + parts[1].sums, whole.sums)
    current, advantages = old.nan_to_num().requires_grad_(), torch.ones(6, 9)
    corrected = correct_of_library(old, rollout, mask, correction=RolloutCorrection(Weight("token", "mask", 0.8, 1.25)))
    expected = policy_loss(current, old, advantages, corrected, scale=mask / mask.sum()).loss
    losses = -(current - old).exp() * advantages
    torch.testing.assert_close(copied.policy_gradient_loss(losses, whole.weights, mask.sum()), expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("word",), "level must be"), (("token", "cut"), "mode must be"),
        (("token", "truncate", 0.5), "needs an upper"), (("token", "mask", None, None), "needs a bound"),
        (("token", "clip"), "needs both"), (("token", "clip", 2.0, 1.0), "lower <= upper"),
        (("token", "clip", -1.0, 2.0), "lower <= upper"), (("token", "mask", None, 0.0), "lower <= upper"),
        (("token", "none", None, None, math.nan), "lower <= upper"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(copied: ModuleType, fields: Any, said: str) -> None:
    refuses(said, copied.Settings, *fields)
    refuses(r"must be \[B, T\]", copied.correct, torch.zeros(3), torch.zeros(3), torch.ones(3), copied.Settings())


def test_the_file_is_small_and_imports_torch_alone() -> None:
    lines = PATH.read_text().splitlines()
    assert len(lines) <= 200
    imported = {line.split()[1] for line in lines if line.startswith(("import", "from"))}
    assert imported <= {"dataclasses", "typing", "torch"}
