"""Import and export of weights under Hugging Face names, one tensor at a time over TP x PP x EP."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from megatron_rc.collectives import gathered_objects
from megatron_rc.models.files import HfCheckpoint, Writer
from megatron_rc.models.names import HfTensor, Parameter, parameters


class Source(Protocol):
    def read(self, tensor: HfTensor, start: int, stop: int) -> Tensor:
        """Rows ``start:stop`` of ``tensor`` along its split dimension, or all of it."""


def load_hf(model: Sequence[torch.nn.Module], hf_path: str | Path) -> None:
    """Fill ``model`` from the safetensors of a Hugging Face checkpoint; each rank reads only what it keeps.

    Args:
        model: from ``build_model``, wrapped or not. Load before the optimizer is built: it copies the weights.
        hf_path: directory with model.safetensors or model.safetensors.index.json.

    Raises:
        ValueError: a missing, unexpected or differently shaped tensor, named with its file; the same on every rank.
    """
    with HfCheckpoint(Path(hf_path)) as checkpoint:
        checkpoint.check([t for p in parameters(_core(model[0]).hf_config) for t in p.tensors])
        _fill(model, checkpoint)


def init_weights(model: Sequence[torch.nn.Module], seed: int) -> None:
    """Draw random weights by Hugging Face name: matrices from N(0, initializer_range^2), norms 1, biases 0.

    Unlike Megatron's own initialisation the result does not depend on the parallel layout.
    """
    _fill(model, _RandomWeights(seed, _core(model[0]).hf_config["initializer_range"]))


def export_hf(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the whole model under Hugging Face names, one full tensor at a time, padding removed.

    Every process must take every item, because each one is a collective. All processes receive the same names in the
    same order and the same values, on their own device in the parameters' dtype. An item may be a view of a parameter:
    copy what must outlive the next optimizer step.
    """
    hf, local = _core(model[0]).hf_config, _local_parameters(model)
    dtype = _core(model[0]).config.params_dtype
    stage_of_layer = _stage_of_layer(local)
    last_stage = parallel_state.get_pipeline_model_parallel_world_size() - 1
    experts_per_rank = hf.get("num_experts", 0) // parallel_state.get_expert_model_parallel_world_size()
    seen: set[str] = set()
    for parameter in parameters(hf):
        if parameter.layer is not None:
            stage = stage_of_layer[parameter.layer]
        else:
            stage = 0 if parameter.megatron[0].startswith("embedding") else last_stage
        owner = None if parameter.expert is None else parameter.expert // experts_per_rank
        held = _find(local, parameter)
        parts = [None] * len(parameter.tensors) if held is None else parameter.split(held.detach().to(dtype))
        for tensor, part in zip(parameter.tensors, parts, strict=True):
            # tied word embeddings: the head is the embedding again
            if tensor.name not in seen:
                seen.add(tensor.name)
                yield tensor.name, _collect(tensor, part, stage, owner, dtype)


def save_hf(
    model: Sequence[torch.nn.Module],
    path: str | Path,
    hf_config: dict[str, Any],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 1024**3,
) -> None:
    """Write config.json and safetensors that transformers, SGLang and ``load_hf`` read; a collective of all processes.

    The first process writes and holds at most the tensors of one file.

    Args:
        hf_config: from ``hf_config_dict``.
        dtype: precision of the files; None keeps the model's.
        max_shard_bytes: size at which another file is begun.
    """
    dtype = dtype or _core(model[0]).config.params_dtype
    writer = Writer(Path(path), max_shard_bytes) if dist.get_rank() == 0 else None
    for name, tensor in export_hf(model):
        if writer is not None:
            writer.add(name, tensor.to(dtype))
    if writer is not None:
        writer.finish(hf_config)
    dist.barrier()


def _core(module: Any) -> Any:
    while not isinstance(module, GPTModel):
        module = module.module
    return module


_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.experts\.linear_fc[12]\.weight)\d+$")


