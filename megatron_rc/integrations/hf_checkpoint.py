"""Whether a Hugging Face checkpoint is quantised or has experts, by its config.json or its name, and rules about it."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rc.integrations.flag_rules import FlagRule

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

    is_quantized: bool
    is_moe: bool
    evidence: str
    """What says so: "config.json" or "name"."""


def read_checkpoint(path: object) -> Checkpoint:
    """Facts about a folder or a model of the hub, from its config.json (here or in the hub's cache), else its name."""
    name = str(path or "")
    config = _config_of(name)
    if config is None:
        # the folder may be a variable of the shell, whose name says nothing
        lower = name.rstrip("/").rpartition("/")[2].lower() if "$" in name else name.lower()
        return Checkpoint(any(part in lower for part in _QUANTIZED_NAMES), bool(_MOE_NAMES.search(lower)), "name")
    sections = list(_sections(config))
    experts = [number for section in sections for key in _NUMBER_OF_EXPERTS for number in _numbers(section.get(key))]
    is_quantized = any(section.get("quantization_config") for section in sections)
    return Checkpoint(is_quantized, max(experts, default=0) > 1, "config.json")


def _sections(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A configuration and those nested in it: a multimodal model keeps its language model in one of them."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _sections(value)


def _numbers(value: object) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]


def _config_of(name: str) -> dict[str, Any] | None:
    if not name or "$" in name:
        return None
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser() / f"models--{name.replace('/', '--')}"
    for file in (Path(name) / "config.json", *sorted(hub.glob("snapshots/*/config.json"), reverse=True)):
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            return config if isinstance(config, dict) else None
    return None


def checkpoint_rules(
    model: str, *, quantize: str, replays: Callable[[Any], bool], replay: str
) -> tuple[FlagRule, FlagRule]:
    """The rules "quantized-checkpoint" and "moe-replay" of a host whose trainer and engine read one checkpoint.

    Args:
        model: dotted path of the setting that names the checkpoint.
        quantize: how the host quantises rollouts from a checkpoint that is not quantised; ends a sentence.
        replays: whether routes are replayed, or the trainer has no way to replay them.
        replay: how to replay them, one sentence.
    """
    return (
        FlagRule("quantized-checkpoint", lambda args: (found := read_checkpoint(args[model])).is_quantized and found,
            f"{{args[{model}]}} is a quantised checkpoint by its {{found.evidence}}, and the trainer reads the weights "
            "in another precision than the engine",
            f"Train from the bfloat16 checkpoint, and {quantize}.",
            good="nothing says that the checkpoint is quantised", severity="warning"),
        FlagRule(
            "moe-replay", lambda args: (found := read_checkpoint(args[model])).is_moe and not replays(args) and found,
            f"{{args[{model}]}} is a mixture of experts by its {{found.evidence}}, and trainer and engine choose "
            "experts by themselves",
            replay,
            good="routes are replayed, this trainer cannot replay any, or nothing says that the model has experts",
            severity="warning",
        ),
    )  # fmt: skip
