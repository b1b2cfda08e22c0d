"""The gradient of a weight as a sum of matrix products, whose dtype may be wider than that of their factors."""

import torch
from torch import Tensor

from megatron_rc.versions import TORCH_WIDE_PRODUCTS, is_older

_BLOCK_ELEMENTS = 2**22
"""Elements of a factor that are widened at a time, where the device cannot widen inside the product."""


def check_wide_products(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a GPU on which this torch is too old to multiply factors of ``dtype``, bf16 or fp16, into fp32."""
    if device.type == "cuda" and dtype.itemsize < 4 and is_older(torch.__version__, TORCH_WIDE_PRODUCTS):
        raise ValueError(
            f"the linear head needs torch {TORCH_WIDE_PRODUCTS} or newer for {dtype} on a GPU, "
            f"found {torch.__version__}: take the head that keeps logits, or fp32"
        )


def product_into(out: Tensor, left: Tensor, right: Tensor) -> None:
    """out = left @ right, [N, K] and [K, M] of one dtype; out [N, M] has this dtype, or is fp32 for bf16 and fp16."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        left, columns = left.to(out.dtype), max(1, _BLOCK_ELEMENTS // max(1, right.shape[0]))
        for part, factor in zip(out.split(columns, 1), right.split(columns, 1), strict=True):
            part.copy_(left @ factor.to(out.dtype))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, [N, K] and [K, M] of one dtype; total [N, M] has this dtype, or is fp32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        right, rows = right.to(total.dtype), max(1, _BLOCK_ELEMENTS // max(1, left.shape[1]))
        for part, factor in zip(total.split(rows), left.split(rows), strict=True):
            part.addmm_(factor.to(total.dtype), right)


class WeightGradient:
    """The gradient of a weight [V, H], a sum of products in fp32 (fp64 for an fp64 weight).

    Megatron's DDP gives a weight main_grad [V, H] and grad_added_to_main_grad. Where both exist and main_grad has the
    dtype of the sum, the gradient ends there, unrounded; otherwise autograd gets it in the dtype of the weight, and the
    sum takes [V, H] of memory during backward. Any other use of the weight before the optimizer step must add to
    main_grad itself, or set zero_out_wgrad, as Megatron's own layers do: DDP ignores its ordinary gradient.
    """

    def __init__(self, weight: Tensor, *, final: bool) -> None:
        """``final`` says that no factor is left to multiply the sum with: main_grad then takes the products at once."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        main_grad = getattr(weight, "main_grad", None) if hasattr(weight, "grad_added_to_main_grad") else None
        self._weight, self._final = weight, final
        self._main_grad = main_grad if main_grad is not None and main_grad.dtype == dtype else None
        at_once = final and self._main_grad is not None
        self._sum = self._main_grad if at_once else torch.zeros(weight.shape, dtype=dtype, device=weight.device)

    def add(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add gradient^T @ hidden, from the gradient of logits [n, V] and hidden states [n, H] of one dtype."""
        assert self._sum is not None
        add_product(self._sum, gradient.mT, hidden)

    def finish(self, upstream: Tensor | None = None) -> Tensor | None:
        """What backward returns for the weight, after the factor ``upstream``, 0-d; None: nothing was left to do.

        Call it in backward, once: DDP reads grad_added_to_main_grad right after it.
        """
        assert (upstream is None) == self._final and self._sum is not None
        total, self._sum = self._sum, None
        if self._main_grad is None:
            return (total if upstream is None else total.mul_(upstream)).to(self._weight.dtype)
        if upstream is not None:
            self._main_grad.addcmul_(total, upstream.to(total.dtype))
        del total  # before another tensor of its size is allocated
        weight = self._weight
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        # a tied embedding has its own gradient besides this one, and DDP adds it to main_grad: nothing may blur it
        if getattr(weight, "zero_out_wgrad", False):
            return None
        # DDP reads no value of it, but with overlap_grad_reduce asserts that there is a gradient
        return torch.empty_like(weight)
