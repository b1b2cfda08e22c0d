"""Triton: the policy loss and its metrics in two launches, its gradient in one."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.backend import opaque
from megatron_rc.kernels.policy_loss import policy_loss_bwd, policy_loss_fwd
from megatron_rc.loss.options import LossOptions
from megatron_rc.loss.reference import LossInputs


@opaque
def policy_loss(
    current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions
) -> tuple[Tensor, Tensor]:
    """The loss, and the totals and divisors of its metrics, as reference.policy_loss explains them."""
    loss, totals = _PolicyLoss.apply(current, entropy, inputs, options)
    return loss, totals


def policy_loss_gradient(
    current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The totals and divisors of policy_loss, and upstream times its gradient by current and by entropy."""
    _, totals, coefficients = _forward(current, entropy, inputs, options, with_coefficients=True)
    by_current, by_entropy = policy_loss_bwd(
        upstream,
        coefficients,
        inputs.scale if entropy is not None and options.entropy_coef else None,
        entropy_coef=options.entropy_coef,
        current_dtype=torch.float32,
        entropy_dtype=torch.float32,
    )
    assert by_current is not None
    return totals, by_current, by_entropy


def _forward(
    current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions, *, with_coefficients: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    return policy_loss_fwd(
        current=current,
        entropy=entropy,
        **inputs._asdict(),
        **{field.name: getattr(options, field.name) for field in fields(LossOptions)},
        with_coefficients=with_coefficients,
    )


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, current: Tensor, entropy: Tensor | None, inputs: LossInputs, options: LossOptions
    ) -> tuple[Tensor, Tensor]:
        by_current, by_entropy, *_ = ctx.needs_input_grad
        loss, totals, coefficients = _forward(current, entropy, inputs, options, with_coefficients=by_current)
        ctx.save_for_backward(coefficients, inputs.scale if by_entropy else None)
        ctx.gradient = {
            "entropy_coef": options.entropy_coef,
            "current_dtype": current.dtype,
            "entropy_dtype": None if entropy is None else entropy.dtype,
        }
        ctx.mark_non_differentiable(totals)
        # or a zero gradient of totals would be filled in every backward
        ctx.set_materialize_grads(False)
        return loss, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if upstream is None:
            return None, None, None, None
        return *policy_loss_bwd(upstream, *ctx.saved_tensors, **ctx.gradient), None, None
