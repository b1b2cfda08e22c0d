"""Batches on which the correction kernels must agree with PyTorch in fp64, and what agreeing means."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from correction_cases import Case, below_zero, correct
from hypothesis import strategies as st
from torch import Tensor

from megatron_rc import Corrected, Rejection, RolloutCorrection, Weight
from megatron_rc.kernels.launch_table import LAUNCH

INF, NAN = math.inf, math.nan
UNIT_BLOCK = 16
BOUNDS = {  # that split the batches below, and that no value of them comes near
    "ratio": (0.803, 1.297), "k2": (0.0103, 0.1207), "k3": (0.0103, 0.1207), "abs_log_ratio": (0.1013, 0.5017),
    "prob_diff": (-0.0611, 0.0507), "surprise": (-0.503, 0.607), "novelty": (-0.203, 0.307), "lag": (0.5, 6.5),
}  # fmt: skip
LEVELS = ("token", "sequence", "segment")
SEGMENTS = RolloutCorrection(
    Weight("segment", "mask", 0.703, 1.497),
    (
        Rejection("k3", "segment", "max", upper=0.63),
        Rejection("surprise", "segment", "min", lower=-1.23, when="negative_advantage"),
        Rejection("prob_diff", "token", upper=0.0611, when="positive_advantage"),
        Rejection("ratio", "segment", "sum", lower=0.303),
    ),
    "batch",
)


@contextlib.contextmanager
def small_blocks() -> Iterator[None]:
    """Many chunks from few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        for name, block in (
            *(("unit_sums", UNIT_BLOCK), ("correction", UNIT_BLOCK)),
            *(("unit_combine", 2), ("metric_sums", 16), ("normalize", 16)),
        ):
            patch.setitem(LAUNCH, name, LAUNCH[name]._replace(block=block))
        yield


