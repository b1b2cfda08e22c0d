"""A kernel of every family that is wrong in one line fails the test that is named for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wrong_kernels import ROOT, WRONG, checkout_with

# one in every run; each starts a process
FAMILIES = ["row gradient", *(pytest.param(name, marks=pytest.mark.full) for name in WRONG if name != "row gradient")]


@pytest.mark.interpreter
@pytest.mark.parametrize("family", FAMILIES)
def test_it_fails_its_test_by_an_assertion(family: str, tmp_path: Path) -> None:
    wrong = WRONG[family]
    folder = checkout_with(wrong, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", f"tests/kernels/{wrong.test}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, ran.stdout + ran.stderr
    assert "AssertionError" in ran.stdout or "E       assert" in ran.stdout, ran.stdout
    assert "1 failed" in ran.stdout
