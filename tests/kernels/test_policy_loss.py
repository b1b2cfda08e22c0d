"""The fused policy loss against the fp64 torch backend, and what it launches, differentiates and refuses."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batch import PER_TOKEN, Result, answered, corrected_of, grouped, tokens, with_every_term
from on_device import CARD, ROUNDING, assert_same
from torch import Tensor

from megatron_rc import LossOptions, policy_loss
from megatron_rc.kernels.launch_table import LAUNCH
from megatron_rc.kernels.policy_loss import policy_loss_fwd
from megatron_rc.loss import reference
from megatron_rc.loss.reference import LossInputs
from speed.launches import count_launches, recorded_launches

pytestmark = [
    pytest.mark.kernel,
    # what numpy says of inf - inf, planted on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
INF, NAN = float("inf"), float("nan")
BLOCK = 16


@pytest.fixture(autouse=True, scope="module")
def _many_tiles_from_few_tokens() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAUNCH, "policy_loss", LAUNCH["policy_loss"]._replace(block=BLOCK))
        yield


def plant(batch: dict[str, Tensor], seed: int, *, loud: bool) -> None:
    """What is not finite and must leave no trace, and, when loud, also what must show."""
    generator = torch.Generator().manual_seed(seed)

    def some(where: Tensor, share: float = 0.2) -> Tensor:
        return where & (torch.rand(where.shape, generator=generator) < share)

    out = ~batch["loss_mask"]
    batch["mask"] |= out  # a mask counts within loss_mask only
    for name in PER_TOKEN:
        batch[name][some(out, 0.6)] = [NAN, INF, -INF][seed % 3]
    for name in ("advantages", "weights"):
        batch[name][some(batch["loss_mask"] & ~batch["mask"])] = NAN
    everywhere = torch.ones_like(out)
    batch["current"][some(everywhere)] = -INF
    batch["old"][some(everywhere)] = [NAN, INF, -INF][seed % 3]
    batch["reference"][some(everywhere)] = [INF, -INF][seed % 2]
    if loud:
        for name in ("current", "reference", "entropy", "weights"):
            batch[name][some(everywhere, 0.1)] = [NAN, INF][seed % 2]


def magnitudes(batch: dict[str, Tensor], truth: Result, **options: Any) -> tuple[dict[str, float], Tensor]:
    """Absolute terms of every metric and of the gradient of every token, so that none cancels another."""
    same_sign = {**batch, "advantages": -batch["advantages"].abs()}
    size = {k: abs(v) for k, v in answered(same_sign, "torch", dtype=torch.float64, **options).metrics.values().items()}
    total = batch["scale"].sum().item()
    terms = {"kl_ref": options["kl_coef"], "entropy": options["entropy_coef"]}
    counted = [name for name in terms if name in size and total]
    size["loss"] = size["policy_loss"] + sum(total * terms[name] * size[name] for name in counted)
    without = answered(batch, "torch", dtype=torch.float64, **{**options, "kl_coef": 0.0}).by_current
    return size, without.abs() + (truth.by_current - without).abs()


def assert_as_exact_as_torch(value: Tensor, plain: Tensor, truth: Tensor, size: Tensor | float) -> None:
    """Not further from the fp64 truth than twice fp32 torch and 1e-6 of the terms; equal where not finite.

    A card computes exp(x) as 2^(x log2 e), whose exponent is rounded: 6e-8 |x| more, for |x| up to 88.
    """
    finite = truth.isfinite() & (truth.abs() < torch.finfo(torch.float32).max)
    torch.testing.assert_close(value[~finite], truth[~finite].to(value.dtype), equal_nan=True, rtol=0, atol=0)
    error = (value.double() - truth).abs()
    allowed = 2 * (plain.double() - truth).abs() + (6e-6 if CARD else 1e-6) * size
    assert (error <= allowed)[finite].all(), (error - allowed)[finite].max()


@pytest.mark.parametrize("old", ["recompute", "current", "rollout"])
@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "reinforce"])
@settings(max_examples=20)
@given(
    n=st.integers(1, 70), seed=st.integers(0, 10_000), spread=st.sampled_from([0.1, 1.0, 40.0]),
    planted=st.sampled_from(["nothing", "silent", "loud"]),
    clips=st.sampled_from([(0.2, 0.28), (0.0, 0.0), (1.0, 9.0)]), dual_clip=st.sampled_from([None, 1.2, 3.0]),
    parts=st.sampled_from([(), ("reference",), ("entropy",), ("reference", "entropy")]),
    kl_coef=st.sampled_from([0.0, 0.3]), entropy_coef=st.sampled_from([0.0, 0.1]),
    upstream=st.integers(-3000, 3000).map(lambda n: n / 997),
)  # fmt: skip
def test_loss_gradients_and_metrics_are_those_of_torch(
    old: str, surrogate: str, n: int, seed: int, spread: float, planted: str, clips: tuple[float, float],
    upstream: float, **options: Any,
) -> None:  # fmt: skip
    batch = tokens(n, seed, spread)
    if planted != "nothing":
        plant(batch, seed, loud=planted == "loud")
    if surrogate != "ppo":
        options["dual_clip"] = None
    options |= dict(old=old, surrogate=surrogate, clip_lower=clips[0], clip_upper=clips[1], upstream=upstream)
    fused, plain = answered(batch, "triton", **options), answered(batch, "torch", **options)
    truth = answered(batch, "torch", dtype=torch.float64, **options)
    of_metrics, of_gradient = magnitudes(batch, truth, **options)
    assert fused.loss.dtype == plain.loss.dtype == fused.by_current.dtype == torch.float32
    assert_as_exact_as_torch(fused.loss, plain.loss, truth.loss, of_metrics["loss"])
    assert_as_exact_as_torch(fused.by_current, plain.by_current, truth.by_current, of_gradient)
    if truth.by_entropy is not None:
        torch.testing.assert_close(fused.by_entropy.double(), truth.by_entropy, rtol=1e-6, atol=0)
    values, expected = (
        {name: torch.tensor(value, dtype=torch.float64) for name, value in result.metrics.values().items()}
        for result in (fused, truth)
    )
    assert list(values) == list(expected)
    for name, value in plain.metrics.values().items():
        if name in ("clip_high", "clip_low", "dual_clip"):
            torch.testing.assert_close(values[name], expected[name], rtol=0, atol=0, equal_nan=True)
        else:
            plain_value = torch.tensor(value, dtype=torch.float64)
            assert_as_exact_as_torch(values[name], plain_value, expected[name], of_metrics[name])


@pytest.mark.parametrize("kl_estimator", ["k1", "k2"])
def test_a_kl_estimator_changes_the_value_alone(kl_estimator: str) -> None:
    batch, asked = tokens(70, 3, 1.0), {"parts": ("reference",), "kl_coef": 0.3}
    found, usual = (answered(batch, "triton", kl_estimator=k, **asked) for k in (kl_estimator, "k3"))
    truth = answered(batch, "torch", dtype=torch.float64, kl_estimator=kl_estimator, **asked).metrics.values()
    assert torch.equal(found.by_current, usual.by_current)
    assert {name: found.metrics.values()[name] for name in truth} == pytest.approx(truth, rel=1e-5)
    assert truth["kl_ref"] != pytest.approx(usual.metrics.values()["kl_ref"], rel=0.01)


def test_log_ratios_move_the_loss_up_to_their_bound_and_no_further() -> None:
    bound = 20.0
    beyond = torch.tensor(bound).nextafter(torch.tensor(INF)).item()
    edges = torch.tensor([bound, beyond, -bound, -beyond, 0.0])
    batch = tokens(25)
    batch["current"] = torch.zeros(25)
    batch["old"], batch["reference"] = (-part.flatten() for part in torch.meshgrid(edges, edges, indexing="ij"))
    batch |= dict(advantages=-torch.ones(25), weights=torch.ones(25), mask=torch.ones(25, dtype=torch.bool))
    batch["scale"] = torch.ones(25)
    options: dict[str, Any] = dict(kl_coef=0.5)
    fused, truth = answered(batch, "triton", **options), answered(batch, "torch", dtype=torch.float64, **options)
    torch.testing.assert_close(fused.by_current.double(), truth.by_current, rtol=2e-6, atol=1e-14)
    grid = answered(batch, "triton", kl_coef=0.0).by_current
    ratio, distance = (-batch["old"].double()).clamp(max=bound).exp(), batch["reference"].double().clamp(-bound, bound)
    torch.testing.assert_close((fused.by_current - grid).double(), -0.5 * ratio * distance, rtol=2e-6, atol=1e-14)
    grid = grid.view(5, 5)
    assert (grid[0] > 0).all() and (grid[1] == 0).all()


@pytest.mark.parametrize("distance", [1e-6, 1e-4, 0.03, 0.5, 0.999, 1.0, 1.001, 5.0, 20.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_k3_of_near_and_far_policies_keeps_its_relative_accuracy(distance: float, sign: float) -> None:
    batch = tokens(1)
    d, one = torch.tensor([sign * distance]), torch.ones(1)
    batch |= dict(current=0 * one, old=0 * one, reference=d, scale=one, advantages=0 * one)
    fused = answered(batch, "triton", kl_coef=1.0)
    exact = d.double()
    assert fused.metrics.values()["kl_ref"] == pytest.approx((exact.expm1() - exact).item(), rel=3e-7)
    assert fused.by_current.item() == pytest.approx(-exact.item(), rel=1e-7)


@pytest.mark.parametrize("advantages", ["by token", "by sequence"])
def test_padded_layout_answers_as_the_packed_one(advantages: str) -> None:
    batch = tokens(3 * 13, 5)
    values = torch.tensor([0.5, -1.0, 2.0])
    batch["advantages"] = values.repeat_interleave(13)
    rows = {name: value.view(3, 13) for name, value in batch.items()}
    if advantages == "by sequence":
        rows["advantages"] = values
    options: dict[str, Any] = dict(kl_coef=0.2, entropy_coef=0.1, dual_clip=2.0)
    packed, padded = answered(batch, "triton", **options), answered(rows, "triton", **options)
    assert_same(padded.loss, packed.loss)
    assert_same(padded.by_current, packed.by_current.view(3, 13))
    assert padded.metrics.values() == pytest.approx(packed.metrics.values(), rel=ROUNDING, abs=0)


@pytest.mark.parametrize("layout", ["columns first", "odd addresses"])
def test_tensors_that_lie_differently_in_memory_give_one_answer(layout: str) -> None:
    rows = {name: value.view(5, 8) for name, value in tokens(40, 1).items()}
    if layout == "columns first":
        strided = {name: value.t().contiguous().t() for name, value in rows.items()}
    else:
        strided = {name: torch.cat([v[:1, 0], v.flatten()])[1:].view(5, 8) for name, v in rows.items()}
    straight, result = (answered(part, "triton", kl_coef=0.2, entropy_coef=0.1) for part in (rows, strided))
    assert straight.by_entropy is not None and result.by_entropy is not None
    for found, expected in zip(result[:3], straight[:3], strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    batch = {n: v.to(dtype) if v.is_floating_point() else v for n, v in tokens(40, 1).items()}
    options: dict[str, Any] = dict(kl_coef=0.2, entropy_coef=0.1)
    wide = answered(batch, "triton", **options)
    for backend in ("triton", "torch"):
        result = answered(batch, backend, dtype=dtype, **options)
        assert result.loss.dtype == torch.float32 and result.by_current.dtype == result.by_entropy.dtype == dtype
        torch.testing.assert_close(result.loss, wide.loss)
        torch.testing.assert_close(result.by_current.float(), wide.by_current, rtol=0.01, atol=1e-6)
        torch.testing.assert_close(result.by_entropy.float(), wide.by_entropy, rtol=0.01, atol=1e-6)


def test_the_number_of_tiles_changes_sums_by_fp64_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = tokens(300, 2)
    arguments = [batch[n] for n in ("current", "old", "advantages", "weights", "mask", "scale", "reference", "entropy")]
    *inputs, entropy = arguments
    options = LossOptions(dual_clip=1.5, kl_coef=0.1, entropy_coef=0.1)
    results = []
    for block in (16, 16, 64, 1024):
        monkeypatch.setitem(LAUNCH, "policy_loss", LAUNCH["policy_loss"]._replace(block=block))
        results.append(policy_loss_fwd(*arguments, **asdict(options), log_ratio_bound=20.0, with_coefficients=True))
    (loss, totals, coefficients), repeated, *others = results
    assert torch.equal(loss, repeated[0]) and torch.equal(totals, repeated[1])
    for other in (repeated, *others):
        torch.testing.assert_close(other[1], totals, rtol=1e-13, atol=1e-15)
        assert coefficients is not None and torch.equal(other[2], coefficients)
    expected = reference.policy_loss(inputs[0], entropy, LossInputs(*inputs[1:], 20.0), options)[1]
    torch.testing.assert_close(totals, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.interpreter
@pytest.mark.parametrize("padded", [False, True])
def test_forward_is_two_launches_and_backward_one(padded: bool) -> None:
    batch = tokens(40, 1)
    if padded:
        batch = {name: value.view(4, 10) for name, value in batch.items()} | {"advantages": torch.ones(4, 1)}
    current, entropy = batch["current"].requires_grad_(), batch["entropy"].requires_grad_()
    scale, corrected = batch["scale"], corrected_of(batch)
    options = grouped(reference_logprobs=batch["reference"], kl_coef=0.2, entropy=entropy, entropy_coef=0.1)
    results = []

    def forward() -> None:
        results.append(policy_loss(current, batch["old"], batch["advantages"], corrected, scale=scale, **options).loss)

    upstream = torch.tensor(2.0)
    counted = count_launches(forward)
    assert counted.kernels == ["policy_loss_fwd_kernel", "policy_loss_reduce_kernel"]
    assert counted.total == 2 and not counted.collectives and not counted.waits, counted
    counted = count_launches(lambda: torch.autograd.grad(results[0], (current, entropy), upstream))
    assert counted.kernels == ["policy_loss_bwd_kernel"]
    assert counted.total == 1 and not counted.collectives and not counted.waits, counted


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "reinforce"])
def test_no_token_at_all_gives_a_differentiable_zero(shape: tuple[int, ...], surrogate: str) -> None:
    batch = {name: value.view(shape) for name, value in tokens(0).items()}
    if len(shape) == 2:
        batch["advantages"] = torch.ones(shape[0])
    result = answered(batch, "triton", kl_coef=0.2, entropy_coef=0.1, surrogate=surrogate)
    assert result.loss.item() == 0 and result.by_current.shape == shape
    expected = answered(batch, "torch", kl_coef=0.2, entropy_coef=0.1, surrogate=surrogate)
    assert result.metrics.values() == pytest.approx(expected.metrics.values(), nan_ok=True)


def test_only_current_and_entropy_have_gradients_and_each_alone_if_asked() -> None:
    for backend in ("triton", "torch"):
        batch = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in tokens(20, 4).items()}
        full = answered(batch, backend, kl_coef=0.2, entropy_coef=0.1)
        batch["current"] = batch["current"].detach()
        with_every_term(batch, batch["scale"], backend=backend).loss.backward()
        assert full.by_entropy is not None and torch.equal(batch["entropy"].grad, full.by_entropy)
        assert all(batch[name].grad is None for name in ("old", "advantages", "weights", "scale", "reference"))


@pytest.mark.interpreter
def test_without_a_gradient_no_coefficient_is_written() -> None:
    batch = tokens(20, 4)
    given = batch["current"], batch["old"], batch["advantages"], corrected_of(batch)
    with recorded_launches() as launches:
        loss, metrics = policy_loss(*given, scale=batch["scale"])
    assert not loss.requires_grad and launches[0].arguments["coefficients"] is None
    differentiable = answered(batch, "triton", parts=())
    assert torch.equal(loss, differentiable.loss) and metrics.values() == differentiable.metrics.values()


def test_metrics_of_both_backends_merge() -> None:
    batch = tokens(20, 4)
    options: dict[str, Any] = dict(kl_coef=0.2, entropy_coef=0.1, dual_clip=1.5)
    fused, plain = (answered(batch, backend, **options).metrics for backend in ("triton", "torch"))
    # the loss adds up, and means stay
    before = plain.values() | {name: 2 * plain.values()[name] for name in ("loss", "policy_loss")}
    assert fused.merge(plain).values() == pytest.approx(before, rel=1e-6, abs=1e-6)


def test_fp64_goes_to_torch_or_is_refused_by_name() -> None:
    batch = {n: v.double() if v.is_floating_point() else v for n, v in tokens(4).items()}
    assert answered(batch, "auto", dtype=torch.float64).loss.dtype == torch.float64
    with pytest.raises(ValueError, match="current_logprobs must be bfloat16, float16 or float32 .* got torch.float64"):
        answered(batch, "triton", dtype=torch.float64)
