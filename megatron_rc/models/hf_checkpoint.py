"""Whether a Hugging Face checkpoint is quantised or has experts, by its config.json or its name."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_NUMBER_OF_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_QUANTIZED_NAMES = ("fp8", "fp4", "int4", "awq", "gptq")
_MOE_NAMES = re.compile(
    # the active parameters, as in Qwen3-30B-A3B
    r"(?<![a-z0-9])a\d+(\.\d+)?b|moe|mixtral|dbrx|moonlight|gpt-oss|glm-(4\.[5-9]|5)|deepseek-v[2-4]|deepseek-r1(?!-distill)|kimi-k"
    r"|minimax-(m|text)|llama-?4-|step-?3|nano-30b|qwen2-57b|qwen3-(coder-)?next|nemotron-3-(super|ultra)|grok|longcat"
    r"|(?<![a-z0-9])hy-?3"
)
"""Names of models with experts; `config.json` says more where it is here."""


class Checkpoint(NamedTuple):
    """Two facts about a checkpoint."""

    name: str
    is_quantized: bool
    is_moe: bool
    evidence: str
    """What says so: "config.json" or "name"."""


def read_checkpoint(path: object, hub: Path) -> Checkpoint:
    """Facts on a folder or a model of the hub, by its config.json (here or in the cache ``hub``), else its name."""
    name = str(path or "")
    config = _config_of(name, hub)
    if config is None:
        # the folder may be a variable of the shell, whose name says nothing
        lower = name.rstrip("/").rpartition("/")[2].lower() if "$" in name else name.lower()
        return Checkpoint(name, any(part in lower for part in _QUANTIZED_NAMES), bool(_MOE_NAMES.search(lower)), "name")
    is_quantized = any(section.get("quantization_config") for section in _sections(config))
    return Checkpoint(name, is_quantized, number_of_experts(config) > 1, "config.json")


def number_of_experts(config: Mapping[str, Any]) -> int:
    """The largest number of experts in a layer that a configuration states, under any of its names; 0 without one."""
    counts = [section[key] for section in _sections(config) for key in _NUMBER_OF_EXPERTS if key in section]
    of_layers = [each for count in counts for each in (count if isinstance(count, list) else [count])]
    return max((each for each in of_layers if isinstance(each, int)), default=0)


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A configuration and those nested in it: a multimodal model keeps its language model in one of them."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _sections(value)


def _config_of(name: str, hub: Path) -> dict[str, Any] | None:
    if not name or "$" in name:
        return None
    snapshots = hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")
    for file in (Path(name) / "config.json", *sorted(snapshots, reverse=True)):
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            return config if isinstance(config, dict) else None
    return None
