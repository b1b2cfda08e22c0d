"""Starting, waiting for and stopping a server: one that starts at once, and the real SGLang on the CPU."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from built_wheel import pins
from launch_scripts import listens, write_quick_sglang, write_script
from process_groups import descendants, members, nothing_is_left
from refusals import Ended, refuses, run
from sglang_server import ROOT, SERVE, SglangServer, save_checkpoint, shared_server
from sglang_server import moe_server as moe_server

from megatron_rc.launch import addresses
from megatron_rc.launch.processes import Process, start_keeper
from megatron_rc.launch.server import CPU_FLAGS, free_port

LAUNCH = ROOT / "launch"
STAND_IN = LAUNCH / "sglang_cpu/stand_in"


class Manager:
    """A process that serves with the quick server."""

    def __init__(self, folder: Path, *options: object) -> None:
        self.port = free_port()
        write_quick_sglang(folder)
        words = ["serve", folder, "--python", sys.executable, "--port", self.port, "--log", folder / "server.log"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megatron_rc", *map(str, (*words, *options))], stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(folder)},
        )  # fmt: skip

    def until_it_serves(self) -> int:
        """The process group of the server."""
        assert self.process.stdout
        for line in self.process.stdout:
            if "serving at" in line:
                assert f"http://127.0.0.1:{self.port}," in line
                return int(line.split("process ")[1].split(",")[0])
        raise AssertionError(self.process.communicate()[1])

    def ended(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=600)
        return self.process.returncode, stderr


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no test may end by accident, with a group of its own."""
    with subprocess.Popen(["sleep", "900"], start_new_session=True) as process:
        yield process
        process.kill()


def serve(*words: object, **environment: str) -> Ended:
    with mock.patch.dict(os.environ, environment):
        if "SGLANG_PYTHON" not in environment:
            os.environ.pop("SGLANG_PYTHON", None)
        return run("serve", *words)


def refused(*words: object, **environment: str) -> str:
    status, printed, said = serve(*words, **environment)
    assert status == 2, printed
    (sentence,) = said.splitlines()
    return sentence


