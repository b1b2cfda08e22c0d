"""Nodes of a job that meet, fail and end together, with a server and a trainer of a few lines."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cluster_nodes import environment, free_port

from megatron_rc.cluster import meeting

ROOT = Path(__file__).parents[2]

FAKE_SGLANG = """
import argparse, signal
from http.server import BaseHTTPRequestHandler, HTTPServer

signal.alarm(60)
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
port = parser.parse_known_args()[0].port

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
TRAINER = """
import signal, sys, time, urllib.request
signal.alarm(60)
behaviour, urls = sys.argv[1], sys.argv[2:]
assert [urllib.request.urlopen(url + "/health").status for url in urls] == [200]
print("trainer runs", flush=True)
if behaviour == "fails":
    sys.exit(3)
if behaviour == "stays":
    time.sleep(60)
"""
NODE = """
import sys
from megatron_rc.cluster import meeting, node, processes
from megatron_rc.cluster.layout import Command, Server

processes.exit_on_signals()
rank, behaviour = int(sys.argv[1]), sys.argv[2]
log = "{folder}/server.log"
serve = [sys.executable, "-m", "megatron_rc", "serve", "{folder}", "--port", "{server}", "--log", log]
servers = [Server("http://127.0.0.1:{server}", log, Command({{"PYTHONPATH": "{folder}"}}, serve))]
try:
    met = meeting.Leader({port}, 2, "", 30) if rank == 0 else meeting.Member("127.0.0.1", {port}, rank, "", 30)
    train = lambda urls: Command({{}}, [sys.executable, "{folder}/trainer.py", behaviour, *urls])
    node.work(met, [] if rank == 0 else servers, train if rank == 0 else lambda urls: None)
except ValueError as error:
    sys.exit(str(error))
"""


class TwoNodes:
    """Node 0 with a trainer of a few lines, node 1 with a server of a few lines, started by the verb serve."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        self.server, self.folder = free_port(), folder
        (folder / "sglang").mkdir()
        (folder / "sglang/__init__.py").write_text("")
        (folder / "sglang/launch_server.py").write_text(FAKE_SGLANG)
        (folder / "config.json").write_text("{}")
        (folder / "trainer.py").write_text(TRAINER)
        (folder / "node.py").write_text(
            NODE.format(folder=folder, server=self.server, port=free_port())
        )  # fmt: skip
        self.nodes = [
            subprocess.Popen(
                [sys.executable, str(folder / "node.py"), str(rank), behaviour], env=environment(PYTHONPATH=str(ROOT)),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in (0, 1)
        ]  # fmt: skip

    def until_it_trains(self) -> None:
        assert self.nodes[0].stdout
        line = self.nodes[0].stdout.readline()
        assert line == "trainer runs\n", line or self.ended()

    def ended(self) -> list[tuple[int, str]]:
        """(exit status, last line of stderr) of both."""
        said = [node.communicate(timeout=60)[1].splitlines() for node in self.nodes]
        return [(n.returncode, lines[-1] if lines else "") for n, lines in zip(self.nodes, said, strict=True)]

    def nothing_serves(self) -> bool:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.server)):
                    return True
            time.sleep(0.2)
        return False


def test_servers_of_another_node_reach_the_trainer_and_end_with_it(tmp_path: Path) -> None:
    both = TwoNodes(tmp_path, "ends well")
    both.until_it_trains()
    assert [status for status, _ in both.ended()] == [0, 0]
    assert both.nothing_serves()


def test_a_trainer_that_fails_ends_every_node(tmp_path: Path) -> None:
    both = TwoNodes(tmp_path, "fails")
    (first, why), (second, said) = both.ended()
    assert first == second == 1
    assert why.startswith("the trainer failed; its own error stands") and said == f"node 0: {why}"
    assert both.nothing_serves()


def test_a_node_that_vanishes_ends_the_others(tmp_path: Path) -> None:
    both = TwoNodes(tmp_path, "stays")
    both.until_it_trains()
    both.nodes[1].kill()
    assert both.ended()[0] == (1, "node 1 ended before the job did")
    assert both.nothing_serves()


def test_a_stopped_node_ends_what_all_started(tmp_path: Path) -> None:
    both = TwoNodes(tmp_path, "stays")
    both.until_it_trains()
    both.nodes[0].send_signal(signal.SIGTERM)
    (first, _), second = both.ended()
    assert first == 128 + signal.SIGTERM and second == (1, "node 0: stopped")
    assert both.nothing_serves()


def refusals_of_a_meeting(port: int, *members: tuple[int, str], timeout: float = 1) -> list[str]:
    """What node 0 and then each member (rank, job) says that cannot come together."""
    said: list[str] = ["nothing"] * (1 + len(members))

    def lead() -> None:
        try:
            leader = meeting.Leader(port, 3, "job", timeout)
            leader.gather(["http://a"])
        except meeting.NodeFailure as failure:
            said[0] = str(failure)
            leader.finish(said[0])

    def join(index: int, rank: int, job: str) -> None:
        try:
            meeting.Member("127.0.0.1", port, rank, job, timeout).gather([])
        except meeting.NodeFailure as failure:
            said[index] = str(failure)

    threads = [threading.Thread(target=lead)]
    threads += [threading.Thread(target=join, args=(i, *who)) for i, who in enumerate(members, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return said


def test_a_meeting_that_cannot_be_is_refused_on_every_node() -> None:
    port = free_port()
    missing = f"node 2 did not come to port {port} within 1 s; the same command must run on every node"
    assert refusals_of_a_meeting(port, (1, "job")) == [missing, f"node 0: {missing}"]
    other = "node 1 was started with other options than node 0"
    assert refusals_of_a_meeting(free_port(), (1, "another job")) == [other, f"node 0: {other}"]
    wrong = "--node-rank 3 was given to two nodes, or is not one of 0 to 2"
    assert refusals_of_a_meeting(free_port(), (3, "job")) == [wrong, f"node 0: {wrong}"]
    with socket.create_server(("", 0)) as taken, pytest.raises(meeting.NodeFailure, match="--master-port takes anothe"):
        meeting.Leader(taken.getsockname()[1], 2, "", 1)
    with pytest.raises(meeting.NodeFailure, match=r"node 0 does not answer at 127.0.0.1:\d+ after 0.1 s \(Connection"):
        meeting.Member("127.0.0.1", free_port(), 1, "", 0.1)