def _local_parameters(model: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters, names with model-wide layer and expert numbers."""
    out = {}
    for chunk in model:
        core = _core(chunk)
        experts = (core.config.num_moe_experts or 0) // core.config.expert_model_parallel_size
        first_expert = experts * parallel_state.get_expert_model_parallel_rank()
        for name, parameter in core.named_parameters():
            layer = _LAYER.match(name)
            if layer:
                number = core.decoder.layers[int(layer[1])].layer_number - 1
                name = f"decoder.layers.{number}.{name[layer.end() :]}"
            expert = _EXPERT.search(name)
            if expert:
                name = f"{name[: expert.start()]}{int(expert[0]) + first_expert}{name[expert.end() :]}"
            out[name] = parameter
    return out


def _find(local: dict[str, torch.nn.Parameter], parameter: Parameter) -> torch.nn.Parameter | None:
    return next((local[name] for name in parameter.megatron if name in local), None)


def _tensor_group(expert: int | None) -> dist.ProcessGroup:
    if expert is not None:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def _fill(model: Sequence[torch.nn.Module], source: Source) -> None:
    local = _local_parameters(model)
    unfilled = set(local)
    for parameter in parameters(_core(model[0]).hf_config):
        target = _find(local, parameter)
        if target is not None:
            group = _tensor_group(parameter.expert)
            # only the vocabulary is padded, at its end
            padded = target.shape[0] if parameter.layer is None else None
            parts = [_read_part(source, tensor, group.rank(), group.size(), padded) for tensor in parameter.tensors]
            target.copy_(parameter.join(parts))
            unfilled -= set(parameter.megatron)
    assert not unfilled, f"no Hugging Face name is known for {sorted(unfilled)}"


def _read_part(source: Source, tensor: HfTensor, rank: int, ranks: int, padded: int | None) -> Tensor:
    """This rank's part of a tensor, filled up with zeros to ``padded`` rows unless that is None."""
    if tensor.split is None:
        return source.read(tensor, 0, tensor.shape[0])
    size = tensor.shape[tensor.split]
    each = padded or size // ranks
    part = source.read(tensor, min(rank * each, size), min((rank + 1) * each, size))
    missing = each - part.shape[tensor.split]
    return torch.cat([part, part.new_zeros(missing, *tensor.shape[1:])]) if missing else part


def _collect(tensor: HfTensor, part: Tensor | None, stage: int, owner: int | None, dtype: torch.dtype) -> Tensor:
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    if part is not None:
        full = _gather(tensor, part.contiguous(), _tensor_group(owner))
    else:
        full = torch.empty(tensor.shape, dtype=dtype, device=torch.cuda.current_device())
    if owner is not None and pipeline.rank() == stage:
        _broadcast(full, owner, parallel_state.get_expert_model_parallel_group())
    _broadcast(full, stage, pipeline)
    return full


def _gather(tensor: HfTensor, part: Tensor, group: dist.ProcessGroup) -> Tensor:
    if tensor.split is None or group.size() == 1:
        return part.narrow(0, 0, tensor.shape[0]) if tensor.split == 0 else part
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return torch.cat(parts, dim=tensor.split).narrow(tensor.split, 0, tensor.shape[tensor.split]).contiguous()


def _broadcast(full: Tensor, source: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        dist.broadcast(full, src=dist.get_global_rank(group, source), group=group)


def _stage_of_layer(local: dict[str, torch.nn.Parameter]) -> dict[int, int]:
    layers = {int(match[1]) for name in local if (match := _LAYER.match(name))}
    of_stage = gathered_objects(layers, parallel_state.get_pipeline_model_parallel_group())
    return {layer: stage for stage, held in enumerate(of_stage) for layer in held}


class _RandomWeights:
    def __init__(self, seed: int, std: float) -> None:
        self.seed, self.std = seed, std

    def read(self, tensor: HfTensor, start: int, stop: int) -> Tensor:
        if len(tensor.shape) == 1:
            return torch.full((stop - start,), 0.0 if tensor.name.endswith(".bias") else 1.0)
        digest = hashlib.sha256(f"{self.seed} {tensor.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        full = torch.randn(tensor.shape, generator=generator) * self.std
        return full if tensor.split is None else full.narrow(tensor.split, start, stop - start)
