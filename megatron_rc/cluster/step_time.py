"""The least time of a training step, computed from bytes, operations and the ceilings of a card.

Every part runs at its ceiling, one after the other. Left out: communication of layers, of gradients and of weights,
imbalance between experts, padding, and what the host takes; each makes the share of what this package computes smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from megatron_rc.cluster import memory
from megatron_rc.models.config import moe_layers, padded_vocab_size
from megatron_rc.models.names import parameters
from megatron_rc.settings import Dtype, ParallelSettings


class Card(NamedTuple):
    """What one GPU can do, by its data sheet."""

    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes of memory per second."""
    matmul: float
    """bf16 operations per second, dense."""
    link: float
    """Bytes per second to the other GPUs of a node, each way."""


H100 = Card("H100 SXM", 80e9, 3.35e12, 989e12, 450e9)
H200 = Card("H200 SXM", 141e9, 4.8e12, 989e12, 450e9)

READ, COPY, MATMUL = 0.93, 0.90, 0.79
"""Shares of the data sheet that are assumed for reading, for reading and writing, and for bf16 matrix products."""
LAUNCH = 3e-6
"""Seconds that are assumed from one launch to the next."""
GATHER = 20e-6
"""Seconds that are assumed for a collective between the GPUs of a node that carries next to nothing."""


class Ceilings(NamedTuple):
    """Rates that one GPU sustains: predicted from its data sheet, or measured by benchmarks/kernels.py."""

    read: float
    copy: float
    matmul: float
    link: float = H200.link

    @classmethod
    def of(cls, card: Card) -> Ceilings:
        return cls(READ * card.bandwidth, COPY * card.bandwidth, MATMUL * card.matmul, card.link)


def card_of(gpu_memory: float) -> Card:
    """The card with that many GiB; a larger one than an H100 counts as an H200."""
    return H100 if gpu_memory * memory.GIB <= 1.1 * H100.memory else H200


class RowBytes(NamedTuple):
    """Bytes that one pass over bf16 logits moves."""

    per_logit: int
    per_row: int
    per_masked_row: int
    """A row that does not count, whose gradient is 0."""
    masked_per_logit: int = 0


ROW_BYTES = {
    ("forward", False): RowBytes(2, 22, 12),
    ("forward", True): RowBytes(2, 26, 12),
    ("backward", False): RowBytes(4, 24, 0, 2),
    ("backward", True): RowBytes(4, 32, 0, 2),
}
"""(pass, with entropy) -> what the row kernels move; backward writes in place."""
CORRECT_BYTES, LOSS_BYTES = 23, 49
"""Per token: `correct` with gates of sequences, `policy_loss` with KL and entropy terms and its gradients."""
CORRECT_LAUNCHES, LOSS_LAUNCHES = 3, 3
_OPTIMIZER_BYTES = 30
"""Per parameter: the gradient, fp32 weight and two moments are read, the last three and the bf16 weight written."""
OURS = ("log-probs", "correction and loss")
"""The parts of a step that this package computes."""


def row_bytes(phase: str, *, columns: int, rows: float, masked: float = 0, entropy: bool = True) -> float:
    """Bytes of one pass over the logits of ``rows`` rows that count and ``masked`` that do not."""
    moved = ROW_BYTES[phase, entropy]
    counted = rows * (moved.per_logit * columns + moved.per_row)
    return counted + masked * (moved.masked_per_logit * columns + moved.per_masked_row)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rollout and the training on it, all responses of the greatest length."""

    hf: dict[str, Any]
    parallel: ParallelSettings
    train_gpus: int
    servers: int
    """None of them: the time of sampling is not predicted."""
    server: memory.ServerMemory
    server_tp: int
    sequences: int
    prompt: int
    response: int
    tokens: int
    """Rows of the largest micro-batch."""
    passes: tuple[int, int]
    """Forward passes without a gradient (old log-probs, the policy of the KL penalty), and update passes."""
    optimizer_steps: int = 1
    leaves_out: bool = False
    """The head leaves out rows without a loss, as that of train.head linear does."""
    recomputed: bool = False
    """The backward of the head computes its logits again, as linear_logprobs does and linear_policy_loss does not."""
    dtype: Dtype = "bf16"

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def rank_tokens(self) -> float:
        """Tokens of one data-parallel rank."""
        return self.sequences * self.length * self.parallel.tensor * self.parallel.pipeline / self.train_gpus

    @property
    def micro_batches(self) -> int:
        return math.ceil(self.rank_tokens / self.tokens)

    @property
    def columns(self) -> int:
        return padded_vocab_size(self.hf, self.parallel.tensor) // self.parallel.tensor


def layer_operations(hf: dict[str, Any], length: int) -> float:
    """Operations per token of all layers, forward: two per matrix element that is used, and causal attention."""
    used = 0.0
    for parameter in parameters(hf):
        if parameter.layer is None:
            continue
        share = 1.0 if parameter.expert is None else hf["num_experts_per_tok"] / hf["num_experts"]
        used += share * sum(math.prod(tensor.shape) for tensor in parameter.tensors if len(tensor.shape) > 1)
    attention = 2 * hf["num_hidden_layers"] * hf["num_attention_heads"] * hf["head_dim"] * length
    return 2 * used + attention


def head_operations(hf: dict[str, Any], columns: int) -> float:
    """Operations per token of the product with the head's shard, forward."""
    return 2.0 * hf["hidden_size"] * columns


