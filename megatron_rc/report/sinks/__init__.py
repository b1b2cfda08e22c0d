"""Services that show the metrics of a run besides metrics.jsonl: a file NAME_sink.py per row of `SERVICES`."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megatron_rc.settings.log import SERVICES
from megatron_rc.versions import installing


class Run(NamedTuple):
    """One run of a service, which is one phase of a job."""

    project: str
    name: str
    id: str
    """The same whenever this run is opened; opening it again continues it."""
    phase: str
    folder: Path
    """Output folder of the job."""
    config: Mapping[str, Any]
    """Settings of the job, and the machine that it runs on."""


class Sink(Protocol):
    """An open run of a service. The methods may raise whatever the library of the service raises."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Send the finite values of one step; steps ascend."""

    def close(self, *, failed: bool) -> None:
        """Send what is still in memory and finish the run."""


def requested(log: Mapping[str, Any]) -> dict[str, str]:
    """The services that the settings ask for, each with its project; ValueError where a package is not installed.

    TensorBoard, which has no projects, is used if it is installed, unless the setting is false.
    """
    projects = {}
    for field, service in SERVICES.items():
        asked = log[field]
        installed = importlib.util.find_spec(service.package) is not None
        if asked and not installed:
            remedy = installing(service.extra) if service.extra else f"pip install {service.package}"
            raise ValueError(f"log.{field} needs the package {service.package}: {remedy}")
        if asked or (asked is None and service.replaces_steps and installed):
            projects[field] = str(asked)
    return projects


def open_run(field: str, run: Run) -> Sink:
    """Start the run, or continue it if the service has it."""
    sink: Sink = importlib.import_module(f"{__name__}.{field}_sink").open_run(run)
    return sink
