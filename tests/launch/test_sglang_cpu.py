"""The scripts that serve, and the real SGLang server of .venv-sglang on this machine's CPU."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from constraints import pins
from launch_scripts import write_script
from process_groups import descendants, members, nothing_is_left
from sglang_server import ROOT, SERVE, SglangServer, save_checkpoint, shared_server
from sglang_server import moe_server as moe_server

LAUNCH = ROOT / "launch"
STAND_IN = LAUNCH / "sglang_cpu/stand_in"


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
    assert not [
        n for n in theirs if "cuda" in n or "nvidia" in n or "flash" in n or n in ("sgl-kernel", "triton-kernels")
    ]


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