def batch_of(
    lengths: list[int], seed: int = 0, *, gap: float = 0.4, density: float = 0.7, corrupt: float = 0.0,
    ids: str | None = None, per_token: bool = False, sampling: bool = True,
) -> Case:  # fmt: skip
    """Random tokens for sequences of these lengths; rows without a loss hold rubbish.

    Log-probs are multiples of 2^-10, so that log-ratios are the same in fp32 and fp64.

    Args:
        corrupt: share of log-probs that are NaN, infinite or above 0.
        ids: give segment ids, of turns with rows without a loss inside, that ascend over the "batch" or begin anew in
            every "sequence"; None leaves them out.
        per_token: advantages of tokens, not of sequences.
        sampling: give log-probs by the version that sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    rollout = -(torch.rand(n, generator=generator) * 3 * 1024).round() / 1024
    train, rollout = below_zero(rollout + (normal(n) * gap * 1024).round() / 1024, rollout)
    for side in (train, rollout):
        odd = torch.rand(n, generator=generator) < corrupt
        side[odd] = torch.tensor([NAN, INF, -INF, 0.5])[torch.randint(4, (n,), generator=generator)][odd]
    mask = torch.rand(n, generator=generator) < density
    statistics = {"surprise": normal(n), "novelty": normal(n).half()}
    statistics["surprise"][torch.rand(n, generator=generator) < corrupt] = NAN
    rubbish = torch.tensor([NAN, INF, -INF, 3.0])[torch.randint(4, (n,), generator=generator)]
    train, rollout = (torch.where(mask, x, rubbish) for x in (train, rollout))
    statistics = {name: torch.where(mask, x, rubbish.to(x.dtype)) for name, x in statistics.items()}
    advantages = normal(n if per_token else len(lengths))
    of_tokens = torch.randint(0, 20, (n,), generator=generator) // torch.randint(1, 9, (n,), generator=generator)
    lags = torch.where(mask, of_tokens, -7)
    options: dict[str, Any] = {"advantages": advantages, "statistics": statistics, "lags": lags}
    shift = (normal(n) * gap * 512).round() / 1024
    if sampling:
        options["sampling_logprobs"] = torch.where(mask, (rollout + shift).clamp(max=0), rubbish)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if ids is not None:
        turns = torch.rand(n, generator=generator) < 0.2
        turns[cu_seqlens[:-1][cu_seqlens[:-1] < n].long()] = True
        number = turns.cumsum(0)
        if ids == "sequence":
            number = torch.cat([part - part[0] if len(part) else part for part in number.split(lengths)])
        odd = torch.randint(-5, 99, (n,), generator=generator)
        options |= {"segment_ids": torch.where(mask, number, odd), "num_segments": n + 2}
    return Case(train, rollout, mask, cu_seqlens, **options)


def double(batch: Case) -> Case:
    return batch.mapped(lambda value: value.double() if value.is_floating_point() else value)


def padded(batch: Case, rows: int) -> Case:
    """The same tokens as rows of one length."""

    def in_rows(value: Tensor) -> Tensor:
        return value.view(rows, -1) if len(value) == len(batch.mask) else value

    return replace(batch.mapped(in_rows), cu_seqlens=None)


@st.composite
def corrections(draw: st.DrawFn) -> RolloutCorrection:
    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    def bounds(name: str) -> dict[str, float | None]:
        lower, upper = BOUNDS[name]
        sides = one_of("lower", "upper", "both")
        return {"lower": None if sides == "upper" else lower, "upper": None if sides == "lower" else upper}

    weight = None
    level = one_of(None, "token", "sequence", "geometric", "segment", "prefix")
    if level is not None:
        mode = one_of("truncate", "clip", "mask")
        both = {"lower": BOUNDS["ratio"][0], "upper": BOUNDS["ratio"][1]}
        sides = {"truncate": {"upper": one_of(1.297, INF)}, "clip": both, "mask": bounds("ratio")}[mode]
        varied = one_of({}, {}, {"growth": "sqrt_lag"}, {"upper_by_lag": ((0, 1.711), (3, 1.113))})
        if level == "token" and not varied:
            certain = {"growth": "confidence", "confidence_floor": 0.213, "upper": 1.931}
            varied = one_of({}, {"staleness_upper": 1.211}, *[certain] * (mode == "truncate"))
        if level == "prefix":
            varied = one_of({}, {"growth": "sqrt_position"})
        if varied.get("upper_by_lag") and sides.get("upper") is None:
            varied = {}
        weight = Weight(level, mode, **(sides | varied))
    gates = tuple(
        Rejection(
            name, one_of(*LEVELS), one_of("sum", "mean", "max", "min"),
            when=one_of("always", "negative_advantage", "positive_advantage"), **bounds(name),
        )
        for name in draw(st.lists(st.sampled_from([*BOUNDS]), max_size=4))
    )  # fmt: skip
    return RolloutCorrection(weight, gates, one_of("none", "batch"), log_ratio_bound=one_of(20.0, 3.3))


@st.composite
def batches(draw: st.DrawFn) -> Case:
    batch = batch_of(
        draw(st.lists(st.integers(0, 3) | st.sampled_from([15, 16, 17, 40, 70]), min_size=1, max_size=4)),
        draw(st.integers(0, 999)), gap=draw(st.sampled_from([0.02, 0.4, 0.4, 12.0])),
        density=draw(st.sampled_from([0.0, 0.7, 0.7, 1.0])), corrupt=draw(st.sampled_from([0.0, 0.0, 0.05])),
        ids=draw(st.sampled_from([None, "batch", "sequence"])), per_token=draw(st.booleans()),
    )  # fmt: skip
    if draw(st.booleans()):
        return batch
    return padded(batch_of([draw(st.sampled_from([1, 16, 19]))] * 3, draw(st.integers(0, 999)), corrupt=0.03), 3)


def assert_agrees(batch: Case, correction: RolloutCorrection, **groups: Any) -> Corrected:
    """Mask exactly, weights to twice the error of PyTorch in fp32 and one rounding, metrics to 1e-6."""

    def answer(given: Case, backend: str) -> Corrected:
        return correct(*given.arguments, correction=correction, backend=backend, **given.options, **groups)

    found, plain, truth = answer(batch, "triton"), answer(batch, "torch"), answer(double(batch), "torch")
    assert found.weights.dtype == torch.float32 and found.mask.dtype == found.bad_sequences.dtype == torch.bool
    assert found.weights.shape == found.mask.shape == batch.mask.shape
    assert torch.equal(found.mask, truth.mask)
    assert torch.equal(found.bad_sequences, truth.bad_sequences)
    assert not found.weights[~found.mask].any()
    allowed = 2 * (plain.weights - truth.weights).abs() + 2**-23 * truth.weights
    assert ((found.weights - truth.weights).abs() <= allowed).all()
    assert_metrics(found.metrics.values(), truth.metrics.values())
    return found


def assert_metrics(found: dict[str, float], truth: dict[str, float]) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        # a correlation of next to equal numbers, or a spread of next to nothing, is rounding
        slack = 1e-6 if name in ("pi_mass_kept", "prob_correlation", "weight_std", "rho_std", "seq_rho_std") else 1e-13
        assert found[name] == pytest.approx(value, rel=1e-6, abs=slack, nan_ok=True), name
