"""What differs between the settings of a run and those given now, and what of it a run may change in the middle."""

import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megatron_rc import schema
from megatron_rc.settings.job import JobSettings

MAY_CHANGE = {
    "name": "the title",
    "log": "where metrics are sent",
    "dump": "which of the last steps are kept, and with which columns",
    "cluster": "machines, and the memory of their GPUs",
    "train.steps": "the end of the run, but not before the steps that are done; a schedule follows it from then on",
    "train.eval_interval": "when held-out prompts are answered",
    "train.eval_samples": "answers per held-out prompt",
    "train.save_interval": "when checkpoints are written",
    "train.keep_checkpoints": "how many of them are kept",
    "train.keep_steps": "which of them are always kept",
    "train.save_hf": "whether the final weights are written",
    "train.grad_cosine": "a metric",
    "train.debug_checks": "checks on the device",
    "train.micro_batches": "how a batch is cut: the result is the same up to rounding",
    "train.max_tokens_per_microbatch": "the same",
    "train.head": "what log-probs are made of: they are the same up to rounding",
    "train.head_chunk": "the same",
    "train.backend": "the same",
    "rollout.max_nonfinite_share": "when the job stops",
    "rollout.sglang": "where the servers are, how they are asked and how weights reach them",
}
"""Setting, or section, that a run may change in the middle -> what it decides; docs/training.md shows this table."""
DECIDE_SAMPLES = ("rollout.sglang.partial", "rollout.sglang.max_lag")
"""Settings in these sections that may not change: they decide which samples are trained."""

BELONG_TO_CHECKPOINT = {
    "model": "the checkpoint holds the weights",
    "warmup": "it ended before the checkpoint",
    "train.optimizer": "the checkpoint holds the state of the other one",
    "train.dtype": "the checkpoint holds weights and optimizer in the other precision",
}
"""Setting, or section, that a branch may not change either -> why it cannot act."""


class Change(NamedTuple):
    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} {shown(self.old)} -> {shown(self.new)}"

    @property
    def allowed(self) -> bool:
        """Whether a run may make it in the middle."""
        return bool(self.among(MAY_CHANGE)) and self.name not in DECIDE_SAMPLES

    def among(self, names: Iterable[str]) -> str | None:
        """Which of ``names`` is this setting, or a section that it belongs to."""
        return next((name for name in names if f"{self.name}.".startswith(f"{name}.")), None)


def changes(made: JobSettings, given: JobSettings) -> list[Change]:
    """What differs, besides the folder of the run; a section that only one of them has is one change."""
    both = (schema.to_dict(settings) | {"output": None} for settings in (made, given))
    return list(_differences("", *both))


def shown(value: Any) -> str:
    """A value as YAML on one line; of a section, the fields that do something."""
    if isinstance(value, dict):
        value = {name: field for name, field in value.items() if field not in (None, "none", [])}
    return schema.dump_yaml(value, one_line=True).removesuffix("\n...")


def _differences(name: str, old: Any, new: Any) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differences(f"{name}.{key}".lstrip("."), old.get(key), new.get(key))
    elif old != new and not (name.endswith("path") and _same_file(old, new)):
        yield Change(name, old, new)


def _same_file(old: Any, new: Any) -> bool:
    """Two spellings of one path are one setting."""
    return isinstance(old, str) and isinstance(new, str) and os.path.realpath(old) == os.path.realpath(new)
