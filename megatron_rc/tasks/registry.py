"""TASKS: the kinds of tasks that a YAML file can name. To add a kind, add a row."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from megatron_rc import schema
from megatron_rc.schema.choice import Choice
from megatron_rc.schema.limits import check_one_of
from megatron_rc.tasks import Task
from megatron_rc.tasks.arithmetic import ArithmeticOptions, ArithmeticTask
from megatron_rc.tasks.calculator import CalculatorOptions, CalculatorTask
from megatron_rc.tasks.copying import CopyOptions, CopyTask
from megatron_rc.tasks.jsonl import JsonlOptions, JsonlTask
from megatron_rc.tasks.reasoning_gym import ReasoningGymOptions, ReasoningGymTask


class Kind(NamedTuple):
    options: Any
    """Dataclass of its options."""
    task: type[Any]
    """Built from these options and the folder of a tokenizer."""
    sentence: str


TASKS = {
    "arithmetic": Kind(ArithmeticOptions, ArithmeticTask, "generated sums, with a built-in tokenizer."),
    "copy": Kind(CopyOptions, CopyTask, "generated texts to copy, with long responses."),
    "calculator": Kind(CalculatorOptions, CalculatorTask, "generated sums, with several turns per response."),
    "jsonl": Kind(JsonlOptions, JsonlTask, "prompts from a file, with the tokenizer of model.hf_path."),
    "reasoning_gym": Kind(
        ReasoningGymOptions, ReasoningGymTask, "generated problems in words, of the library reasoning-gym."
    ),
}
TaskKind = Annotated[str, Choice(TASKS)]


def build_task(
    kind: TaskKind, options: Mapping[str, Any] | None = None, *, seed: int = 1, tokenizer: str | None = None
) -> Task:
    """Build the task ``kind`` with ``options``, fields of the dataclass of its row.

    ``seed`` and ``tokenizer``, the folder of the checkpoint, are used when the options have none. Raises ValueError,
    which names the field, and the nearest known name if the field is unknown.
    """
    check_one_of("task.kind", kind, TASKS)
    checked = schema.from_dict(TASKS[kind].options, {"seed": seed, **(options or {})}, where="task.options")
    task: Task = TASKS[kind].task(checked, tokenizer)
    return task
