"""What the embedded engine rounds besides weights: products, the inputs of matrices, and the cache."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from megatron_rc.rollout.quantize import is_quantizable, quantized
from megatron_rc.settings.quantization import Grid, Quantization


class _InFp32:
    """The forward of a linear layer: a product in fp32 of numbers in 16 bits, rounded to 16 bits."""

    def __init__(self, module: torch.nn.Linear) -> None:
        self._module, self._wide, self._of = module, torch.empty(0), -1

    def __call__(self, features: Tensor) -> Tensor:
        module = self._module
        if self._of != module.weight._version:
            self._wide, self._of = module.weight.float(), module.weight._version
        bias = None if module.bias is None else module.bias.float()
        return F.linear(features.float(), self._wide, bias).to(features.dtype)


def multiply_in_fp32(model: torch.nn.Module) -> None:
    """Compute the products of a model in bf16 or fp16 in fp32, on a CPU that has no units for them.

    Such units add in fp32 and round once, too, so that the numbers differ by the order of the sums alone. It is about
    three times as fast as PyTorch's emulation, and takes the memory of the weights in fp32.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _InFp32(module)  # type: ignore[assignment]


def round_inputs(model: torch.nn.Module, quantization: Quantization) -> None:
    """From now on the inputs of the model's quantisable matrices are rounded; the product is of the model's dtype.

    With one scale per tensor, the scale is that of the batch and of the step that computes it. Raises ValueError for a
    model with experts, whose matrices are fused and multiply the inputs of several tokens at once.
    """
    grid = quantization.inputs
    if grid is None:
        return
    if any(name.endswith(".experts.down_proj") for name, _ in model.named_parameters()):
        raise ValueError("quantize must not round the inputs of matrices in a model with experts")

    def rounded(module: torch.nn.Module, arguments: tuple[Any, ...], grid: Grid = grid) -> tuple[Tensor]:
        (features,) = arguments
        return (quantized(features.flatten(0, -2), grid).view_as(features),)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and is_quantizable(f"{name}.weight", module.weight):
            module.register_forward_pre_hook(rounded)


class RoundedCache(DynamicCache):
    """A cache whose keys and values are numbers of ``dtype``; all queries see the rounded ones."""

    def __init__(self, config: Any, dtype: str) -> None:
        super().__init__(config=config)
        self._dtype = getattr(torch, dtype)
        self._largest = torch.finfo(self._dtype).max

    def update(self, key_states: Tensor, value_states: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Append what ``dtype`` can hold of both, [B, heads, T, head_dim]."""
        return super().update(self._rounded(key_states), self._rounded(value_states), *arguments, **keywords)

    def _rounded(self, states: Tensor) -> Tensor:
        return states.float().clamp(-self._largest, self._largest).to(self._dtype).to(states.dtype)
