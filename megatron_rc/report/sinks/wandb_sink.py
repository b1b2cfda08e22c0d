"""Weights & Biases: the run goes to the account of `wandb login`, or to OUTPUT/wandb with WANDB_MODE=offline."""

from collections.abc import Mapping

import wandb

from megatron_rc.report.sinks import Run


class WandbSink:
    def __init__(self, run: Run) -> None:
        entity, _, project = run.project.rpartition("/")
        self._run = wandb.init(
            entity=entity or None,
            project=project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            allow_val_change=True,
            settings=wandb.Settings(
                console="off",  # a table that is redrawn all the time
                disable_git=True,
                x_disable_meta=True,  # command line and paths may hold what is not meant for others
                login_timeout=60,  # seconds
                x_transaction_log_flush_interval=1.0,  # second; a killed job loses no more than that
            ),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step, commit=True)

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


open_run = WandbSink
