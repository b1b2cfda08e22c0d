"""How a batch is cut into chunks, one per program: at most BLOCK tokens of one sequence, counted from its first token.

Sequence s owns chunks c(s) to c(s + 1) - 1 with c(s) = first row // BLOCK + s, and some of them may be empty. They are
always enough for its length, no table has to be made, and their number depends on the shapes alone. The sums of a
sequence do not depend on where in the batch it is.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class Tokens(NamedTuple):
    """A batch as the kernels take it, every tensor contiguous."""

    train_logprobs: Tensor
    """[N] bf16, fp16 or fp32, nats."""
    rollout_logprobs: Tensor
    """[N] bf16, fp16 or fp32, nats."""
    loss_mask: Tensor
    """[N], any dtype."""
    cu_seqlens: Tensor | None
    """[S + 1] int; None for rows of one length."""
    row_length: int
    """Length of every sequence where cu_seqlens is None."""
    num_sequences: int
    advantages: Tensor | None = None
    """[N] or [S]; None where nothing needs them."""
    statistics: tuple[Tensor, ...] = ()
    """[N] each; the source of a column or gate is an index into them."""
    segment_ids: Tensor | None = None
    """[N] int, ascending over the loss tokens of a sequence; None for the runs of loss_mask."""

    def num_chunks(self, block: int) -> int:
        return self.loss_mask.numel() // block + self.num_sequences

    def layout(self) -> dict[str, Any]:
        """The arguments of every kernel that must know where sequences are."""
        sizes = {"num_sequences": self.num_sequences, "num_tokens": self.loss_mask.numel()}
        return {"cu_seqlens": self.cu_seqlens, "row_length": self.row_length, **sizes}

    def arguments(self) -> dict[str, Any]:
        """The arguments of every kernel that walks over tokens."""
        return self._asdict() | self.layout()


SIZES = ["num_tokens", "num_sequences", "row_length"]
"""Sizes that differ from step to step: none of them may recompile a kernel."""
OF_TOKENS = ["train_logprobs", "rollout_logprobs", "loss_mask", "cu_seqlens", "advantages", "statistics", "segment_ids"]
"""Do not specialise on the alignment of these: slices of a batch change it."""


@triton.jit
def sequence_begin(sequence, inside, cu_seqlens, row_length, num_tokens):
    """First row of a sequence, or of a block of sequences; inside the batch whatever cu_seqlens holds."""
    if cu_seqlens is None:
        begin = sequence.to(tl.int64) * row_length
    else:
        begin = tl.load(cu_seqlens + sequence, mask=inside, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(begin, 0), num_tokens)


@triton.jit
def first_chunk(sequence, inside, cu_seqlens, row_length, num_tokens, BLOCK: tl.constexpr):
    return sequence_begin(sequence, inside, cu_seqlens, row_length, num_tokens) // BLOCK + sequence


@triton.jit
def chunks_of_sequence(sequence, inside, cu_seqlens, row_length, num_tokens, BLOCK: tl.constexpr):
    """(first chunk, first chunk of the next sequence) of a sequence, or of a block of sequences."""
    first = first_chunk(sequence, inside, cu_seqlens, row_length, num_tokens, BLOCK)
    return first, first_chunk(sequence + 1, inside, cu_seqlens, row_length, num_tokens, BLOCK)


@triton.jit
def store_rows(pointer, values, rows, sequence, begin, end, num_tokens, num_sequences, BLOCK: tl.constexpr):
    """Store the lanes of a chunk, which are 0 outside of its sequence, so that every row of the batch is written.

    Rows that no sequence covers fall to the first and the last sequence. Those after the last are within the chunks
    that it owns; those before the first fill whole blocks before its beginning, and the rest is stored with its first
    chunk.
    """
    lowest = tl.where(sequence == 0, 0, begin)
    highest = tl.where(sequence == num_sequences - 1, num_tokens, end)
    tl.store(pointer + rows, values, mask=(rows >= lowest) & (rows < highest))
    lanes = tl.arange(0, BLOCK)
    rest = tl.where((sequence == 0), begin % BLOCK, 0)
    # downwards: the compiler would make one wide store of ascending rows, and every other access follow its layout
    tl.store(pointer + rest - 1 - lanes, 0, mask=(rows - lanes == begin) & (lanes < rest))


@triton.constexpr_function
def _lanes(ways):
    return min(32, ways)


@triton.jit
def locate_chunk(chunk, cu_seqlens, row_length, num_tokens, num_sequences, BLOCK: tl.constexpr, WAYS: tl.constexpr):
    """(sequence, its first row, row behind its last, first row of the chunk): the last sequence with c(s) <= chunk.

    A search among WAYS sequences at a time: one step up to WAYS sequences, two up to WAYS^2.
    """
    lowest = chunk * 0
    count = lowest + num_sequences
    # as many lanes as a warp has: every warp counts for itself, and none waits for another
    LANES: tl.constexpr = _lanes(WAYS)
    while count > 1:
        step = (count + WAYS - 1) // WAYS
        begun = tl.zeros([LANES], tl.int32)
        for part in tl.static_range(WAYS // LANES):
            sequence = lowest + (part * LANES + tl.arange(0, LANES)) * step
            inside = sequence < lowest + count
            before = first_chunk(sequence, inside, cu_seqlens, row_length, num_tokens, BLOCK) <= chunk
            begun += (inside & before).to(tl.int32)
        skipped = tl.maximum(tl.sum(begun) - 1, 0) * step
        lowest += skipped
        count = tl.minimum(step, count - skipped)
    begin = sequence_begin(lowest, True, cu_seqlens, row_length, num_tokens)
    end = sequence_begin(lowest + 1, True, cu_seqlens, row_length, num_tokens)
    return lowest, begin, end, begin + (chunk - begin // BLOCK - lowest) * BLOCK
