"""The services that show the metrics of a job."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LogSettings:
    """Services that get the metrics besides metrics.jsonl; docs/dashboards.md."""

    tensorboard: bool | None = None
    """Write event files to OUTPUT/tensorboard; null: if tensorboard is installed."""
    wandb: str | None = None
    """Project on Weights & Biases, as PROJECT or ENTITY/PROJECT; null: none."""
    mlflow: str | None = None
    """Experiment on MLflow; null: none."""
    trackio: str | None = None
    """Project in Trackio; null: none."""
