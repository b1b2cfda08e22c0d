"""The kinds of task that a YAML file can name; a new kind is a name and an entry of the table."""

from collections.abc import Mapping
from typing import Any, Literal

from megatron_rc import schema
from megatron_rc.tasks import Task
from megatron_rc.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from megatron_rc.tasks.calculator import CalculatorOptions, CalculatorTask
from megatron_rc.tasks.copying import CopyOptions, CopyTask
from megatron_rc.tasks.jsonl import JsonlOptions, JsonlTask

TaskKind = Literal["arithmetic", "copy", "calculator", "jsonl"]
TASKS: dict[TaskKind, tuple[Any, type[Any]]] = {
    "arithmetic": (ArithmeticOptions, ArithmeticTask),
    "copy": (CopyOptions, CopyTask),
    "calculator": (CalculatorOptions, CalculatorTask),
    "jsonl": (JsonlOptions, JsonlTask),
}
"""Maps each kind of task to the dataclass of its options, and to the class of the task."""
OPTIONS = {kind: options for kind, (options, _) in TASKS.items()}


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
    task: Task = TASKS[kind][1](checked, tokenizer)
    return task
