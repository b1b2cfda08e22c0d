"""MLflow: the run goes to the server of MLFLOW_TRACKING_URI, or to mlflow.db in the working directory."""

import time
from collections.abc import Mapping

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from megatron_rc.report.context import flattened
from megatron_rc.report.sinks import Run

TAG = "megatron_rc.run"


class MlflowSink:
    def __init__(self, run: Run) -> None:
        self._client = client = MlflowClient()
        experiment = client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else client.create_experiment(run.project)
        if earlier := client.search_runs([number], f"tags.`{TAG}` = '{run.id}'"):
            self._id = earlier[0].info.run_id
            client.update_run(self._id, status="RUNNING")
            return
        self._id = client.create_run(number, run_name=run.name, tags={TAG: run.id}).info.run_id
        params = [Param(name, str(value)[:6000]) for name, value in flattened(run.config)]
        for first in range(0, len(params), 100):  # this and the length are MLflow's limits
            client.log_batch(self._id, params=params[first : first + 100])

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


open_run = MlflowSink
