"""The calls that take hidden states to log-probs or to a loss: what each should take and hold, and may take at most."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_rc.cluster import memory
from megatron_rc.cluster.step_time import Ceilings, row_bytes
from megatron_rc.head_inputs import default_chunk
from timing.bench import OURS
from timing.plan import FULL, HeadShape

ANY_LOSS, IN_PLACE = f"{OURS}, any loss", f"{OURS}, logits in place"
WIDE_CHUNK = 4096
WIDE = f"{OURS}, chunks of {WIDE_CHUNK:,}"


class Form(NamedTuple):
    name: str
    kind: str
    """The kind of the row of the benchmark."""
    provider: str
    operations: int
    """Times N H V."""
    gradient: bool = True
    chunk: int | None = None
    """Tokens; None: the default."""
    keeps_logits: bool = False

    def chunk_of(self, head: HeadShape) -> int:
        return min(head.counted, self.chunk or default_chunk((head.columns,), torch.bfloat16))

    def seconds(self, head: HeadShape, rates: Ceilings) -> float:
        """Products, the passes over logits, and dW: written once where logits are kept, else fp32, read and written
        per chunk."""
        rows, masked = head.counted, head.tokens - head.counted
        # every row has a product where logits are kept
        products = self.operations * (head.tokens if self.keeps_logits else rows) * head.hidden * head.columns
        masked = masked if self.keeps_logits else 0
        seconds = products / rates.matmul
        seconds += row_bytes("forward", columns=head.columns, rows=rows, masked=masked) / rates.read
        if not self.gradient:
            return seconds
        seconds += row_bytes("backward", columns=head.columns, rows=rows, masked=masked) / rates.copy
        chunks = -(-rows // self.chunk_of(head))
        by_weight = 2 if self.keeps_logits else 8 * chunks
        return seconds + by_weight * head.columns * head.hidden / rates.copy

    def peak(self, head: HeadShape) -> float | None:
        """Bytes beyond the inputs; None where rows are left out, whose copies are not counted."""
        if head.masked:
            return None
        held = memory.head_memory(head.tokens, head.columns, head.hidden, "bf16")
        if self.keeps_logits:
            return held.logits
        chunk = 2 * self.chunk_of(head) * head.columns
        if not self.gradient:
            return chunk + 64 * head.tokens
        weight = 2 * head.columns * head.hidden
        usual = max(2 * default_chunk((head.columns,), torch.bfloat16) * head.columns, weight)
        return held.fused + max(chunk, weight) - usual


LOSS = Form("`linear_policy_loss`", "head", OURS, 6)
WIDE_LOSS = Form(f"`linear_policy_loss`, chunks of {WIDE_CHUNK:,} tokens", "head", WIDE, 6, chunk=WIDE_CHUNK)
LOGPROBS = Form("`linear_logprobs` and any loss", "head", ANY_LOSS, 8)
OLD_PASS = Form("`linear_logprobs` without gradient", "old pass", OURS, 2, gradient=False)
LOGITS = Form("logits, gradient in place", "head", IN_PLACE, 6, keeps_logits=True)
FORMS = (LOSS, WIDE_LOSS, LOGPROBS, OLD_PASS, LOGITS)

ONE_RANK, SHARD, HALF, MANY = FULL.heads
MOST_MS: dict[tuple[HeadShape, Form], float] = {
    (ONE_RANK, LOSS): 49,
    (ONE_RANK, WIDE_LOSS): 46,
    (ONE_RANK, LOGPROBS): 60,
    (ONE_RANK, OLD_PASS): 14.8,
    (SHARD, LOSS): 6.2,
    (SHARD, LOGPROBS): 8,
    (SHARD, OLD_PASS): 2,
    (HALF, LOSS): 25,
    (MANY, WIDE_LOSS): 182,
    (MANY, LOGPROBS): 236,
    (MANY, OLD_PASS): 58,
}
"""Milliseconds on an H200."""
MOST_MB: dict[tuple[HeadShape, Form], float] = {(SHARD, LOSS): 230, (MANY, WIDE_LOSS): 1520}
"""Millions of bytes beyond the inputs."""


def timed(form: Form, head: HeadShape) -> bool:
    """Whether the benchmark has this form of that shape: a shard's default chunk is the wide one."""
    return form is not WIDE_LOSS or has_wide_chunks(head)


def has_wide_chunks(head: HeadShape) -> bool:
    return head.tp == 1 and not head.masked
