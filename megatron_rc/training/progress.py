"""How far a run is: the position that a checkpoint holds, and the checkpoints in a folder; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rc.correction.measured_upper import FIRST
from megatron_rc.files import read_json
from megatron_rc.learning_rate.rule import EARLIER, earlier_state

STATE = "state.json"


@dataclass
class Progress:
    """The position of a job. With the weights and the settings it determines everything else."""

    phase: str = "warmup"
    """warmup or rl."""
    step: int = 0
    """Finished steps of the phase."""
    cursor: int = 0
    """Prompts of the training stream that reinforcement learning has used."""
    weight_version: int = 0
    lr_rule: dict[str, Any] | None = None
    """Name and state of the learning-rate rule after the finished steps; None when the job has none."""
    measured_upper: float = FIRST
    """The bound C with the least error on the last rollout, for a weight with upper "measured"."""
    sketch: tuple[float, ...] = ()
    """Where sampler and trainer differed in the last rollout, by token id: `persistence`."""

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.step:06d}"


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first; warm-up comes before reinforcement learning."""
    folders = [path.parent for path in folder.glob(f"*/{STATE}") if not path.parent.name.startswith(".")]
    return sorted(folders, key=lambda path: (path.name.split("-")[0] == "rl", path.name))


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete(folder)), None)


def read_progress(path: Path) -> Progress:
    """The position that a checkpoint holds, also one of version 0.1."""
    saved = read_json(path / STATE)["progress"]
    earlier = {name: saved.pop(name, None) for name, _ in EARLIER.values()}
    return Progress(**{"lr_rule": earlier_state(earlier), **saved})
