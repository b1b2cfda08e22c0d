"""The dashboards of one job: every step reaches each of them once and in order, also across crashes and resumes."""

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rc.files import read_json, replace_text
from megatron_rc.report import sinks
from megatron_rc.report.curves import Record, phase_of
from megatron_rc.report.log import read_metrics
from megatron_rc.report.sinks import Run, Sink
from megatron_rc.schema import one_line
from megatron_rc.settings.log import SERVICES

STATE_FILE = "dashboards.json"
RETRY_SECONDS = 600.0
"""Time between two attempts to reach a dashboard that failed."""


class Dashboards:
    """Sends the records of metrics.jsonl to other services; used by the process that writes that file.

    Each phase of a job is one run of each service. The state file keeps the id of the job and the last step that each
    service has. A resumed job continues its runs. A step that it repeats is not sent again, except to services that
    show the newest values; steps of metrics.jsonl that a service lacks are sent when its run is opened. A service
    that fails during the job does not end it: the service gets the missing steps when it works again.
    """

    def __init__(
        self,
        folder: Path,
        projects: Mapping[str, str],
        *,
        name: str,
        config: Mapping[str, Any],
        say: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: output folder of the job; holds metrics.jsonl and the state file.
            projects: maps each service to the project there, as `sinks.requested` returns them.
            name, config, say: the services show the first two; ``say`` shows a sentence to the user.
        """
        self._folder, self._projects, self._name, self._config, self._say = folder, projects, name, config, say
        file = folder / STATE_FILE
        state: dict[str, Any] = read_json(file) if file.is_file() else {"id": uuid.uuid4().hex[:12], "sent": {}}
        self._id: str = state["id"]
        self._sent: dict[str, dict[str, int]] = state["sent"]
        self._phase = ""
        self._open: dict[str, Sink] = {}
        self._retry_at: dict[str, float] = {}

    def start(self, phase: str) -> None:
        """Open the runs of ``phase``; a user's mistake shows before the training starts, as a ValueError."""
        self._change_phase(phase)
        for service in self._projects:
            try:
                self._open_run(service)
            except Exception as error:  # a library may raise anything
                raise ValueError(f"log.{service}: {one_line(error)}") from error

    def write(self, record: Record) -> None:
        """Send one record, which is in metrics.jsonl already."""
        self._change_phase(phase_of(record))
        for service in self._projects:
            if time.monotonic() < self._retry_at.get(service, 0.0):
                continue
            try:
                self._send(service, record)
            except Exception as error:  # a library may raise anything, and training goes on without it
                self._open.pop(service, None)
                self._retry_at[service] = time.monotonic() + RETRY_SECONDS
                self._say(f"log.{service}: {one_line(error)}; trying again in {RETRY_SECONDS / 60:.0f} minutes")
        replace_text(self._folder / STATE_FILE, json.dumps({"id": self._id, "sent": self._sent}) + "\n")

    def close(self, *, failed: bool) -> None:
        """Finish the open runs; ``failed``: the job ends with an error."""
        for service, sink in self._open.items():
            try:
                sink.close(failed=failed)
            except Exception as error:  # a library may raise anything
                self._say(f"log.{service}: {one_line(error)}")
        self._open = {}

    def _change_phase(self, phase: str) -> None:
        if phase != self._phase:
            self.close(failed=False)
            self._phase = phase

    def _send(self, service: str, record: Record) -> None:
        sent, step = self._sent.setdefault(service, {}), int(record["step"])
        last = sent.get(self._phase, -1)
        if step <= last and SERVICES[service].replaces_steps:
            if service in self._open:
                self._open.pop(service).close(failed=False)
            last = sent[self._phase] = step - 1
        if service not in self._open:
            self._open_run(service)
        elif step > last:
            self._open[service].write(step, _numbers(record))
            sent[self._phase] = step

    def _open_run(self, service: str) -> None:
        """Open the run of this phase, and send every record that it lacks."""
        phase, sent = self._phase, self._sent.setdefault(service, {})
        suffix = "" if phase == "rl" else f"-{phase}"
        run = Run(self._projects[service], self._name + suffix, self._id + suffix, phase, self._folder, self._config)
        sink = self._open[service] = sinks.open_run(service, run)
        for record in read_metrics(self._folder):
            if phase_of(record) == phase and int(record["step"]) > sent.get(phase, -1):
                sink.write(int(record["step"]), _numbers(record))
                sent[phase] = int(record["step"])


def _numbers(record: Record) -> dict[str, float]:
    metrics = {name: value for name, value in record.items() if name not in ("step", "phase")}
    return {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
