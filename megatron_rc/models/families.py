"""The model families that can be trained and sampled, one row each; everything else about a model is in its config."""

from typing import Any, NamedTuple

from megatron_rc.schema.limits import check_one_of


class Family(NamedTuple):
    architecture: str
    """The transformers class of the causal language model; config.json and SGLang use the same name."""
    config: str
    """The transformers class of its configuration."""
    has_experts: bool = False
    """Its layers may be mixtures of experts."""
    query_key_norm: bool = False
    """Attention normalises the queries and keys of every head before their rotary embedding."""
    query_key_value_bias: bool = False
    """The projections to queries, keys and values add a bias."""

    def config_class(self) -> Any:
        import transformers

        return getattr(transformers, self.config)

    def model_class(self) -> Any:
        import transformers

        return getattr(transformers, self.architecture)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig"),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", query_key_value_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", query_key_norm=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", has_experts=True, query_key_norm=True),
}
"""Maps model_type of a config.json to its family."""


def family_of(model_type: Any) -> Family:
    """Raises ValueError for a model type without a row."""
    check_one_of("model_type", model_type, FAMILIES)
    return FAMILIES[model_type]
