"""The kinds of task that a YAML file can name; a new kind is an entry in each table of this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from megatron_rc import schema
from megatron_rc.tasks import Task
from megatron_rc.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from megatron_rc.tasks.calculator import CalculatorOptions, CalculatorTask
from megatron_rc.tasks.copying import CopyOptions, CopyTask
from megatron_rc.tasks.jsonl import JsonlOptions, JsonlTask

TaskKind = Literal["arithmetic", "copy", "calculator", "jsonl"]
OPTIONS: dict[TaskKind, Any] = {
    "arithmetic": ArithmeticOptions,
    "copy": CopyOptions,
    "calculator": CalculatorOptions,
    "jsonl": JsonlOptions,
}
"""Maps each kind of task to the dataclass of its options."""
BUILDERS: dict[TaskKind, Callable[[Any, str | None], Task]] = {
    "arithmetic": lambda options, tokenizer: ArithmeticTask(options),
    "copy": lambda options, tokenizer: CopyTask(options),
    "calculator": lambda options, tokenizer: CalculatorTask(options),
    "jsonl": JsonlTask,
}
"""Maps each kind of task to what makes it of its options and the folder of the checkpoint's tokenizer."""


def build_task(
    kind: TaskKind, options: Mapping[str, Any] | None = None, *, seed: int = 1, tokenizer: str | None = None
) -> Task:
    """Build the task ``kind`` with ``options``, fields of the dataclass that `OPTIONS` has for it.

    ``seed`` and ``tokenizer``, the folder of the checkpoint, are used when the options have none. Raises ValueError,
    which names the field, and the nearest known name if the field is unknown.
    """
    if kind not in OPTIONS:
        raise ValueError(f"task.kind: unknown task {kind!r}{schema.nearest(kind, OPTIONS)}")
    checked = schema.from_dict(OPTIONS[kind], {"seed": seed, **(options or {})}, where="task.options")
    return BUILDERS[kind](checked, tokenizer)
