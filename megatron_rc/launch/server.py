"""One SGLang server: its command, its start, the wait until it answers, and its end."""

import contextlib
import http.client
import os
import shlex
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import NoReturn

from megatron_rc.files import read_json
from megatron_rc.launch import addresses, processes
from megatron_rc.launch.processes import Process, end_group, say

GRACE = 20.0
"""Seconds that a server has to end before it is killed."""

CPU_FLAGS = shlex.split(
    "--device cpu --dtype float32 --attention-backend torch_native --disable-overlap-schedule --skip-tokenizer-init "
    "--skip-server-warmup --sleep-on-idle --mem-fraction-static 0.3 --max-total-tokens 32768 --max-running-requests 256"
)
"""What SGLang needs without a GPU: token ids in, token ids out."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def serving_command(
    model: str, *, python: str, host: str, port: int, tensor: int, cpu: bool, flags: Sequence[str]
) -> list[str]:
    """The command that serves ``model`` with what rollout correction needs; ``flags`` of the user come last and win.

    Raises ValueError when ``model`` has no configuration that can be read.
    """
    where = str(Path(model).resolve()) if Path(model).is_dir() else model
    # so that routes can be compared and replayed
    routes = ["--enable-return-routed-experts"] if _has_experts(model, python) else []
    words = [python, "-m", "sglang.launch_server", "--model-path", where, "--host", host, "--port", str(port)]
    return [*words, "--tp-size", str(tensor), *(CPU_FLAGS if cpu else ()), *routes, *flags]


def _has_experts(model: str, python: str) -> bool:
    path = Path(model) / "config.json"
    if not Path(model).is_dir() and not model.startswith((".", "/")):
        ask = "import sys, huggingface_hub as hub; print(hub.hf_hub_download(sys.argv[1], 'config.json'))"
        done = subprocess.run([python, "-c", ask, model], env=_environment(), stdout=subprocess.PIPE, text=True)
        if done.returncode:
            allowed = "MODEL is a directory or a name on the hub"
            raise ValueError(f"the config.json of {model} could not be read (see above); {allowed}")
        path = Path(done.stdout.strip())
    if not path.is_file():
        raise ValueError(f"{model} holds no config.json; MODEL is a Hugging Face checkpoint, such as a job's OUTPUT/hf")
    config = read_json(path)
    text = config.get("text_config") or config
    return any((text.get(name) or 0) > 1 for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def check_sglang(python: str) -> None:
    """Raises ValueError when the interpreter ``python`` has no SGLang."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
    try:
        missing = subprocess.run([python, "-c", code], env=_environment(), stderr=DEVNULL).returncode
    except OSError:
        missing = 1
    if missing:
        raise ValueError(f"{python} has no SGLang; install it there, or name another interpreter with --python")


def _environment() -> dict[str, str]:
    """The environment of a server, without folders on PYTHONPATH that hold our kernels."""
    kept = []
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        kernels = Path(folder) / "triton_kernels"
        if not kernels.is_dir() or (kernels / "__init__.py").exists():
            kept.append(folder)
    return processes.child_environment() | {"PYTHONPATH": os.pathsep.join(kept)}


def serve(
    command: Sequence[str],
    *,
    host: str,
    port: int,
    log: Path,
    timeout: float,
    background: bool,
    stop_with: int | None,
    report_to: str | None,
) -> None:
    """Start ``command`` and stay until it ends; whatever ends this process, the server and all it started end, too.

    Args:
        timeout: seconds that the server has to answer.
        background: return as soon as the server answers, and leave it running; `stop` ends it.
        stop_with: a process that the server must not outlive.
        report_to: HOST:PORT where a trainer gathers the addresses of its servers.

    Raises ValueError where the port is taken, or the server ended or did not answer in time.
    """
    # a server that listens on all addresses is asked through the loopback address
    asked = "127.0.0.1" if host == "0.0.0.0" else host
    with contextlib.suppress(OSError), socket.create_connection((asked, port), timeout=5):
        raise ValueError(f"something serves port {port} already; --port takes another number")
    log.parent.mkdir(parents=True, exist_ok=True)
    leader = None
    processes.exit_on_signals()
    try:
        with open(log, "w") as output:
            # in a session of its own, one number names the server with all it starts, and Ctrl-C does not reach it
            server = subprocess.Popen(
                command, env=_environment(), stdin=DEVNULL, stdout=output, stderr=STDOUT, start_new_session=True
            )
        leader = Process.now(server.pid)
        owners = [Process.now(stop_with)] if stop_with else []
        keeper = processes.start_keeper(leader, [Process.now(os.getpid()), *owners], GRACE)
        say(f"starting the server, process {server.pid}, log {log}")
        _wait_until_it_answers(server, asked, port, log, timeout)
        say(f"serving at http://{asked}:{port}, process {server.pid}, log {log}")
        if report_to:
            addresses.report(f"http://{asked}:{port}", report_to, timeout)
        if background:
            if owners:
                processes.start_keeper(leader, owners, GRACE)
            keeper.kill()
            pid_file(log).write_text(f"{leader.number} {leader.start}\n")
            leader = None
            return
        server.wait()
        _explain("the server ended by itself", log)
    finally:
        processes.ignore_signals()
        if leader is not None:
            end_group(leader, GRACE)


def _wait_until_it_answers(server: subprocess.Popen[bytes], host: str, port: int, log: Path, timeout: float) -> None:
    begun = reported = time.monotonic()
    while not _answers(host, port):
        if server.poll() is not None:
            _explain("the server ended before it answered", log)
        now = time.monotonic()
        if now - begun >= timeout:
            _explain(f"the server did not answer within {timeout:g} s and was stopped", log)
        if now - reported >= 10:
            reported = now
            say(f"waiting for the server: {''.join(_end_of(log, 1)).strip()[:120]}")
        time.sleep(0.5)


def _answers(host: str, port: int) -> bool:
    """Whether /health answers 200."""
    try:
        with contextlib.closing(http.client.HTTPConnection(host, port, timeout=30)) as connection:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False


def _explain(why: str, log: Path) -> NoReturn:
    print(*_end_of(log, 40), sep="", end="", file=sys.stderr, flush=True)
    raise ValueError(f"{why}; the end of {log} is above")


def _end_of(log: Path, count: int) -> deque[str]:
    with open(log, errors="replace") as lines:
        return deque(lines, maxlen=count)


def stop(log: Path) -> None:
    """End the server that was left running with this log, unless its process number belongs to another process by now.

    Raises ValueError when no server was left running with this log.
    """
    file = pid_file(log)
    try:
        number, start = file.read_text().split()
    except FileNotFoundError:
        raise ValueError(f"no server to stop: {file}, which --background writes, does not exist") from None
    if (leader := Process(int(number), start)).runs():
        end_group(leader, GRACE)
        say(f"stopped the server, process {number}")
    else:
        say(f"the server, process {number}, had ended already")
    file.unlink(missing_ok=True)


def pid_file(log: Path) -> Path:
    return log.with_suffix(".pid")
