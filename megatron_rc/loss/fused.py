"""Triton: the policy loss and its metrics in two launches, its gradient in one."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_rc.kernels.policy_loss import policy_loss_bwd, policy_loss_fwd
from megatron_rc.loss.reference import LossInputs, LossOptions


def policy_loss(inputs: LossInputs, options: LossOptions) -> tuple[Tensor, Tensor]:
    """The loss, and the totals and divisors of its metrics, as reference.policy_loss.policy_loss explains them."""
    # autograd looks for tensors among the arguments, not inside of them
    return _PolicyLoss.apply(options, *inputs)


def policy_loss_gradient(
    inputs: LossInputs, options: LossOptions, upstream: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The totals and divisors of policy_loss, and upstream times its gradient by current and by entropy."""
    _, totals, coefficients = policy_loss_fwd(**inputs._asdict(), **options._asdict(), with_coefficients=True)
    by_current, by_entropy = policy_loss_bwd(
        upstream,
        coefficients,
        inputs.scale if inputs.entropy is not None and options.entropy_coef else None,
        entropy_coef=options.entropy_coef,
        current_dtype=torch.float32,
        entropy_dtype=torch.float32,
    )
    assert by_current is not None
    return totals, by_current, by_entropy


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: LossOptions, *tensors: Any) -> tuple[Tensor, Tensor]:
        inputs = LossInputs(*tensors)
        needs_gradient = dict(zip(LossInputs._fields, ctx.needs_input_grad[1:], strict=True))
        loss, totals, coefficients = policy_loss_fwd(
            **inputs._asdict(), **options._asdict(), with_coefficients=needs_gradient["current"]
        )
        ctx.save_for_backward(coefficients, inputs.scale if needs_gradient["entropy"] else None)
        ctx.gradient = {
            "entropy_coef": options.entropy_coef,
            "current_dtype": inputs.current.dtype,
            "entropy_dtype": None if inputs.entropy is None else inputs.entropy.dtype,
        }
        ctx.mark_non_differentiable(totals)
        # or a zero gradient of totals would be filled in every backward
        ctx.set_materialize_grads(False)
        return loss, totals

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        by_current, by_entropy = None, None
        if upstream is not None:
            by_current, by_entropy = policy_loss_bwd(upstream, *ctx.saved_tensors, **ctx.gradient)
        gradients = {"current": by_current, "entropy": by_entropy}
        return (None, *(gradients.get(name) for name in LossInputs._fields))
