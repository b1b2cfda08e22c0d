"""Tasks by the name they have in a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from megatron_rc import schema
from megatron_rc.tasks import Task
from megatron_rc.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from megatron_rc.tasks.jsonl import JsonlOptions, JsonlTask

TaskKind = Literal["arithmetic", "jsonl"]
OPTIONS: dict[TaskKind, Any] = {"arithmetic": ArithmeticOptions, "jsonl": JsonlOptions}
"""Maps each kind of task to the dataclass of its options."""


def build_task(
    kind: str, options: Mapping[str, Any] | None = None, *, seed: int = 1, tokenizer: str | None = None
) -> Task:
    """The task ``kind`` with ``options``.

    Args:
        kind: arithmetic or jsonl.
        options: fields of ArithmeticOptions or JsonlOptions.
        seed: used when ``options`` has no seed.
        tokenizer: directory of the checkpoint, used by jsonl when ``options`` has no tokenizer.

    Raises:
        ValueError: one sentence naming the field, with the nearest known name of an unknown one.
    """
    if kind not in OPTIONS:
        raise ValueError(f"task.kind: unknown task {kind!r}{schema.nearest(kind, OPTIONS)}")
    chosen = schema.from_dict(OPTIONS[kind], {"seed": seed, **(options or {})}, where="task.options")
    if kind == "arithmetic":
        return ArithmeticTask(chosen)
    return JsonlTask(chosen, tokenizer)