def dry_run(*words: object) -> list[str]:
    status, printed, said = serve(*words, "--dry-run")
    assert status == 0, said
    return printed.split()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_server_and_its_children_end_with_their_manager_and_nothing_else_does(
    sent: signal.Signals, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    manager = Manager(tmp_path)
    group = manager.until_it_serves()
    assert len(members(group)) == 2
    manager.process.send_signal(sent)
    status, _ = manager.ended()
    assert nothing_is_left(group)
    assert status == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[sent]
    assert bystander.poll() is None


def stopped(folder: Path) -> tuple[int, str]:
    status, printed, said = serve("stop", "--log", folder / "server.log")
    return status, printed + said


def test_a_background_server_outlives_its_manager_until_it_is_stopped(tmp_path: Path) -> None:
    manager = Manager(tmp_path, "--background")
    group = manager.until_it_serves()
    assert manager.ended()[0] == 0
    time.sleep(1.5)  # for whoever would end it
    assert len(members(group)) == 2
    os.kill(members(group)[1], signal.SIGKILL)  # the deaf child, for which the grace of `stop` is long
    assert stopped(tmp_path)[0] == 0
    assert nothing_is_left(group)
    assert "no server to stop" in stopped(tmp_path)[1]


def test_stop_spares_who_only_has_the_servers_number(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    (tmp_path / "server.pid").write_text(f"{bystander.pid} 12345\n")
    assert "had ended already" in stopped(tmp_path)[1]
    assert bystander.poll() is None


def test_a_keeper_spares_who_only_has_the_number_of_its_group(bystander: subprocess.Popen[bytes]) -> None:
    owner, mine = Process.now(os.getpid()), Process.now(bystander.pid)
    for stranger in (Process(bystander.pid, "12345"), Process(bystander.pid, None)):
        assert start_keeper(stranger, [owner], 0.1).wait(600) == 0
        assert bystander.poll() is None
    # one whose own owner has ended ends it
    assert start_keeper(mine, [Process(owner.number, "12345")], 0.1).wait(600) == 0
    assert bystander.wait(600) == -signal.SIGTERM


def test_a_background_server_ends_with_what_it_is_bound_to(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    manager = Manager(tmp_path, "--background", "--stop-with", bystander.pid)
    group = manager.until_it_serves()
    manager.ended()
    assert members(group)
    bystander.kill()
    bystander.wait()
    assert nothing_is_left(group)


def test_a_server_reports_its_address_to_the_trainer_that_waits(tmp_path: Path) -> None:
    trainer = f"127.0.0.1:{free_port()}"
    manager = Manager(tmp_path, "--report-to", trainer)
    other = threading.Thread(target=addresses.report, args=("http://a:1", trainer, 600))
    other.start()
    command = [sys.executable, "-m", "megatron_rc.launch.addresses", trainer, "2", "600"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.stdout.splitlines() == [f"http://127.0.0.1:{manager.port}", "http://a:1"], run.stderr
    other.join()
    manager.process.terminate()
    manager.ended()


def test_sides_that_do_not_meet_say_so_in_one_sentence() -> None:
    trainer = f"127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match=f"no trainer waited at {trainer} for the address of a server within 0.2 s"):
        addresses.report("http://a:1", trainer, 0.2)
    with pytest.raises(ValueError, match=f"0 of 2 servers reported to {trainer} within 0.2 s; the logs of the others"):
        addresses.gather(trainer, 2, 0.2)
    with socket.create_server(("", 0)) as taken, pytest.raises(ValueError, match="or its port is taken"):
        addresses.gather(f"127.0.0.1:{taken.getsockname()[1]}", 1, 0.2)
    refuses("the address of a trainer is HOST:PORT, got 'node0'", addresses.report, "http://a:1", "node0", 0.2)


def test_a_server_that_dies_or_never_gets_ready_is_explained_and_stopped(tmp_path: Path) -> None:
    status, said = Manager(tmp_path / "dies", "--dies").ended()
    assert status == 2 and "no such kernel\n" in said and "the server ended before it answered" in said
    manager = Manager(tmp_path / "never ready", "--timeout", 2, "--never-ready")
    status, said = manager.ended()
    assert status == 2 and "did not answer within 2 s" in said
    assert not listens(manager.port)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    first = Manager(tmp_path)
    first.until_it_serves()
    words = (tmp_path, "--port", first.port, "--log", tmp_path / "second.log")
    assert f"something serves port {first.port} already" in refused(*words, PYTHONPATH=str(tmp_path))
    assert not (tmp_path / "second.log").exists()
    first.process.terminate()
    first.ended()


def test_wrong_arguments_are_refused_in_one_sentence(tmp_path: Path) -> None:
    assert "the first argument is the model to serve" in refused("--dtype", "bfloat16", tmp_path)
    assert f"{tmp_path} holds no config.json" in refused(tmp_path, "--dry-run")
    (tmp_path / "config.json").write_text("{")
    assert "config.json is not valid JSON" in refused(tmp_path, "--dry-run")
    for python in (sys.executable, "/no/such/python"):
        assert f"{python} has no SGLang; install it there" in refused(tmp_path, SGLANG_PYTHON=python)
    for words in (["--port", "many"], ["--port", "-1"], ["--log"]):
        status, _, said = serve(tmp_path, *words)
        assert status == 2 and words[0] in said and "Traceback" not in said


def test_routes_are_asked_for_exactly_where_there_are_experts(tmp_path: Path) -> None:
    flag = "--enable-return-routed-experts"
    for config, experts in [
        ('{"model_type": "qwen3"}', False),
        ('{"model_type": "qwen3_moe", "num_experts": 8}', True),
        ('{"num_local_experts": 8}', True),
        ('{"n_routed_experts": null}', False),
        ('{"text_config": {"num_experts": 4}}', True),
    ]:
        (tmp_path / "config.json").write_text(config)
        assert (flag in dry_run(tmp_path)) is experts, config


def test_the_configuration_of_a_model_on_the_hub_is_read_by_the_interpreter_of_sglang(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    (tmp_path / "huggingface_hub.py").write_text(f"hf_hub_download = lambda model, file: '{tmp_path}/' + file")
    python = write_script(tmp_path / "python", f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    words = dry_run("Qwen/Qwen3-30B-A3B", "--python", python)
    assert words[2] == str(python) and "--enable-return-routed-experts" in words
    assert words[words.index("--model-path") + 1] == "Qwen/Qwen3-30B-A3B"


def test_flags_of_the_user_come_last_and_so_win(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = dry_run(tmp_path, "--cpu", "--dtype", "bfloat16", "--port", "31234", "--max-total-tokens", "99")
    assert words[-4:] == ["--dtype", "bfloat16", "--max-total-tokens", "99"]
    assert words[-4 - len(CPU_FLAGS) : -4] == CPU_FLAGS
    assert words[words.index("--port") + 1] == "31234" and words[words.index("--host") + 1] == "127.0.0.1"
    words = dry_run(tmp_path, "--sampling-mask-max-tokens", "64", "--tp", "4")
    assert words[words.index("--tp-size") + 1] == "4" and words[-2:] == ["--sampling-mask-max-tokens", "64"]


def test_a_server_keeps_the_users_environment_but_for_folders_that_hold_our_kernels(tmp_path: Path) -> None:
    ours, theirs, other = (tmp_path / name for name in ("ours", "theirs", "other"))
    (ours / "triton_kernels").mkdir(parents=True)
    (theirs / "triton_kernels").mkdir(parents=True)
    (theirs / "triton_kernels/__init__.py").write_text("")
    (tmp_path / "config.json").write_text("{}")
    python = write_script(tmp_path / "python", f'#!/bin/sh\nenv > {tmp_path}/environment\nexec {sys.executable} "$@"\n')
    refused(tmp_path, "--python", python, PYTHONPATH=f"{ours}:{theirs}::{other}", NCCL_SOCKET_IFNAME="ib0")
    environment = (tmp_path / "environment").read_text().splitlines()
    assert f"PYTHONPATH={theirs}:{other}" in environment
    assert "PYTHONSAFEPATH=1" in environment and "NCCL_SOCKET_IFNAME=ib0" in environment


def bash(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **environment}
    return subprocess.run(["bash", *map(str, words)], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("script", [SERVE, LAUNCH / "serve_sglang.sh"], ids=lambda s: s.name)
def test_a_script_serves_with_its_own_interpreter_and_the_options_of_the_verb(script: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    python = ROOT / ".venv/bin/python"
    run = bash(script, tmp_path, "--tp", "2", "--dtype", "bfloat16", "--dry-run", PYTHON=str(python))
    assert run.returncode == 0, run.stderr
    words = run.stdout.split()
    assert words[2] == str(LAUNCH / "sglang_cpu/python.sh" if script == SERVE else python)
    assert words[words.index("--tp-size") + 1] == "2" and words[-2:] == ["--dtype", "bfloat16"]
    assert ("--device" in words) is (script == SERVE) and "--enable-return-routed-experts" in words


def test_what_is_missing_is_one_sentence(tmp_path: Path) -> None:
    assert "known: --help" in bash(LAUNCH / "sglang_cpu/install.sh", "--fast").stderr
    run = bash(LAUNCH / "serve_sglang.sh", tmp_path, PYTHON="/bin/false")
    assert run.returncode == 1 and "/bin/false cannot run megatron-rc serve; pip install" in run.stderr
    run = bash(LAUNCH / "serve_sglang.sh", tmp_path, PYTHON=f"{ROOT}/.venv/bin/python")
    assert run.returncode == 2 and "has no SGLang" in run.stderr
    # a python3 without typer: the Python of .venv starts the SGLang of python3, and help needs neither
    without = write_script(tmp_path / "bin/python3", "#!/bin/sh\nexit 1\n").parent
    for script in (SERVE, LAUNCH / "serve_sglang.sh"):
        assert "Serve a model with SGLang" in bash(script, "--help", PATH=f"{without}:/usr/bin:/bin", PYTHON="").stdout
    run = bash(LAUNCH / "serve_sglang.sh", tmp_path, PATH=f"{without}:/usr/bin:/bin", PYTHON="")
    assert run.returncode == 2 and "error: python3 has no SGLang" in run.stderr


def test_torch_and_triton_are_the_versions_of_the_other_environment() -> None:
    theirs, ours = pins("launch/sglang_cpu/requirements.txt"), pins("constraints-cpu.txt")
    assert {n: theirs[n] for n in ("torch", "triton")} == {n: ours[n] for n in ("torch", "triton")}
    assert not {"sgl-kernel", "triton-kernels"} & {*theirs}
    assert not [n for n in theirs if "cuda" in n or "nvidia" in n or "flash" in n]


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


def test_every_process_of_a_real_server_is_in_its_group(moe_server: SglangServer) -> None:
    started = descendants(moe_server.process)
    assert len(started) >= 2 and set(started.values()) == {moe_server.process}


@pytest.mark.full
def test_ctrl_c_ends_every_process_of_a_real_server(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "model", "dense")
    with subprocess.Popen(
        ["bash", SERVE, model, "--port", "0", "--log", tmp_path / "server.log", "--timeout", "240"],
        stdout=subprocess.PIPE, text=True,
    ) as script:  # fmt: skip
        assert script.stdout
        group = int(next(line for line in script.stdout if "serving at" in line).split("process ")[1].split(",")[0])
        assert len(members(group)) >= 3
        script.send_signal(signal.SIGINT)
        assert script.wait(600) == 130
    assert nothing_is_left(group)
