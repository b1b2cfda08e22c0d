"""Bytes that a trainer GPU and a server GPU hold, computed from the configuration alone.

Parameters, gradients and optimizer state are exact. Activations are those that autograd saves, tensor by tensor, as in
Korthikanti et al. 2022 (arXiv 2205.05198, section 4), for the layers that training/model/build.py configures: grouped
queries, SwiGLU, RMSNorm, no dropout, and attention that does not store its scores.
"""

import math
from dataclasses import dataclass
from typing import Any

from megatron_rc.logprobs.inputs import default_chunk
from megatron_rc.models.config import moe_layers, padded_vocab_size, torch_dtype
from megatron_rc.models.families import family_of
from megatron_rc.models.names import Parameter, parameters
from megatron_rc.settings.job import JobSettings
from megatron_rc.settings.model import DTYPES, Dtype, ParallelSettings
from megatron_rc.settings.train import TrainSettings

GIB = 1024**3  # as nvidia-smi and SGLang count memory

RESERVED = 4 * GIB
"""Allowance per trainer GPU: CUDA context, NCCL buffers, matrix-product workspaces, gaps of the allocator."""

_ROW_BYTES = 32
"""fp32 numbers and ids that log-probs, entropy and their gradient keep per row."""

_TORCH_CHUNKS = 3 * 16 * 1024**2
"""Without the Triton kernels logits become fp32 in chunks of 16 MiB; fewer than three chunks exist at once."""


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one trainer GPU."""

    weights: int
    gradients: int
    """Always fp32, whatever the dtype of the model, because data-parallel ranks reduce them in fp32."""
    optimizer: int
    """fp32 copy of the weights unless they are fp32, two fp32 moments for Adam; every data-parallel rank holds all."""
    saved_weights: int
    """A copy of the trained weights while the reference policy of the KL penalty runs."""
    activations: int
    """Saved for backward by all micro-batches in flight."""
    logits: int
    """Logits, which their gradient overwrites, the gradients of the hidden states and of the head's weight, and what
    log-probs keep; on the last stage. With train.head linear, a copy of the hidden states, and one chunk of logits or
    the gradient of the weight, whichever is larger."""
    backward: int
    """Gradients of the output and of the input of the widest layer."""
    step: int
    """The root of the second moment, which Adam without a fused kernel holds during its step."""
    reserved: int = RESERVED

    @property
    def resident(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reserved

    @property
    def total(self) -> int:
        """Peak: backward and the optimizer's step never overlap."""
        passes = self.saved_weights + self.activations + self.logits + self.backward
        return self.resident + max(passes, self.step)


