"""Starting, waiting for and stopping SGLang servers, up to a real one on this machine's CPU."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from constraints import pins
from sglang_server import ROOT, SERVE, SglangServer, save_checkpoint, shared_server

LAUNCH = ROOT / "launch"
STAND_IN = LAUNCH / "sglang_cpu/stand_in"

# starts at once, has a child that does not listen to SIGTERM, and ends by itself if a test fails to end it
QUICK_SERVER = """
import signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

signal.alarm(60)
behaviour, port = sys.argv[1], int(sys.argv[2])
if behaviour == "dies":
    sys.exit("no such kernel")
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", deaf])

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if behaviour == "never ready" else 200)
        self.end_headers()

    def log_message(self, *words):
        print("asked", flush=True)

HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
START = """
source "{launch}/sglang_common.sh"
timeout=3 stop_grace=1 port={port} log="{folder}/server.log" background={background} stop_with={stop_with}
run_server 127.0.0.1 "{python}" "{folder}/quick.py" "{behaviour}" {port}
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Script:
    """A launch script that starts the quick server."""

    def __init__(self, folder: Path, behaviour: str = "serves", background: str = "", stop_with: str = "") -> None:
        self.folder, self.port = folder, free_port()
        (folder / "quick.py").write_text(QUICK_SERVER)
        text = START.format(
            launch=LAUNCH, port=self.port, folder=folder, background=background, stop_with=stop_with,
            python=sys.executable, behaviour=behaviour,
        )  # fmt: skip
        self.process = subprocess.Popen(["bash", "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def until_it_serves(self) -> int:
        """The process group of the server."""
        assert self.process.stdout
        for line in self.process.stdout:
            if "serving at" in line:
                assert f"http://127.0.0.1:{self.port}," in line
                return int(line.split("process ")[1].split(",")[0])
        raise AssertionError(self.process.communicate()[1])

    def ended(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr


def members(group: int) -> list[int]:
    """The living processes of a group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of_group = stat.read_text().rpartition(") ")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(of_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def nothing_is_left(group: int, seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not members(group)


def refused(*command: str | Path, **environment: str) -> str:
    """The one sentence with which a script ends."""
    run = subprocess.run(
        ["bash", *map(str, command)], env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert run.returncode == 1, run.stdout
    (sentence,) = run.stderr.splitlines()
    return sentence


def dry_run(*command: str | Path, **environment: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHON"} | environment
    run = subprocess.run(
        ["bash", *map(str, command), "--dry-run"], env=environment, check=True, capture_output=True, text=True
    )
    return run.stdout.split()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_and_its_children_end_with_the_script_and_nothing_else_does(
    sent: signal.Signals, tmp_path: Path
) -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    script = Script(tmp_path)
    group = script.until_it_serves()
    assert len(members(group)) == 2
    script.process.send_signal(sent)
    status, _ = script.ended()
    assert nothing_is_left(group)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[sent]
    assert bystander.poll() is None
    bystander.kill()


def stop(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SERVE, "stop", "--log", folder / "server.log"], capture_output=True, text=True)


def test_a_background_server_outlives_its_script_and_ends_when_told(tmp_path: Path) -> None:
    script = Script(tmp_path, background="1")
    group = script.until_it_serves()
    assert script.ended()[0] == 0
    time.sleep(1.5)
    assert len(members(group)) == 2
    os.kill(members(group)[1], signal.SIGKILL)  # the deaf child, for which the grace of `stop` is long
    assert stop(tmp_path).returncode == 0
    assert nothing_is_left(group)
    assert "no server to stop" in stop(tmp_path).stderr


def test_stop_leaves_a_process_alone_that_only_has_the_number_of_the_server(tmp_path: Path) -> None:
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    (tmp_path / "server.pid").write_text(f"{innocent.pid} 12345\n")
    done = stop(tmp_path)
    assert "had ended already" in done.stdout
    assert innocent.poll() is None
    innocent.kill()


def test_a_background_server_ends_with_the_process_it_is_bound_to(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    script = Script(tmp_path, background="1", stop_with=str(owner.pid))
    group = script.until_it_serves()
    script.ended()
    assert members(group)
    owner.kill()
    owner.wait()
    assert nothing_is_left(group)


def test_a_server_that_dies_is_explained_by_the_end_of_its_log(tmp_path: Path) -> None:
    status, said = Script(tmp_path, "dies").ended()
    assert status == 1
    assert "no such kernel\n" in said and "the server ended before it answered" in said


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    script = Script(tmp_path, "never ready")
    status, said = script.ended()
    assert status == 1
    assert "asked\n" in said and "did not answer within 3 s" in said
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", script.port)) != 0


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    first = Script(tmp_path)
    first.until_it_serves()
    (tmp_path / "config.json").write_text("{}")
    serve_gpu = (LAUNCH / "serve_sglang.sh", tmp_path, "--port", str(first.port), "--log", tmp_path / "second.log")
    (tmp_path / "sglang.py").write_text("")
    said = refused(*serve_gpu, PYTHON=sys.executable, PYTHONPATH=str(tmp_path))
    assert f"something serves port {first.port} already" in said
    first.process.terminate()
    first.ended()


def test_wrong_arguments_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for script in (SERVE, LAUNCH / "serve_sglang.sh"):
        assert "the first argument is the model to serve" in refused(script)
        assert "--port takes a whole number, got 'many'" in refused(script, tmp_path, "--port", "many")
        assert "--log takes a file" in refused(script, tmp_path, "--log")
    assert "holds no config.json" in refused(SERVE, tmp_path)
    assert "known: --help" in refused(LAUNCH / "sglang_cpu/install.sh", "--fast")
    said = refused(LAUNCH / "serve_sglang.sh", tmp_path, PYTHON=f"{ROOT}/.venv/bin/python")
    assert "has no SGLang" in said


@pytest.mark.parametrize("script", [SERVE, LAUNCH / "serve_sglang.sh"], ids=lambda s: s.name)
def test_routes_are_asked_for_exactly_where_there_are_experts(script: Path, tmp_path: Path) -> None:
    flag = "--enable-return-routed-experts"
    for config, experts in [
        ('{"model_type": "qwen3"}', False),
        ('{"model_type": "qwen3_moe", "num_experts": 8}', True),
        ('{"num_local_experts": 8}', True),
        ('{"n_routed_experts": null}', False),
        ('{"text_config": {"num_experts": 4}}', True),
    ]:
        (tmp_path / "config.json").write_text(config)
        assert (flag in dry_run(script, tmp_path)) is experts, config


def test_flags_of_the_user_come_last_and_so_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = dry_run(SERVE, tmp_path, "--dtype", "bfloat16", "--port", "31234", "--max-total-tokens", "99")
    assert words[-4:] == ["--dtype", "bfloat16", "--max-total-tokens", "99"]
    assert words[words.index("--port") + 1] == "31234" and words[words.index("--host") + 1] == "127.0.0.1"
    words = dry_run(LAUNCH / "serve_sglang.sh", tmp_path, "--sampling-mask-max-tokens", "64", "--tp", "4")
    assert words[words.index("--tp-size") + 1] == "4" and words[words.index("--host") + 1] == "127.0.0.1"
    assert words[-2:] == ["--sampling-mask-max-tokens", "64"]


def test_every_script_here_sets_the_environment_of_its_children() -> None:
    for script in (LAUNCH / "sglang_cpu").glob("*.sh"):
        text = script.read_text()
        assert "set -euo pipefail" in text and "common.sh" in text, script.name
        assert "child_environment" in text or "run_server" in text, script.name


def test_torch_and_triton_are_the_versions_of_the_other_environment() -> None:
    theirs, ours = pins("launch/sglang_cpu/requirements.txt"), pins("constraints-cpu.txt")
    assert {n: theirs[n] for n in ("torch", "triton")} == {n: ours[n] for n in ("torch", "triton")}
    assert not [
        n for n in theirs if "cuda" in n or "nvidia" in n or "flash" in n or n in ("sgl-kernel", "triton-kernels")
    ]


@pytest.fixture
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with shared_server("moe", tmp_path_factory) as server:
        yield server


def test_the_cpu_server_generates_and_returns_routes(moe_server: SglangServer) -> None:
    answer = moe_server.generate([3, 4, 5], {"max_new_tokens": 4, "ignore_eos": True}, return_routed_experts=True)
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) == 4
    layers, experts = 2, 3
    assert len(base64.b64decode(answer["meta_info"]["routed_experts"])) == (3 + 4 - 1) * layers * experts * 4


def test_the_server_cannot_see_this_repository_nor_take_it_for_triton_kernels(moe_server: SglangServer) -> None:
    # what the leader was given, its children inherit; theirs cannot be read, they write their titles over it
    pairs = Path(f"/proc/{moe_server.process}/environ").read_text().split("\0")
    environment = dict(pair.split("=", 1) for pair in pairs if pair)
    assert environment["PYTHONPATH"] == str(STAND_IN)
    code = "import importlib.util as u; print(u.find_spec('triton_kernels'), u.find_spec('megatron_rc'))"
    python = ROOT / ".venv-sglang/bin/python"
    done = subprocess.run([python, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "None None\n"


def test_a_shared_server_comes_back_as_it_started(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", "moe", seed=5)
    with shared_server("moe", tmp_path_factory) as server:
        before = server.call("/weights_checker", {})[1]
        server.call("/update_weights_from_disk", {"model_path": str(other), "weight_version": "other"})
        server.call("/begin_weight_update", {})
        server.call("/pause_generation", {"mode": "abort"})
        assert server.call("/weights_checker", {})[1] != before
    with shared_server("moe", tmp_path_factory) as again:
        assert again == server
        assert again.call("/weights_checker", {})[1] == before
        assert again.generate([3], {"max_new_tokens": 1})["meta_info"]["weight_version"] == "default"


def test_ctrl_c_ends_every_process_of_a_real_server(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "dense")
    with subprocess.Popen(
        ["bash", SERVE, model, "--port", "0", "--log", tmp_path / "server.log", "--timeout", "240"],
        stdout=subprocess.PIPE, text=True,
    ) as script:  # fmt: skip
        assert script.stdout
        said = next(line for line in script.stdout if "serving at" in line)
        group = int(said.split("process ")[1].split(",")[0])
        assert len(members(group)) >= 3
        script.send_signal(signal.SIGINT)
        assert script.wait(60) == 130
    assert nothing_is_left(group)
