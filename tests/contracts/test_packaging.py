"""What is published and installed, which name it claims, and that nothing shadows another `triton_kernels`."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from built_wheel import BROUGHT_BY_HOSTS, HOST_PINS, ROOT, build, held, installed, pins, requirements, tools
from packaging.utils import canonicalize_name

from megatron_rc.schema import load_yaml

LOCATE = """
import importlib.util as u
find = lambda name: (spec := u.find_spec(name)) and (spec.origin or "namespace")
print(find("triton_kernels"), find("megatron_rc"), find("megatron_rc.kernels.probe"))
"""


def real_triton_kernels(python: Path) -> Path:
    """Install a stand-in for Triton's own package of that name."""
    (site_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    package = site_packages / "triton_kernels"
    package.mkdir()
    (package / "__init__.py").write_text("")
    return package / "__init__.py"


def locate(python: Path, checkout: Path, launch: bool) -> list[str]:
    """Where a child started in the checkout finds triton_kernels, megatron_rc and one kernel file."""
    prepare = f'source "{ROOT}/launch/common.sh" && child_environment && ' if launch else ""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if launch:
        environment["PYTHONPATH"] = str(checkout)
    else:
        environment["PYTHONSAFEPATH"] = ""
    run = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'{prepare}exec "{python}" -c "$0"', LOCATE],
        cwd=checkout, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return run.stdout.split()


