"""The real libraries, without a network: they store what the job logged, and the saved view shows its panels."""

import importlib.util
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron_rc.report.context import without_credentials
from megatron_rc.report.dashboards import Dashboards
from megatron_rc.report.log import MetricsLog
from megatron_rc.report.panels import PANELS, ROUTE_PANELS
from megatron_rc.report.wandb_layout import VIEW, save_wandb_view

SECRET = "hunter2"
URL = f"http://me:{SECRET}@host:30000"
CONFIG = {
    "settings": {"train": {"lr": 0.25}, "urls": [URL], "model": {f"f{i}": i for i in range(150)}},
    "machine": {"torch": "9.9"},
}
# a .wandb file is a log of LevelDB
BLOCK, FILE_HEADER, RECORD_HEADER = 32768, 7, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
ROOT = Path(__file__).parents[2]
EXPECTED = [(step, step + 0.5) for step in range(10)]
ANSWER = {
    "viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"features": []},
    "upsertView": {"view": {"id": "1", "name": "nw-view-v"}, "inserted": True},
}


def job(service: str, folder: Path, first: int, last: int, end: str) -> None:
    """Do nothing but log, and end by "finish", "fail" or "kill"."""
    with MetricsLog(folder) as log:
        log.truncate_after("rl", first - 1)
        config = without_credentials(CONFIG)
        dashboards = Dashboards(folder, {service: "project"}, name="job", config=config, say=sys.exit)
        dashboards.start("rl")
        for step in range(first, last + 1):
            record = {"phase": "rl", "step": step, "old/k3": step + 0.5}
            record |= {"current/route_layers": [0, 1], "none": float("nan")}
            log.write(record)
            dashboards.write(record)
        if end == "kill":
            time.sleep(1.5)  # training steps take longer than the queues of the libraries
            os.kill(os.getpid(), signal.SIGKILL)
        dashboards.close(failed=end == "fail")


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of a .wandb file, without what a crash has torn."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), FILE_HEADER, b""
    while place + RECORD_HEADER <= len(data):
        if BLOCK - place % BLOCK < RECORD_HEADER:  # too small for a header: padding
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + RECORD_HEADER])
        place += RECORD_HEADER
        assert kind in (FULL, FIRST, MIDDLE, LAST)
        parts = (b"" if kind in (FULL, FIRST) else parts) + data[place : place + length]
        place += length
        if kind in (FULL, LAST) and place <= len(data):
            yield Record.FromString(parts)


def history(path: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (r.history.step.num, {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item})
        for r in records(path)
        if r.WhichOneof("record_type") == "history"
    ]


def requires(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def log_steps(folder: Path, service: str, first: int, last: int, end: str) -> None:
    """Run the logging job in a process of its own, with everything that a library stores inside ``folder``."""
    command = [sys.executable, __file__, service, str(folder / "run"), str(first), str(last), end]
    done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=600)
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr


def environment(folder: Path) -> dict[str, str]:
    quiet = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
    places = {"TRACKIO_DIR": str(folder / "trackio"), "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **quiet, **places}


def killed_and_resumed(folder: Path, service: str) -> None:
    """Steps 0 to 5, killed; then steps 4 to 9 after a resume, ended by an error."""
    log_steps(folder, service, 0, 5, "kill")
    log_steps(folder, service, 4, 9, "fail")


def test_wandb_keeps_every_step_once_in_one_run(tmp_path: Path) -> None:
    requires("wandb")
    killed_and_resumed(tmp_path, "wandb")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.parent.name)
    assert len(files) == 2
    assert [(step, v["old/k3"]) for file in files for step, v in history(file)] == EXPECTED
    kinds = [{r.WhichOneof("record_type"): r for r in records(file)} for file in files]
    assert len({kind["run"].run.run_id for kind in kinds}) == 1 and all(kind["run"].run.resume for kind in kinds)
    assert [kind["exit"].exit.exit_code for kind in kinds if "exit" in kind] == [1]
    stored = b"".join(file.read_bytes() for file in (tmp_path / "run" / "wandb").rglob("*") if file.is_file())
    assert SECRET.encode() not in stored and b"http://host:30000" in stored
    assert b"test_sinks.py" not in stored, "the command line stays on the machine"


