"""Weights on their way to a server: cast once to the server's dtype, packed into flat buckets of bounded size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_rc.models.config import torch_dtype
from megatron_rc.settings.model import DTYPES

_DTYPES = {precision.name: torch_dtype(dtype) for dtype, precision in DTYPES.items()}
_DTYPES |= {"float": torch.float32, "half": torch.float16}


class Bucket(NamedTuple):
    """Consecutive tensors of one dtype, as one array of bytes."""

    names: list[str]
    shapes: list[torch.Size]
    dtype: torch.dtype
    data: Tensor
    """[bytes] uint8, the tensors one after the other; the next bucket overwrites it."""

    def spans(self) -> Iterator[tuple[str, torch.Size, int, int]]:
        """(name, shape, first byte, byte after the last) of every tensor."""
        start = 0
        for name, shape in zip(self.names, self.shapes, strict=True):
            end = start + shape.numel() * self.dtype.itemsize
            yield name, shape, start, end
            start = end


def buckets(weights: Iterable[tuple[str, Tensor]], bucket_bytes: int, device: torch.device | str) -> Iterator[Bucket]:
    """Pack ``weights`` in order; a tensor larger than ``bucket_bytes`` has a bucket of its own.

    All buckets share one buffer of max(bucket_bytes, largest tensor) bytes; one more tensor is held besides it.

    Args:
        weights: all of one dtype, because servers read at offsets that are aligned only then.
        device: of the buffer.
    """
    buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=device)
    names, shapes, used = list[str](), list[torch.Size](), 0
    dtype: torch.dtype | None = None
    for name, tensor in weights:
        dtype = dtype or tensor.dtype
        assert tensor.dtype == dtype, f"{name} is {tensor.dtype}, the tensors before it {dtype}"
        if names and used + tensor.nbytes > bucket_bytes:
            yield Bucket(names, shapes, dtype, buffer[:used])
            names, shapes, used = [], [], 0
        if tensor.nbytes > buffer.numel():
            buffer = torch.empty(tensor.nbytes, dtype=torch.uint8, device=device)
        buffer[used : used + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        names.append(name)
        shapes.append(tensor.shape)
        used += tensor.nbytes
    if dtype is not None:
        yield Bucket(names, shapes, dtype, buffer[:used])


def cast(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, see: Callable[[str, Tensor], None]
) -> Iterator[tuple[str, Tensor]]:
    """Round every tensor to ``dtype`` and show it to ``see`` before it goes on."""
    for name, tensor in weights:
        rounded = tensor.detach().to(dtype)
        see(name, rounded)
        yield name, rounded


def server_dtype(info: Mapping[str, Any], hf_config: Mapping[str, Any]) -> torch.dtype:
    """The dtype in which a server holds its weights, to which the trainer rounds them.

    Args:
        info: the answer of /server_info. Under dtype=auto the server follows its checkpoint's config.json, but uses
            float16 for a float32 checkpoint.
        hf_config: content of the config.json that the server was started from.

    Raises:
        ValueError: the dtype is unknown, or auto with a config that names none.
    """
    asked = str(info.get("dtype", "auto")).lower()
    if asked != "auto":
        if asked not in _DTYPES:
            raise ValueError(f"the server's dtype {asked!r} is not one of {', '.join(_DTYPES)}")
        return _DTYPES[asked]
    of_checkpoint = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "").removeprefix("torch.")
    if of_checkpoint not in _DTYPES:
        why = "the server runs with --dtype auto and the model's config.json names no dtype"
        raise ValueError(f"{why}: start it with --dtype")
    return torch.float16 if of_checkpoint == "float32" else _DTYPES[of_checkpoint]
