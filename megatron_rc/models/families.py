"""The model families that can be trained and sampled, one row each.

A family with other tensors per layer also changes names.py, and one with other layers training/model/build.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Family(NamedTuple):
    architecture: str
    """The transformers class of the causal language model; config.json and SGLang use the same name."""
    config: str
    """The transformers class of its configuration."""
    has_experts: bool
    """Its layers may be mixtures of experts."""

    def config_class(self) -> Any:
        import transformers

        return getattr(transformers, self.config)

    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.architecture)


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", has_experts=False),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", has_experts=True),
}
"""Maps model_type of a config.json to its family."""


def family_of(model_type: Any) -> Family:
    """Raises ValueError for a model type without a row."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {model_type!r}")
    return FAMILIES[model_type]
