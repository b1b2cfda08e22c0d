"""The transformers model that the embedded engine samples from, and the place of each checkpoint tensor in it."""

from typing import Any

import torch
from torch import Tensor

from megatron_rc.models.families import family_of


def build_model(hf_config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """The model with random weights; raises ValueError for an unknown family or sliding-window attention."""
    family = family_of(hf_config.get("model_type"))
    config = family.config_class()(**{key: value for key, value in hf_config.items() if key != "model_type"})
    if getattr(config, "use_sliding_window", False):
        raise ValueError("use_sliding_window must be false: the engine attends to the whole context")
    # leave the caller's random state as it is
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        model = family.model_class()._from_config(config, attn_implementation="sdpa", dtype=dtype)
    # in 16 bits a CPU would multiply the strided last row of every prompt by a copy of the weight of its own
    model.get_output_embeddings().register_forward_pre_hook(lambda head, given: (given[0].contiguous(), *given[1:]))
    return model.eval().requires_grad_(False)


def weight_slots(model: torch.nn.Module) -> dict[str, Tensor]:
    """The place of each checkpoint tensor; transformers fuses the experts that checkpoints store one by one."""
    slots: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        experts = name.rpartition(".")[0]
        if name.endswith(".experts.gate_up_proj"):
            half = parameter.shape[1] // 2
            for expert, fused in enumerate(parameter.detach()):
                slots[f"{experts}.{expert}.gate_proj.weight"] = fused[:half]
                slots[f"{experts}.{expert}.up_proj.weight"] = fused[half:]
        elif name.endswith(".experts.down_proj"):
            for expert, down in enumerate(parameter.detach()):
                slots[f"{experts}.{expert}.down_proj.weight"] = down
        else:
            slots[name] = parameter.detach()
    return slots
