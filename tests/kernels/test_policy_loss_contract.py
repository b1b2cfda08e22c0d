"""What the fused policy loss launches, differentiates and refuses."""

from typing import Any

import pytest
import torch
from grouped import grouped
from loss_batch import corrected_of, with_every_term
from policy_loss_data import evaluate, tokens

from megatron_rc.loss.policy_loss import policy_loss
from speed.launches import count_launches, recorded_launches

pytestmark = [
    pytest.mark.kernel,
    # what numpy says of inf - inf, planted on purpose
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.mark.interpreter
@pytest.mark.parametrize("padded", [False, True])
def test_forward_is_two_launches_and_backward_one(padded: bool) -> None:
    batch = tokens(40, 1)
    if padded:
        batch = {name: value.view(4, 10) for name, value in batch.items()} | {"advantages": torch.ones(4, 1)}
    current, entropy = batch["current"].requires_grad_(), batch["entropy"].requires_grad_()
    scale, corrected = batch["scale"], corrected_of(batch)
    options: dict[str, Any] = dict(reference_logprobs=batch["reference"], kl_coef=0.2, entropy=entropy)
    results = []

    def forward() -> None:
        result = policy_loss(
            current, batch["old"], batch["advantages"], corrected, scale=scale, **grouped(entropy_coef=0.1, **options)
        )
        results.append(result.loss)

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
    result = evaluate(batch, "triton", kl_coef=0.2, entropy_coef=0.1, surrogate=surrogate)
    assert result.loss.item() == 0 and result.by_current.shape == shape
    expected = evaluate(batch, "torch", kl_coef=0.2, entropy_coef=0.1, surrogate=surrogate)
    assert result.metrics.values() == pytest.approx(expected.metrics.values(), nan_ok=True)


def test_only_current_and_entropy_have_gradients_and_each_alone_if_asked() -> None:
    for backend in ("triton", "torch"):
        batch = {n: v.requires_grad_() if v.is_floating_point() else v for n, v in tokens(20, 4).items()}
        full = evaluate(batch, backend, kl_coef=0.2, entropy_coef=0.1)
        batch["current"] = batch["current"].detach()
        with_every_term(batch, batch["scale"], backend=backend).loss.backward()
        assert full.by_entropy is not None and torch.equal(batch["entropy"].grad, full.by_entropy)
        assert all(batch[name].grad is None for name in ("old", "advantages", "weights", "scale", "reference"))


@pytest.mark.interpreter
def test_without_a_gradient_no_coefficient_is_written() -> None:
    batch = tokens(20, 4)
    with recorded_launches() as launches:
        loss, metrics = policy_loss(
            batch["current"], batch["old"], batch["advantages"], corrected_of(batch), scale=batch["scale"]
        )
    assert not loss.requires_grad and launches[0].arguments["coefficients"] is None
    differentiable = evaluate(batch, "triton", parts=())
    assert torch.equal(loss, differentiable.loss) and metrics.values() == differentiable.metrics.values()


def test_metrics_of_both_backends_merge() -> None:
    batch = tokens(20, 4)
    options: dict[str, Any] = dict(kl_coef=0.2, entropy_coef=0.1, dual_clip=1.5)
    fused, plain = (evaluate(batch, backend, **options).metrics for backend in ("triton", "torch"))
    # the loss adds up, and means stay
    before = plain.values() | {name: 2 * plain.values()[name] for name in ("loss", "policy_loss")}
    assert fused.merge(plain).values() == pytest.approx(before, rel=1e-6, abs=1e-6)


def test_fp64_goes_to_torch_or_is_refused_by_name() -> None:
    batch = {n: v.double() if v.is_floating_point() else v for n, v in tokens(4).items()}
    assert evaluate(batch, "auto", dtype=torch.float64).loss.dtype == torch.float64
    with pytest.raises(ValueError, match="current_logprobs must be bfloat16, float16 or float32 .* got torch.float64"):
        evaluate(batch, "triton", dtype=torch.float64)
