"""Every step reaches a dashboard once and in order, whatever happens to the job or to the dashboard."""

import dataclasses
import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from refusals import refusal, refuses
from report_pages import rl, warmup

from megatron_rc.report import dashboards as module
from megatron_rc.report import sinks
from megatron_rc.report.context import without_credentials
from megatron_rc.report.dashboards import Dashboards
from megatron_rc.report.log import MetricsLog
from megatron_rc.report.sinks import Run
from megatron_rc.settings.log import SERVICES, LogSettings
from megatron_rc.versions import installing


class Service:
    """A service in memory: what it got for each run, and when it is out of order."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}
        self.values: dict[str, list[Mapping[str, float]]] = {}
        self.ends: list[tuple[str, bool]] = []
        self.opened: list[Run] = []
        self.broken = False

    def open(self, field: str, run: Run) -> Any:
        self.raise_if_broken()
        self.opened.append(run)
        return SimpleNamespace(
            write=lambda step, values: self.write(run.name, step, values),
            close=lambda *, failed: self.ends.append((run.name, failed)),
        )

    def raise_if_broken(self) -> None:
        if self.broken:
            raise ConnectionError("no route\nto host")

    def write(self, name: str, step: int, values: Mapping[str, float]) -> None:
        self.raise_if_broken()
        self.steps.setdefault(name, []).append(step)
        self.values.setdefault(name, []).append(values)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(sinks, "open_run", made.open)
    return made


def log_steps(
    folder: Path, records: Sequence[dict[str, Any]], *, after: tuple[str, int] | None = None, field: str = "wandb",
    failed: bool = False,
) -> list[str]:  # fmt: skip
    """Log ``records`` as a job does, which resumed ``after`` that phase and step; returns what it said."""
    said: list[str] = []
    with MetricsLog(folder) as log:
        if after:
            log.truncate_after(*after)
        dashboards = Dashboards(folder, {field: "project"}, name="job", config={}, say=said.append)
        dashboards.start(str(records[0]["phase"]))
        for record in records:
            log.write(record)
            dashboards.write(record)
        dashboards.close(failed=failed)
    return said


def test_a_resumed_job_goes_on_in_its_run_and_another_folder_is_another_run(tmp_path: Path, service: Service) -> None:
    log_steps(tmp_path, rl(range(8)), failed=True)
    log_steps(tmp_path, rl(range(6, 7)), after=("rl", 5))
    log_steps(tmp_path, rl(range(6, 11)), after=("rl", 5))
    assert service.steps == {"job": list(range(11))}
    assert len({run.id for run in service.opened}) == 1
    assert service.ends == [("job", True), ("job", False), ("job", False)]
    log_steps(tmp_path / "another", rl(range(2)))
    assert len({run.id for run in service.opened}) == 2


def test_each_phase_is_a_run_of_its_own_with_its_own_steps(tmp_path: Path, service: Service) -> None:
    log_steps(tmp_path, [*warmup(range(1, 4)), *rl(range(3))])
    assert service.steps == {"job-warmup": [1, 2, 3], "job": [0, 1, 2]}
    assert service.ends == [("job-warmup", False), ("job", False)]
    assert len({run.id for run in service.opened}) == 2


def test_a_dashboard_that_is_added_later_gets_the_steps_it_lacks(tmp_path: Path, service: Service) -> None:
    log_steps(tmp_path, rl(range(4)), field="mlflow")
    service.steps.clear()
    log_steps(tmp_path, rl(range(4, 6)), after=("rl", 3))
    assert service.steps == {"job": [0, 1, 2, 3, 4, 5]}


def test_a_dashboard_that_fails_does_not_end_the_job_and_gets_its_steps_later(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    said: list[str] = []
    with MetricsLog(tmp_path) as log:
        dashboards = Dashboards(tmp_path, {"wandb": "project"}, name="job", config={}, say=said.append)
        for record in rl(range(6)):
            service.broken = record["step"] in (2, 3)
            now[0] += module.RETRY_SECONDS / 2 + 1
            log.write(record)
            dashboards.write(record)
    assert service.steps == {"job": [0, 1, 2, 3, 4, 5]}
    assert said == ["log.wandb: ConnectionError: no route to host; trying again in 10 minutes"]


def test_a_dashboard_that_cannot_be_opened_ends_the_job_before_it_starts(tmp_path: Path, service: Service) -> None:
    service.broken = True
    refuses("^log.wandb: ConnectionError: no route to host$", log_steps, tmp_path, rl(range(2)))


def test_only_finite_numbers_are_sent_under_the_names_of_the_file(tmp_path: Path, service: Service) -> None:
    record = {"phase": "rl", "step": 3, "old/k3": 0.5, "a": math.nan, "b": None, "c": [1.0], "d": 2, "e": math.inf}
    log_steps(tmp_path, [record])
    assert service.values == {"job": [{"old/k3": 0.5, "d": 2.0}]}


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, [*warmup(range(1, 9)), *rl(range(6))], field="tensorboard")
    repeated = [{"phase": "rl", "step": step, "reward/mean": 7.0, "old/k3": math.nan} for step in (3, 4)]
    log_steps(tmp_path, repeated, after=("rl", 2), field="tensorboard")
    seen = accumulators.EventAccumulator(str(tmp_path / "tensorboard" / "rl")).Reload().Scalars("reward/mean")
    assert [(e.step, round(e.value, 4)) for e in seen] == [(0, 0.0), (1, 0.01), (2, 0.02), (3, 7.0), (4, 7.0)]
    warm = accumulators.EventAccumulator(str(tmp_path / "tensorboard" / "warmup")).Reload().Scalars("cross_entropy")
    assert [e.step for e in warm] == list(range(1, 9))


def test_tensorboard_is_used_where_it_is_installed_and_the_others_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else object())
    assert sinks.requested(vars(LogSettings())) == {}
    assert sinks.requested(vars(LogSettings(mlflow="experiment"))) == {"mlflow": "experiment"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert sinks.requested(vars(LogSettings(tensorboard=False))) == {}
    assert list(sinks.requested(vars(LogSettings(wandb="p")))) == ["tensorboard", "wandb"]


def test_every_service_has_a_setting_and_a_file_of_its_name() -> None:
    files = [path.name.removesuffix("_sink.py") for path in Path(sinks.__file__).parent.glob("*_sink.py")]
    assert [field.name for field in dataclasses.fields(LogSettings)] == [*SERVICES]
    assert sorted(files) == sorted(SERVICES)


@pytest.mark.parametrize("field", SERVICES)
def test_a_missing_package_is_one_sentence_that_names_the_extra(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SERVICES[field]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refusal(sinks.requested, vars(LogSettings(**{field: "project"})))
    assert said == f"log.{field} needs the package {service.package}: {installing(service.extra)}"


def test_urls_are_shown_without_their_passwords() -> None:
    shown = without_credentials({"urls": ("http://me:secret@host:1/a@b", "file.txt"), "n": {"lr": 1, "s": "a@b://c"}})
    assert shown == {"urls": ["http://host:1/a@b", "file.txt"], "n": {"lr": 1, "s": "a@b://c"}}
