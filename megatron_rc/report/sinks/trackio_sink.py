"""Trackio: the run goes to a local database, to TRACKIO_SERVER_URL, or to the Hugging Face Space TRACKIO_SPACE_ID."""

from collections.abc import Mapping

import trackio

from megatron_rc.report.sinks import Run


class TrackioSink:
    def __init__(self, run: Run) -> None:
        # Trackio continues a run by its name
        name = f"{run.name}-{run.id}"
        self._run = trackio.init(project=run.project, name=name, config=dict(run.config), resume="allow", embed=False)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        self._run.finish()


open_run = TrackioSink
