"""Every setting of a training job, with its default; the YAML of `megatron-rc train` has these fields.

To add a setting, add a field with a docstring and, where it has limits, a check in ``__post_init__``;
`megatron-rc settings > docs/settings.md` documents it.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc import schema
from megatron_rc.correction.settings import PRESETS, RolloutCorrection
from megatron_rc.learning_rate.rule import AnyRuleSettings, check_lr_rule
from megatron_rc.settings.cluster import ClusterSettings
from megatron_rc.settings.dump import DumpSettings
from megatron_rc.settings.log import LogSettings
from megatron_rc.settings.loss import LossSettings
from megatron_rc.settings.model import ModelSettings, MoeSettings, ParallelSettings
from megatron_rc.settings.renamed import CurrentNames, load_finished
from megatron_rc.settings.rollout import RolloutSettings
from megatron_rc.settings.train import TrainSettings, WarmupSettings
from megatron_rc.tasks.registry import TaskKind
from megatron_rc.tasks.reward import found_beside


@dataclass(frozen=True, kw_only=True)
class TaskSettings:
    kind: TaskKind = "arithmetic"
    """What the policy is asked, and how its answers are scored."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the kind of task; a name that it lacks is refused with those that it has."""


@dataclass(frozen=True, kw_only=True)
class JobSettings(CurrentNames):
    name: str = "run"
    """Title of the display and the report."""
    output: str = "runs/run"
    """Folder of metrics.jsonl, checkpoints, dumps, TensorBoard files and report.html."""
    branch: str | None = None
    """FOLDER:STEP of another run, whose checkpoint of that step this one goes on from with settings of its own;
    in a grid, CELL:STEP, where CELL joins the choices of a cell by "-". null starts at the beginning."""
    model: ModelSettings = field(default_factory=ModelSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    task: TaskSettings = field(default_factory=TaskSettings)
    warmup: WarmupSettings = field(default_factory=WarmupSettings)
    rollout: RolloutSettings = field(default_factory=RolloutSettings)
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    moe: MoeSettings = field(default_factory=MoeSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    train: TrainSettings = field(default_factory=TrainSettings)
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    lr_rule: AnyRuleSettings | None = None
    """Rule that scales the learning rate on top of train.lr and its schedule; its name takes all its defaults, a
    mapping with the key `rule` sets its fields, null has none."""
    log: LogSettings = field(default_factory=LogSettings)
    dump: DumpSettings = field(default_factory=DumpSettings)

    @classmethod
    def expand(cls, data: Any) -> Any:
        """Options of the loss that belong to the correction are those of the job where it names no others."""
        data = super().expand(data)
        correction = data.get("correction") if isinstance(data, dict) else None
        name = correction.get("preset") if isinstance(correction, dict) else correction
        options = dict(PRESETS[name].loss) if isinstance(name, str) and name in PRESETS else {}
        if isinstance(correction, dict) and "surrogate" in correction:
            options = {**options, "surrogate": correction["surrogate"]} if correction["surrogate"] else {}
        given = data.get("loss", {}) if options else None
        return {**data, "loss": {**options, **given}} if isinstance(given, dict) else data

    def __post_init__(self) -> None:
        check_lr_rule(self.lr_rule, self.correction)
        self.branch_point()

    def branch_point(self) -> tuple[str, int] | None:
        """The run, or the cell of a grid, and the step that `branch` names."""
        if self.branch is None:
            return None
        origin, _, step = self.branch.rpartition(":")
        if not origin or not step.isdecimal():
            raise ValueError(f"branch must be FOLDER:STEP, such as runs/math:50, got {self.branch!r}")
        return origin, int(step)

    @property
    def fresh(self) -> bool:
        """Whether every rollout is sampled with the weights that it trains."""
        return self.rollout.lag == 0 and self.train.asynchronous == 0


def load(path_or_text: str | Path, assignments: Iterable[str] = ()) -> JobSettings:
    """The settings of a YAML file or text, with ``key=value`` assignments on top.

    A reward function may be in a file beside the YAML, or beside the file of prompts.

    Raises:
        ValueError: one sentence naming the field or the file.
    """
    data = schema.load_yaml(path_or_text)
    if "axes" in data:
        raise ValueError(f"this is a grid of jobs: megatron-rc grid {path_or_text}")
    for assignment in assignments:
        schema.set_field(data, assignment, JobSettings)
    if os.path.isfile(path_or_text):
        find_reward(data, Path(path_or_text).parent)
    return schema.from_dict(JobSettings, data)


def find_reward(data: dict[str, Any], folder: Path) -> None:
    """Replace the module of a reward, in the fields of a job, by its file in ``folder`` or beside the prompts."""
    match data:
        case {"task": {"options": {"reward": str(name), "path": str(prompts)}}}:
            data["task"]["options"]["reward"] = found_beside(name, folder, Path(prompts).parent)


def of_finished(folder: Path) -> JobSettings:
    """The settings of a run, from its folder; names that they had in an earlier version are read, too."""
    return schema.from_dict(JobSettings, load_finished(folder / "settings.yaml"))
