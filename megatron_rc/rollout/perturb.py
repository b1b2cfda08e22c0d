"""Deliberate differences between trainer and sampler, made in the weights, so that every engine can serve them."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megatron_rc.schema.limits import check_one_of
from megatron_rc.settings.rollout import QUANTIZATIONS, Quantize

_UNQUANTIZED_MODULES = ("embed_tokens", "lm_head", "gate")


def perturbed(
    weights: Iterable[tuple[str, Tensor]], *, quantize: Quantize = "none", amplify: float = 0.0, noise: int | str
) -> Iterator[tuple[str, Tensor]]:
    """Add noise to the exported weights, then quantise them, one tensor at a time.

    Args:
        weights: (Hugging Face checkpoint name, tensor).
        quantize: see ``quantized``; applies where ``is_quantizable``.
        amplify: see ``amplified``; applies to every tensor.
        noise: see ``amplified``.

    Raises:
        ValueError: ``quantize`` is neither none nor in `QUANTIZATIONS`.
    """
    check_one_of("quantize", quantize, ("none", *QUANTIZATIONS))
    for name, tensor in weights:
        if amplify > 0:
            tensor = amplified(tensor, amplify, name=name, noise=noise)
        if quantize != "none" and is_quantizable(name, tensor):
            tensor = quantized(tensor, quantize)
        yield name, tensor


def is_quantizable(name: str, tensor: Tensor) -> bool:
    """True for the matrices of attention, MLP and experts.

    Embeddings, lm_head, router gates and norms stay as they are, as in published int8 and fp8 checkpoints.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    return tensor.ndim == 2 and name.endswith(".weight") and module not in _UNQUANTIZED_MODULES


def quantized(tensor: Tensor, kind: str) -> Tensor:
    """Quantise symmetrically with one scale per output channel, and dequantise.

    int8: scale_o = max_i |w_oi| / 127, w' = scale * round(w / scale), error at most scale / 2
    fp8: scale_o = max_i |w_oi| / 448, w' = scale * e4m3(w / scale), error at most max(|w| / 16, scale / 1024)

    Args:
        tensor: [out, in], any float dtype.

    Returns:
        [out, in] of the same dtype; computed in fp32.
    """
    values = tensor.detach().float()
    limit, dtype = QUANTIZATIONS[kind].largest, getattr(torch, QUANTIZATIONS[kind].rounded_by)
    scale = values.abs().amax(dim=1, keepdim=True) / limit
    scale = torch.where(scale == 0, 1.0, scale)
    levels = (values / scale).clamp(-limit, limit)
    levels = levels.to(dtype).float() if dtype.is_floating_point else levels.round()
    return (levels * scale).to(tensor.dtype)


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