def generation_seconds(step: Step, ceilings: Ceilings) -> float:
    """The time that the servers sample for: each decoding step reads the weights in use and the keys and values."""
    hf, server = step.hf, step.server
    mine = math.ceil(step.sequences / step.servers)
    at_once = max(1, min(mine, server.tokens // step.length))
    operations = layer_operations(hf, step.length) + head_operations(hf, hf["vocab_size"])
    prefill = mine * step.prompt * operations / step.server_tp / ceilings.matmul
    read = server.weights * _weights_in_use(hf, at_once)
    read += at_once * (step.prompt + step.response / 2) * server.kv_token
    once = max(read / ceilings.read, at_once * operations / step.server_tp / ceilings.matmul)
    return prefill + math.ceil(mine / at_once) * step.response * once


def _weights_in_use(hf: dict[str, Any], sequences: int) -> float:
    """Share of the weights that a decoding step reads: of the experts, those that at least one sequence chose."""
    if not any(moe_layers(hf)):
        return 1.0
    experts = sum(math.prod(t.shape) for p in parameters(hf) if p.expert is not None for t in p.tensors)
    share = experts / memory.parameter_count(hf)
    return 1 - share * (1 - hf["num_experts_per_tok"] / hf["num_experts"]) ** sequences


def step_seconds(step: Step, ceilings: Ceilings) -> dict[str, float]:
    """Seconds of each part of a step, in order, on the GPUs of the last pipeline stage.

    A pass over m micro-batches in p stages takes m + p - 1 turns of a stage; the head's stage is the one that takes
    longest.
    """
    hf, parallel = step.hf, step.parallel
    silent, updates = step.passes
    # an update is a forward, and a backward of twice its operations
    forwards = silent + 3 * updates
    rows = step.rank_tokens
    turns = 1 + (parallel.pipeline - 1) / step.micro_batches
    layers = layer_operations(hf, step.length) / (parallel.tensor * parallel.pipeline) / ceilings.matmul
    products = forwards + updates * step.recomputed
    head = head_operations(hf, step.columns) / ceilings.matmul
    # prompts have no loss: the kernels skip their logits, and the linear head makes none
    counted = rows * step.response / step.length
    heads_rows = counted if step.leaves_out else rows
    passed = partial(row_bytes, columns=step.columns, rows=counted, masked=heads_rows - counted)
    forward = passed("forward") / ceilings.read
    backward = passed("backward") / ceilings.copy
    gather = 0.0
    if parallel.tensor > 1:
        sent = 16 * heads_rows * (parallel.tensor - 1) / ceilings.link
        gather = (silent + updates) * (step.micro_batches * GATHER + sent)
    correct = CORRECT_LAUNCHES * LAUNCH + CORRECT_BYTES * rows / ceilings.copy
    loss = updates * (step.micro_batches * LOSS_LAUNCHES * LAUNCH + LOSS_BYTES * rows / ceilings.copy)
    weights = max(memory.local_parameters(hf, parallel, stage) for stage in (0, parallel.pipeline - 1))
    sampling = {"generation": generation_seconds(step, ceilings)} if step.servers else {}
    return sampling | {
        "layers": forwards * rows * layers * turns,
        "head's products": products * heads_rows * head,
        "optimizer": step.optimizer_steps * weights * _OPTIMIZER_BYTES / ceilings.copy,
        "log-probs": (silent + updates) * forward + updates * backward + gather,
        "correction and loss": correct + loss,
    }