def test_mlflow_keeps_every_step_once_in_one_run(tmp_path: Path) -> None:
    requires("mlflow")
    requires("sqlalchemy")
    killed_and_resumed(tmp_path, "mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "old/k3")] == EXPECTED
    assert (run.info.run_name, run.info.status) == ("job", "FAILED")
    assert list(run.data.metrics) == ["old/k3"]
    assert run.data.params["settings.train.lr"] == "0.25" and run.data.params["settings.model.f149"] == "149"
    assert SECRET not in str(run.data.params)


def test_trackio_keeps_every_step_once_in_one_run(tmp_path: Path) -> None:
    requires("trackio")
    killed_and_resumed(tmp_path, "trackio")

    def trackio(*words: str) -> dict[str, object]:
        command = [sys.executable, "-m", "trackio.cli", *words, "--project", "project", "--json"]
        return dict(json.loads(subprocess.check_output(command, env=environment(tmp_path), text=True, timeout=600)))

    (run,) = trackio("list", "runs")["runs"]  # type: ignore[misc]
    values = trackio("get", "metric", "--run", run, "--metric", "old/k3")["values"]
    assert [(v["step"], v["value"]) for v in values] == EXPECTED  # type: ignore[union-attr]
    assert run.startswith("job-") and SECRET.encode() not in (tmp_path / "trackio" / "project.db").read_bytes()


@contextmanager
def wandb_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the list to which it appends every request."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path == "/graphql":  # telemetry goes elsewhere
                requests.append(json.loads(body))
            answer = json.dumps({"data": ANSWER}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()


def test_the_view_in_the_project_has_every_panel_of_the_report_once_with_its_metrics(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces")
    with wandb_server() as (address, requests):
        place = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "megatron_rc", "wandb-view", "team/project"]
        environment = {**os.environ, **place, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{address}/team/project")
    (request,) = [request for request in requests if "UpsertView2" in request["query"]]
    saved = request["variables"]
    found = [saved[name] for name in ("entityName", "projectName", "displayName", "type")]
    assert found == ["team", "project", VIEW, "project-view"]
    sections = json.loads(saved["spec"])["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Reinforcement learning", "Expert shift", "Warm-up"]
    drawn = [panel["config"] for section in sections for panel in section["panels"]]
    wanted = {panel.title: panel for panel in (*PANELS, *ROUTE_PANELS)}
    assert sorted(config["chartTitle"] for config in drawn) == sorted(wanted)
    for config in drawn:
        panel = wanted[config["chartTitle"]]
        assert config["metrics"] == [key for curve in panel.curves for key in curve.keys]
        assert config["yLogScale"] == panel.logarithmic and config["yAxisTitle"] == panel.unit


def test_every_metric_of_a_panel_is_documented() -> None:
    names = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))
    keys = {key for panel in (*PANELS, *ROUTE_PANELS) for curve in panel.curves for key in curve.keys}
    pairs = {key.split("/", 1)[1] for key in keys if key.startswith(("old/", "current/", "current_old/"))}
    pairs = {re.sub(r"(?<=_lag_).+", "<lags>", name) for name in pairs}
    general = {name.removesuffix("_token").removesuffix("_seq") for name in pairs - names}
    assert {name for name in general - names if not name.startswith("rejected_")} == set()
    assert {key for key in keys if not key.startswith(("old/", "current/", "current_old/"))} <= names


@pytest.mark.parametrize("place", ["project", "team/", "/project", "a/b/c", ""])
def test_a_project_without_its_entity_is_refused(place: str) -> None:
    with pytest.raises(ValueError, match="must be given as ENTITY/PROJECT, got"):
        save_wandb_view(place)


if __name__ == "__main__":
    job(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
