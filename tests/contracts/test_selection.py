"""A run collects every test of its kind, though it imports only the files that can hold one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def collected(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.full
def test_the_interpreted_tests_are_those_of_every_file_imported() -> None:
    files = sorted(file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("test_*.py"))
    assert len(files) > 100
    # a file that is named is imported, whatever it says
    quick, whole = (collected("--full", *paths, TRITON_INTERPRET="1") for paths in ([], files))
    ids = [sorted(line for line in run.stdout.splitlines() if "::" in line) for run in (quick, whole)]
    assert ids[0] == ids[1] and len(ids[0]) > 300, quick.stderr + whole.stderr


@pytest.mark.full
def test_a_file_whose_interpreted_tests_are_marked_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "marks.py").write_text("import pytest\n\nkernels = getattr(pytest.mark, 'interpreter')\n")
    (tmp_path / "test_hidden.py").write_text("import marks\n\npytestmark = marks.kernels\n\ndef test(): pass\n")
    path = f"{tmp_path}:{ROOT}/tests/support:{ROOT}"
    run = collected("-p", "suite", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, tmp_path, PYTHONPATH=path)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_hidden.py holds interpreted tests and must say mark.interpreter or mark.kernel" in run.stderr