def test_the_kernel_folder_is_a_link_without_a_package_file() -> None:
    link = ROOT / "megatron_rc/kernels"
    assert link.is_symlink() and os.readlink(link) == "../triton_kernels"
    assert not (ROOT / "triton_kernels/__init__.py").exists()


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = {n for n in archive.namelist() if ".dist-info/" not in n}
    # or type checkers take the package for untyped
    assert "megatron_rc/py.typed" in inside
    assert {n.split("/")[0] for n in inside} == {"megatron_rc"}
    package = {p for p in (checkout / "megatron_rc").rglob("*") if p.is_file() and p.parent.name != "__pycache__"}
    package |= {checkout / "megatron_rc/kernels" / p.name for p in (checkout / "triton_kernels").iterdir()}
    assert inside == {p.relative_to(checkout).as_posix() for p in package}


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_a_real_triton_kernels_wins_else_children_find_none(hook: str, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    python = installed(build(checkout, hook, tmp_path / "dist"), tmp_path / "venv")
    home = tmp_path if hook == "build_wheel" else checkout

    theirs, package, kernel = locate(python, checkout, launch=True)
    assert theirs == "None"
    assert Path(package).is_relative_to(home) and Path(kernel).is_relative_to(home)

    real = str(real_triton_kernels(python))
    assert locate(python, checkout, launch=True) == [real, package, kernel]
    # and in a shell that knows nothing of this, started in the checkout
    theirs, _, kernel = locate(python, checkout, launch=False)
    assert theirs == real
    assert kernel != "None"


def test_every_launch_script_sets_the_environment_of_its_children() -> None:
    scripts = [p for p in (ROOT / "launch").rglob("*.*") if p.suffix in (".sh", ".sbatch") and p.name != "common.sh"]
    assert len(scripts) >= 9
    for script in scripts:
        text = script.read_text()
        assert "set -euo pipefail" in text, script.name
        assert re.search(r"^\s*(prepare|child_environment|export PYTHONSAFEPATH=1)\b", text, re.MULTILINE), script.name


def test_no_requirement_brings_apex_or_another_triton_kernels(metadata: Message) -> None:
    assert not {canonicalize_name(r.name) for r in requirements(metadata)} & {"apex", "nvidia-apex", "triton-kernels"}
    assert not any(r.specifier for r in requirements(metadata) if r.name == "torch")


def test_the_wheel_names_the_plugin_that_verl_imports(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        found = archive.read(name).decode().split("[verl.plugins]\n")[1].split("\n")[0]
    assert found == "megatron_rc = megatron_rc.integrations.verl.plugin"
    assert (ROOT / "megatron_rc/integrations/verl/plugin.py").is_file()


def test_extras_are_the_promised_ones(metadata: Message) -> None:
    promised = {"train", "sglang", "te", "report", "math", "real", "wandb", "mlflow", "trackio", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == promised


def test_constraints_pin_every_requirement_to_an_accepted_version(metadata: Message) -> None:
    cpu, gpu = pins("constraints-cpu.txt"), pins("constraints-gpu.txt")
    for requirement in requirements(metadata):
        name = canonicalize_name(requirement.name)
        if name != "transformer-engine":
            assert name in cpu, f"constraints-cpu.txt does not pin {name}"
            assert requirement.specifier.contains(cpu[name]), f"{requirement} refuses {cpu[name]}"
    # the container brings its own torch and what is built against it
    assert {"torch", "triton"} <= set(cpu) and not {"torch", "triton"} & set(gpu)
    assert {n: v for n, v in cpu.items() if n in gpu} == gpu


def test_no_conftest_or_package_file_shadows_megatron() -> None:
    assert not (ROOT / "conftest.py").exists()
    # the stub hosts are megatron in processes of their own
    assert [p for p in (ROOT / "tests").rglob("__init__.py") if (ROOT / "tests/support/hosts") not in p.parents] == []
    assert not {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()} & {"megatron", "sglang", "triton_kernels"}


def refused(command: list[str], **environment: str) -> str:
    """The one sentence with which a launch script ends."""
    run = subprocess.run(["bash", *command], env={**os.environ, **environment}, capture_output=True, text=True)
    assert run.returncode == 1
    (sentence,) = run.stderr.splitlines()
    return sentence


def test_quickstart_refuses_wrong_arguments_in_one_sentence() -> None:
    quickstart = str(ROOT / "launch/quickstart.sh")
    known = "--preset NAME, --set ASSIGNMENT, --single, --moe, --steps N"
    assert f"unknown argument '--step'; known: {known}" in refused([quickstart, "--step", "3"])
    assert "--steps takes a whole number, got 'many'" in refused([quickstart, "--moe", "--steps", "many"])
    assert "--seed takes a whole number, got ''" in refused([quickstart, "--seed"])
    assert "--out takes a directory" in refused([quickstart, "--out"])


def test_quickstart_never_replaces_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    command = [str(ROOT / "launch/quickstart.sh"), "--out", str(tmp_path)]
    assert "is not empty and holds no earlier run" in refused(command)


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_launch_scripts_name_what_is_wrong_with_python(script: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    without_venv = tmp_path / "python"
    without_venv.write_text('#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\n')
    without_venv.chmod(0o755)
    command = [str(tmp_path / "launch" / script)]
    assert "PYTHON=/bin/false is not a working Python 3.11 or newer" in refused(command, PYTHON="/bin/false")
    assert "cannot make virtual environments; install its venv" in refused(command, PYTHON=str(without_venv))


@pytest.mark.full
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_typed_loop_passes_and_a_wrong_type_does_not(checker: str, wheel: Path, tmp_path: Path) -> None:
    program = Path(sys.executable).with_name(checker)
    if checker != "mypy":  # pyright as a wheel, which downloads nothing when it runs
        program = tools(checker, checker).with_name(checker)
    python = installed(wheel, tmp_path / "venv")
    # torch and the others are those of this environment
    (site_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    flags = ["--level", "error", "--pythonpath", str(python)]
    if checker == "mypy":
        flags = ["--strict", "--python-executable", str(python), "--cache-dir", os.devnull]
    command = [program, *flags, "loop.py"]
    text = (ROOT / "tests/support/typed_user.py").read_text()
    for loop, said in ((text, "^Success|^0 errors"), (text.replace(", Corrected)", ", str)"), "assert.type")):
        (tmp_path / "loop.py").write_text(loop)
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800).stdout
        assert re.search(said, found, re.MULTILINE), found


def files(wheel: Path) -> dict[str, bytes]:
    """Name -> content of what a wheel installs; its RECORD is made of the rest."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_source_distribution_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    rebuilt = build(tmp_path / source.name.removesuffix(".tar.gz"), "build_wheel", tmp_path)
    assert rebuilt.name == wheel.name and files(rebuilt) == files(wheel)


def workflow(name: str) -> dict[str, Any]:
    return dict(load_yaml(ROOT / ".github/workflows" / name))


def test_continuous_integration_runs_the_test_command_and_installs_on_every_python() -> None:
    jobs = workflow("ci.yml")["jobs"]
    assert {"run": "bash .ci/run"} in jobs["test"]["steps"]
    pythons_of_metadata = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["light-core"]["strategy"]["matrix"]["python"] == pythons_of_metadata
    assert (ROOT / ".ci/run").is_file()


def test_a_release_is_checked_before_the_only_job_that_may_publish_it() -> None:
    release = workflow("release.yml")
    assert release["permissions"] == {"contents": "read"}
    jobs = release["jobs"]
    assert {name for name, job in jobs.items() if "id-token" in job.get("permissions", {})} == {"publish"}
    assert jobs["publish"]["needs"] == "build"
    assert {"run": "twine check --strict dist/*"} in jobs["build"]["steps"]
    assert "secrets." not in (ROOT / ".github/workflows/release.yml").read_text()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_what_is_published_passes_twine(checkout: Path, tmp_path: Path) -> None:
    python = tools("publishing", "build", "setuptools>=77", "twine")
    for command in (["build", "--no-isolation", "--outdir", tmp_path, checkout], ["twine", "check", "--strict"]):
        command += sorted(tmp_path.iterdir()) if command[0] == "twine" else []
        done = subprocess.run([python, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout[-4000:]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("host", HOST_PINS)
def test_pip_replaces_nothing_that_a_host_holds(host: str, wheel: Path, tmp_path: Path) -> None:
    """pip is asked what it would install beside the releases that the host holds, with every extra but te and dev."""
    venv.create(tmp_path / "venv", symlinks=True)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    releases = {"torch": "2.8.0a0+5228986c39.nv25.6", "triton": "3.3.1", "numpy": "1.26.4"}
    releases |= {name: held(pin) for name, pin in HOST_PINS[host].items() if name != "python"}
    releases = {"megatron-core": "0.16.0rc0"} | releases
    assert set(releases) == BROUGHT_BY_HOSTS | {"numpy"}
    for name, release in releases.items():
        folder = site_packages / f"{name.replace('-', '_')}-{release}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    would = subprocess.run(
        [sys.executable, "-m", "pip", "--python", tmp_path / "venv/bin/python", "--disable-pip-version-check",
         "install", "--quiet", "--dry-run", "--report", "-", f"{wheel}[train,sglang,report,math]"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert would.returncode == 0, would.stderr[-4000:]
    names = {package["metadata"]["name"].lower() for package in json.loads(would.stdout)["install"]}
    assert {"megatron-rc", "pyarrow"} <= names and not names & set(releases)
