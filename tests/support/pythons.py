"""Environments of other Python releases, cached beside the packages of .venv."""

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from constraints import ROOT, pins

FOLDER = ROOT / ".venv"
CPU_INDEX = os.environ.get("MEGATRON_RC_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


def interpreter(release: str) -> Path | None:
    """A Python of this minor release that can make environments: the one on PATH, or one that pyenv installed."""
    on_path = shutil.which(f"python{release}")
    of_pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{release}.*/bin/python")
    probe = f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != ({release.replace('.', ', ')}))"
    for candidate in [*([Path(on_path)] if on_path else []), *sorted(of_pyenv)]:
        if subprocess.run([candidate, "-c", probe], capture_output=True).returncode == 0:
            return candidate
    return None


def light(interpreter: Path, release: str, wheel: Path) -> Path:
    """The python of an environment with the wheel and what it requires."""
    with _environment(interpreter, f"python-{release}-light") as python:
        _install_wheel(python, wheel, "", pins("constraints-cpu.txt"))
    return python


def complete(interpreter: Path, release: str, wheel: Path, core: str) -> Path:
    """The python of an environment with the wheel, the versions of constraints-cpu.txt, and this megatron-core."""
    versions = pins("constraints-cpu.txt") | {"megatron-core": core}
    torch, triton = versions.pop("torch"), versions.pop("triton")
    with _environment(interpreter, f"python-{release}") as python:
        if not _says(python, "torch").startswith(torch):
            try:
                _pip(python, "--retries", "1", "--no-deps", "--index-url", CPU_INDEX, f"torch=={torch}")
            except RuntimeError:
                # PyPI has the build for CUDA, which is not imported without some gigabytes of libraries
                _pip(python, f"torch=={torch}")
        _install_wheel(python, wheel, "[dev]", versions)
        if _says(python, "triton") != triton:
            # the build for CUDA asks for another one
            _pip(python, "--no-deps", f"triton=={triton}")
    return python


def tools(name: str, *packages: str) -> Path:
    """The python of an environment of this release with these packages."""
    with _environment(Path(sys.executable), name) as python:
        _pip(python, *packages)
    return python


@contextmanager
def _environment(interpreter: Path, name: str) -> Iterator[Path]:
    """The python of a cached environment, which this process alone may change within the block."""
    folder = FOLDER / name
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bin/python").exists():
            subprocess.run([interpreter, "-m", "venv", folder], check=True, capture_output=True)
        yield folder / "bin/python"


def _install_wheel(python: Path, wheel: Path, extras: str, versions: dict[str, str]) -> None:
    constraints = python.parent.parent / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    _pip(python, "-c", str(constraints), f"{wheel}{extras}")
    # a wheel of the same version may have been installed before
    _pip(python, "--no-deps", "--force-reinstall", str(wheel))


def _pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])


def _says(python: Path, package: str) -> str:
    """The version of an installed package; empty where it is missing."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()
