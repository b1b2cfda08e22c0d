"""Deliberate differences between trainer and sampler, made in the weights, so that every engine can serve them."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_rc.rollout.quantize import is_quantizable, quantized
from megatron_rc.schema.limits import check_one_of
from megatron_rc.settings.quantization import QUANTIZATIONS, Quantize


def perturbed(
    weights: Iterable[tuple[str, Tensor]], *, quantize: Quantize = "none", amplify: float = 0.0, noise: int | str
) -> Iterator[tuple[str, Tensor]]:
    """Add noise to the exported weights, then quantise them, one tensor at a time.

    Args:
        weights: (Hugging Face checkpoint name, tensor).
        quantize: a row of QUANTIZATIONS, whose grid of weights applies where ``is_quantizable``.
        amplify: see ``amplified``; applies to every tensor.
        noise: see ``amplified``.

    Raises:
        ValueError: ``quantize`` is neither none nor in `QUANTIZATIONS`.
    """
    check_one_of("quantize", quantize, ("none", *QUANTIZATIONS))
    grid = QUANTIZATIONS[quantize].weights if quantize != "none" else None
    for name, tensor in weights:
        if amplify > 0:
            tensor = amplified(tensor, amplify, name=name, noise=noise)
        if grid and is_quantizable(name, tensor):
            tensor = quantized(tensor, grid)
        yield name, tensor


def amplified(tensor: Tensor, scale: float, *, name: str, noise: int | str) -> Tensor:
    """Add Gaussian noise: w' = w + scale * std(w) * z, z ~ N(0, 1).

    Args:
        tensor: any shape and float dtype; std is over all its elements, so a constant tensor stays as it is.
        name: of the tensor.
        noise: name of the draw, such as the version of the weights. z depends only on ``name`` and this, so it is the
            same on every rank and device and in every run.

    Returns:
        The shape and dtype of ``tensor``; computed in fp32.
    """
    digest = hashlib.blake2b(f"{noise}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
    z = torch.randn(tensor.shape, generator=generator).to(tensor.device)
    values = tensor.detach().float()
    return (values + scale * values.std(correction=0) * z).to(tensor.dtype)
