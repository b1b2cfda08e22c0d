"""Wheels of megatron-core of other releases, which are of Python 3.12 and up and run on 3.11 once they are unpacked."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hosts.megatron_lm.own_program import alone

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("MEGATRON_CORE_WHEELS", ROOT / ".venv/megatron-training"))
WHEELS = {path.name.split("-")[1]: path for path in sorted(FOLDER.glob("megatron_core-*.whl"))}
MISSING = f"no wheel of megatron-core >= 0.17 in {FOLDER} (pip download --no-deps --python-version 3.12 megatron-core)"


@contextmanager
def unpacked_wheels() -> Iterator[dict[str, Path]]:
    """Version -> folder that goes onto sys.path; skips the test where there is no wheel."""
    if not WHEELS:
        pytest.skip(MISSING)
    with TemporaryDirectory() as folder:
        for version, wheel in WHEELS.items():
            zipfile.ZipFile(wheel).extractall(Path(folder, version))
        yield {version: Path(folder, version) for version in WHEELS}


def printed_by(program: str, folder: Path, *arguments: str) -> str:
    """What a program of tests/support prints, alone in its process group, on the megatron-core of a folder."""
    command = [sys.executable, str(ROOT / "tests/support" / program), *arguments]
    done = subprocess.run(command, env=alone(folder, port=0), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
