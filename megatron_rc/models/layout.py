"""Whether processes and a model can be cut as a layout says; needs no megatron-core, which takes seconds to import."""

import math
from typing import Any

from megatron_rc.models.config import moe_layers
from megatron_rc.settings.model import ParallelSettings


def fewest_processes(parallel: ParallelSettings) -> int:
    """Processes of the smallest job with this layout."""
    return parallel.pipeline * math.lcm(parallel.tensor, parallel.expert)


def check_processes(parallel: ParallelSettings, world_size: int) -> None:
    """Raises ValueError naming the fields when the world cannot be cut this way."""
    product = parallel.tensor * parallel.pipeline
    if world_size % product:
        name = f"parallel.tensor * parallel.pipeline = {product}"
        raise ValueError(f"{name} must divide the number of processes, got {world_size}")
    stage, expert = world_size // parallel.pipeline, parallel.expert
    if stage % expert:
        raise ValueError(f"parallel.expert={expert} must divide the processes of a pipeline stage, got {stage}")


def check_model(hf: dict[str, Any], parallel: ParallelSettings) -> None:
    """Raises ValueError for a layout that the model ``hf``, from ``hf_config_dict``, cannot be cut into."""
    moe = any(moe_layers(hf))
    splits = [("num_attention_heads", "tensor"), ("num_key_value_heads", "tensor"), ("num_hidden_layers", "pipeline")]
    splits += [("num_experts", "expert")] if moe else []
    splits += [] if moe and all(moe_layers(hf)) else [("intermediate_size", "tensor")]
    splits += [("moe_intermediate_size", "tensor")] if moe and parallel.expert == 1 else []
    for name, axis in splits:
        ranks = getattr(parallel, axis)
        if hf[name] % ranks:
            raise ValueError(f"{name} must be divisible by parallel.{axis}, got {hf[name]} and {ranks}")
    if parallel.expert > 1 and not moe:
        raise ValueError(f"parallel.expert={parallel.expert} needs a model with experts, this one has none")


def check_context(hf: dict[str, Any], *, prompt: int, max_new_tokens: int) -> None:
    """Raises ValueError when a response after a prompt of ``prompt`` tokens has no room in the context of ``hf``."""
    if prompt + max_new_tokens > (context := hf["max_position_embeddings"]):
        longest = f"rollout.max_new_tokens={max_new_tokens} after a prompt of {prompt} tokens"
        raise ValueError(f"{longest} is longer than the model's context (max_position_embeddings) of {context}")
