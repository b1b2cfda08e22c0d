"""What is published: a source distribution and a wheel of the same files, and what pip makes of them beside a host."""

import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from built_wheel import BROUGHT_BY_HOSTS, HOST_PINS, ROOT, build, held, tools

from megatron_rc.schema import load_yaml


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
