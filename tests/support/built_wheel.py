"""The wheel of this checkout, and environments that hold it."""

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
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
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
