"""Whether processes and a model can be cut as a layout says; needs no megatron-core, which takes seconds to import."""

from typing import Any

from megatron_rc.models.config import moe_layers
from megatron_rc.settings.model import ParallelSettings


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
