"""The saved view of Weights & Biases has the panels of the report, and nothing that no job writes."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from megatron_rc.report.panels import PANELS, ROUTE_PANELS
from megatron_rc.report.wandb_layout import VIEW, save_wandb_view

ANSWER = {
    "viewer": {"id": "1", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}},
    "serverInfo": {"features": []},
    "upsertView": {"view": {"id": "1", "name": "nw-view-v"}, "inserted": True},
}


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


ROOT = Path(__file__).parents[2]


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
