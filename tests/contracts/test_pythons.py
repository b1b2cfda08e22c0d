"""The newer Pythons of the metadata: the wheel is installed on them and works. They are looked for, never installed."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import pythons
from built_wheel import ROOT
from packaging.utils import canonicalize_name

from megatron_rc.versions import PYTHON, TESTED

# each test may install gigabytes first
pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

CORE = {row.python: row.core for row in TESTED if row.python != PYTHON.oldest}
"""Python -> the megatron-core that trains on it."""


def run(python: Path, *arguments: str | Path) -> str:
    """What a program prints that runs in the checkout, but imports the package from its environment."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    settings = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, *arguments], cwd=ROOT, env=inherited | settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module", params=list(CORE))
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def interpreter(release: str) -> Path:
    found = pythons.interpreter(release)
    if found is None:
        pytest.skip(f"no Python {release} with ensurepip on PATH or among pyenv's")
    return found


@pytest.fixture(scope="module")
def complete(interpreter: Path, release: str, wheel: Path) -> Path:
    return pythons.complete(interpreter, release, wheel, CORE[release])


def test_the_light_core_helps_and_examines(interpreter: Path, release: str, wheel: Path) -> None:
    python = pythons.light(interpreter, release, wheel)
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"))
    names = {canonicalize_name(package["name"]) for package in listed}
    assert "megatron-rc" in names and not names & {"torch", "triton", "transformers", "megatron-core"}
    assert "doctor" in run(python, "-m", "megatron_rc", "--help")
    assert "torch is missing" in run(python, "-m", "megatron_rc", "doctor")


def test_the_correction_computes_and_the_kernels_compile(complete: Path) -> None:
    arguments = ("-m", "pytest", "--quiet", "-p", "no:cacheprovider")
    said = run(complete, *arguments, "tests/correction", "tests/kernels/test_aot.py")
    assert " passed" in said and "skipped" not in said


def test_megatron_core_trains_the_quickstart(complete: Path, release: str, tmp_path: Path) -> None:
    recipe = ROOT / "launch/recipes/quickstart_single.yaml"
    short = ("warmup.steps=20", "train.steps=3", "train.eval_interval=3", f"output={tmp_path / 'run'}")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    assignments = [word for assignment in short for word in ("--set", assignment)]
    run(complete, *launcher, "-m", "megatron_rc", "train", recipe, "--fresh", *assignments)
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if s["phase"] == "rl" and "reward/mean" in s] == [1, 2, 3]
    assert f"passed: megatron-core {CORE[release]};" in run(complete, "-m", "megatron_rc", "doctor")
