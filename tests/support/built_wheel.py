"""The wheel of this checkout, environments that hold it or tools, and the versions that files and hosts pin."""

import fcntl
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / ".venv"
BUILD_INPUTS = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "megatron_rc", "triton_kernels")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, with one kernel file more, so that building leaves nothing in this tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in BUILD_INPUTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    (copy / "triton_kernels/probe.py").write_text("HERE = __file__\n")
    return copy


def build(checkout: Path, hook: str, folder: Path) -> Path:
    """The wheel that pip would install; ``hook`` is build_wheel or build_editable."""
    code = f"import setuptools.build_meta as backend; backend.{hook}({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=checkout, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def requirements(metadata: Message) -> list[Requirement]:
    """Every Requires-Dist line, those of extras too."""
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]


def installed(wheel: Path, folder: Path) -> Path:
    """The python of a bare environment with nothing but ``wheel`` in it."""
    venv.create(folder, symlinks=True)
    (site_packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    return folder / "bin/python"


def with_requirements(python: Path, needed: list[Requirement]) -> None:
    """Put links to the packages that ``needed`` names, and to what those need in turn, beside a wheel; no network."""
    (site_packages,) = python.parent.parent.glob("lib/python*/site-packages")
    waiting, seen = [r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})], set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name not in seen:
            seen.add(name)
            found = distribution(name)
            _link(found, site_packages)
            required = map(Requirement, found.requires or ())
            waiting += [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]


def _link(found: Distribution, site_packages: Path) -> None:
    tops = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    assert tops, f"{found.name} lists no files"
    for top in tops:
        link = site_packages / top
        if not link.exists():
            link.symlink_to(Path(str(found.locate_file(top))).resolve())


def tools(name: str, *packages: str) -> Path:
    """The python of an environment with these packages, kept in .venv; one process at a time changes it."""
    python = TOOLS / name / "bin/python"
    with (TOOLS / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", TOOLS / name], check=True, capture_output=True)
        command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-4000:])
    return python


def pins(file: str) -> dict[str, str]:
    """The exact versions of a constraints or requirements file."""
    lines = [line.partition("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
    parsed = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line]
    assert all(parsed), f"{file} holds exact versions only"
    return {canonicalize_name(p[1]): p[2] for p in parsed if p}


HOST_PINS = {
    "Megatron-LM": {"megatron-core": "0.20.0", "transformers": "5.5.3"},
    "slime": {"megatron-core": "0.16.0rc0", "transformers": "5.12.1"},
    "miles": {"transformers": "5.12.1"},
    "verl": {"megatron-core": "0.18.0", "transformers": ">=5.5.3,<5.11"},
    "NeMo-RL": {"transformers": "<5.9", "python": "3.13"},
}
"""Versions that containers of hosts hold: one release, or the range from which the host takes one."""
BROUGHT_BY_HOSTS = {"torch", "triton", "transformers", "megatron-core"}
NEWEST_TRANSFORMERS = ("5.5.3", "5.8.0", "5.10.2", "5.12.1")
"""Releases from which a range of `HOST_PINS` takes its newest."""


def held(pin: str) -> str:
    """The release that a host with this pin holds."""
    return pin if pin[0].isdigit() else max(SpecifierSet(pin).filter(NEWEST_TRANSFORMERS), key=Version)
