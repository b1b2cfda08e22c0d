"""Numbers rounded to the levels of a `Grid` and back."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rc.settings.quantization import Grid

_UNQUANTIZED_MODULES = ("embed_tokens", "lm_head", "gate")


def is_quantizable(name: str, tensor: Tensor) -> bool:
    """True for the matrices of attention, MLP and experts.

    Embeddings, lm_head, router gates and norms stay as they are, as in published int8 and fp8 checkpoints.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    return tensor.ndim == 2 and name.endswith(".weight") and module not in _UNQUANTIZED_MODULES


def quantized(tensor: Tensor, grid: Grid) -> Tensor:
    """Quantise symmetrically with one scale per block of the grid, and dequantise.

    integers: scale = max |w| / largest, w' = scale * round(w / scale), error at most scale / 2
    e4m3: w' = scale * e4m3(w / scale), error at most max(|w| / 16, scale / 1024)

    Args:
        tensor: [rows, columns], any float dtype; blocks at its edges may be smaller.

    Returns:
        [rows, columns] of the same dtype; computed in fp32.
    """
    values = tensor.detach().float()
    rows, columns = values.shape
    height, width = grid.rows or max(rows, 1), grid.columns or max(columns, 1)
    blocks = F.pad(values, (0, -columns % width, 0, -rows % height))
    blocks = blocks.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / grid.largest
    scale = torch.where(scale == 0, 1.0, scale)
    levels, dtype = (blocks / scale).clamp(-grid.largest, grid.largest), getattr(torch, grid.rounded_by)
    levels = levels.to(dtype).float() if dtype.is_floating_point else levels.round()
    return (levels * scale).flatten(2).flatten(0, 1)[:rows, :columns].to(tensor.dtype)
