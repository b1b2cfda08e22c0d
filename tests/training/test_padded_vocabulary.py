"""The vocabulary is padded at its end, and tensor-parallel ranks hold it in order."""

from __future__ import annotations

import torch

from megatron_rc.models.names import HfTensor
from megatron_rc.training.model.weights import _read_part


def test_ranks_hold_the_vocabulary_in_order_and_zeros_behind_it() -> None:
    full = torch.randn(300, 4)

    class Source:
        def read(self, tensor: HfTensor, start: int, stop: int) -> torch.Tensor:
            return full[start:stop]

    embedding = HfTensor("embedding", (300, 4), 0)
    held = torch.cat([_read_part(Source(), embedding, rank, 3, 128) for rank in range(3)])
    assert torch.equal(held[:300], full) and held.shape == (384, 4) and not held[300:].any()
