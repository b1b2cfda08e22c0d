"""The services that show the metrics of a job: a row, and a setting of the same name."""

from dataclasses import dataclass
from typing import NamedTuple


class Service(NamedTuple):
    package: str
    """Package to import."""
    extra: str | None = None
    """Extra of megatron-rc that installs it; None: the package alone."""
    replaces_steps: bool = False
    """Shows the newest values of a step that a resumed job repeats; other services keep the first ones."""


SERVICES = {
    "tensorboard": Service("tensorboard", "report", replaces_steps=True),
    "wandb": Service("wandb", "wandb"),
    "mlflow": Service("mlflow", "mlflow"),
    "trackio": Service("trackio", "trackio"),
}
"""The code of each is in report/sinks/NAME_sink.py."""


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Services that get the metrics besides metrics.jsonl."""

    tensorboard: bool | None = None
    """Write event files to OUTPUT/tensorboard; null: if tensorboard is installed."""
    wandb: str | None = None
    """Project on Weights & Biases, as PROJECT or ENTITY/PROJECT; null: none."""
    mlflow: str | None = None
    """Experiment on MLflow; null: none."""
    trackio: str | None = None
    """Project in Trackio; null: none."""