@dataclass(frozen=True)
class ServerMemory:
    """Bytes of one GPU that serves."""

    weights: int
    kv_cache: int
    """What remains of the share of memory that SGLang takes."""
    kv_token: int
    """Keys and values of one token."""

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds at once."""
        return max(0, self.kv_cache) // self.kv_token


def parameter_count(hf: dict[str, Any]) -> int:
    """Parameters of the whole model; a tied head and the embedding are one tensor, which counts once."""
    shapes = {tensor.name: tensor.shape for parameter in parameters(hf) for tensor in parameter.tensors}
    return sum(math.prod(shape) for shape in shapes.values())


def local_parameters(hf: dict[str, Any], parallel: ParallelSettings, stage: int) -> int:
    """Parameters of one rank of pipeline stage ``stage``, counted from 0; all ranks of a stage hold the same number."""
    # with expert parallelism a rank holds some experts whole, otherwise a slice of every expert
    expert_share = parallel.expert if parallel.expert > 1 else parallel.tensor
    total = 0
    for parameter in parameters(hf):
        if not _on_stage(parameter, hf, parallel, stage):
            continue
        for tensor in parameter.tensors:
            shape = list(tensor.shape)
            if parameter.layer is None and tensor.split == 0:
                shape[0] = padded_vocab_size(hf, parallel.tensor)
            size = math.prod(shape)
            if parameter.expert is not None:
                size //= expert_share
            elif tensor.split is not None:
                size //= parallel.tensor
            total += size
    return total


def _on_stage(parameter: Parameter, hf: dict[str, Any], parallel: ParallelSettings, stage: int) -> bool:
    last = parallel.pipeline - 1
    if parameter.layer is not None:
        return parameter.layer // (hf["num_hidden_layers"] // parallel.pipeline) == stage
    if parameter.megatron[0].startswith("embedding"):
        return stage == 0
    if parameter.megatron[0].startswith("output_layer") and hf["tie_word_embeddings"] and last == 0:
        return False  # the embedding's own tensor; a later stage has a copy of it
    return stage == last


def saved_per_token(
    hf: dict[str, Any], parallel: ParallelSettings, dtype: Dtype, *, moe: bool, fused: bool = True
) -> float:
    """Bytes per token that one layer saves for backward, without TransformerEngine (which saves less).

    With h the hidden size, q and k the widths of this rank's queries and keys, f its inner width (kept experts times
    their inner width for a mixture), b bytes per number::

        2 (norm(h) + b h) + norm(q) + norm(k) + rope + 5 b q + 4 heads + 3 b f

    Every linear layer and norm saves its input, attention saves its four operands and the log-sum of its scores. The
    estimate assumes that a micro-batch is one sequence and that its tokens spread evenly over expert-parallel ranks.

    Args:
        moe: whether this is a mixture-of-experts layer.
        fused: with the kernels of a GPU, a norm saves its input and SwiGLU the two halves that it joins; with those of
            a CPU (False), a norm saves two fp32 copies and SwiGLU every intermediate value.
    """
    b, t = DTYPES[dtype].bytes, parallel.tensor
    hidden, head = hf["hidden_size"], hf["head_dim"]
    heads, groups = hf["num_attention_heads"] // t, hf["num_key_value_heads"] // t
    queries, keys = heads * head, groups * head
    # rows are split over tensor-parallel ranks too (sequence parallelism) when the model has experts
    rows = 1 / t if any(moe_layers(hf)) else 1.0

    def norm(width: int, count: int) -> float:
        return (b if fused else 8) * width + 4 * count

    qk = 0.0
    if family_of(hf["model_type"]).query_key_norm:
        qk = norm(queries, heads) + norm(keys, groups)
        if fused or dtype == "fp32":
            # the key's norm keeps a view of the joint projection, which stays as a whole; the query's keeps a copy
            qk += b * (queries + keys)
    rope = 2 * 2 * head * b
    saved = rows * 2 * (norm(hidden, 1) + b * hidden) + qk + rope + 5 * b * queries + 4 * heads
    if not moe:
        inner = hf["intermediate_size"] // t
        return saved + (3 if fused else 5) * b * inner
    kept, experts = hf["num_experts_per_tok"], hf["num_experts"]
    inner = hf["moe_intermediate_size"] // (1 if parallel.expert > 1 else t)
    # ids, probabilities, the routing map and its sorted form
    routing = 8 * kept + 4 * kept + experts + 4 * experts + 8 * kept
    swiglu = kept * ((3 if fused else 6) * b * inner + 4)
    return saved + rows * routing + kept * hidden * b + swiglu


def activation_bytes(
    hf: dict[str, Any], parallel: ParallelSettings, dtype: Dtype, *, tokens: int, stage: int, fused: bool = True
) -> int:
    """Bytes that one micro-batch of ``tokens`` saves on a rank of ``stage``, without logits."""
    b, last = DTYPES[dtype].bytes, stage == parallel.pipeline - 1
    count = hf["num_hidden_layers"] // parallel.pipeline
    mine = moe_layers(hf)[stage * count : (stage + 1) * count]
    layers = [saved_per_token(hf, parallel, dtype, moe=moe, fused=fused) for moe in mine]
    hidden = hf["hidden_size"] / (parallel.tensor if any(moe_layers(hf)) else 1)
    per_token = sum(layers) + 16 + (8 if stage == 0 else 0)  # positions of rows in padded blocks; token ids
    if last:
        per_token += (b if fused else 8) * hidden + 4 + b * hidden  # final norm, and the head's input
    return round(tokens * per_token)


def trainer_memory(
    settings: JobSettings, hf: dict[str, Any], *, tokens: int, stage: int, micro_batches: int
) -> TrainerMemory:
    """Bytes of a GPU of pipeline stage ``stage``, when the largest micro-batch has ``tokens``.

    Of the micro-batches of an optimizer step, as many as there are stages from this one on are in flight (1F1B).
    """
    parallel, train = settings.parallel, settings.train
    dtype, b = train.dtype, DTYPES[train.dtype].bytes
    count = local_parameters(hf, parallel, stage)
    adam, last = train.optimizer == "adam", stage == parallel.pipeline - 1
    in_flight = min(parallel.pipeline - stage, micro_batches)
    saved = activation_bytes(hf, parallel, dtype, tokens=tokens, stage=stage)
    vocabulary = padded_vocab_size(hf, parallel.tensor) // parallel.tensor
    return TrainerMemory(
        weights=b * count,
        gradients=4 * count,
        optimizer=count * ((0 if dtype == "fp32" else 4) + (8 if adam else 0)),
        saved_weights=b * count if settings.loss.kl_coef else 0,
        activations=in_flight * saved,
        logits=_head_memory(tokens, vocabulary, hf["hidden_size"], train) if last else 0,
        backward=2 * b * tokens * _widest(hf, parallel),
        step=4 * count if adam else 0,
    )


def _head_memory(tokens: int, columns: int, hidden: int, train: TrainSettings) -> int:
    """`TrainerMemory.logits` of a micro-batch on the last stage, for ``columns`` of the vocabulary.

    Both heads make the gradient of the hidden states, and hand autograd one of the weight in the dtype of the model:
    nothing reads it, but Megatron's DDP wants to see one.
    """
    b = DTYPES[train.dtype].bytes
    rows, weight = b * tokens * hidden, b * columns * hidden
    chunks_in_fp32 = _TORCH_CHUNKS if train.backend == "torch" else 0
    if train.head == "logits":
        # their gradient is written over them, and they are still there when that of the weight is made
        return b * tokens * columns + rows + weight + tokens * _ROW_BYTES + chunks_in_fp32
    of_logits = train.head_logits_dtype or train.dtype
    chunk = min(tokens, train.head_chunk or default_chunk((columns,), torch_dtype(of_logits)))
    # fp32 logits get their gradient as a separate tensor in the dtype of the model
    of_chunk = chunk * columns * (b if of_logits == train.dtype else DTYPES[of_logits].bytes + b)
    # the rows with a loss (at most all rows) are copied; with sequence parallelism, from the gathered rows
    return max(of_chunk, weight) + 2 * rows + tokens * 2 * _ROW_BYTES + chunks_in_fp32


def _widest(hf: dict[str, Any], parallel: ParallelSettings) -> int:
    """Numbers per token in the widest activation of a layer."""
    t = parallel.tensor
    widths = [(hf["num_attention_heads"] + 2 * hf["num_key_value_heads"]) * hf["head_dim"] // t]
    if not all(moe_layers(hf)):
        widths.append(2 * hf["intermediate_size"] // t)
    if any(moe_layers(hf)):
        widths.append(hf["num_experts_per_tok"] * max(hf["hidden_size"], 2 * hf["moe_intermediate_size"]))
    return max(widths)


def server_memory(settings: JobSettings, hf: dict[str, Any]) -> ServerMemory:
    """Bytes of one of the GPUs that share a server."""
    cluster, b = settings.cluster, DTYPES[settings.train.dtype].bytes
    # a server has one copy of tied embeddings; norms and routers, which every GPU holds, weigh next to nothing
    weights = -(-parameter_count(hf) * b // cluster.server_tp)
    groups = max(1, hf["num_key_value_heads"] // cluster.server_tp)
    kv_token = 2 * hf["num_hidden_layers"] * groups * hf["head_dim"] * b
    return ServerMemory(weights, round(cluster.server_share * round(cluster.gpu_memory * GIB)) - weights, kv_token)
