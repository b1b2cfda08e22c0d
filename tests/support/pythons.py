"""Environments for tools that tests need, cached beside the packages of .venv."""

import fcntl
import subprocess
import sys
from pathlib import Path

from constraints import ROOT

FOLDER = ROOT / ".venv"


def tools(name: str, *packages: str) -> Path:
    """The python of an environment with these packages; one process at a time changes it."""
    python = FOLDER / name / "bin/python"
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", FOLDER / name], check=True, capture_output=True)
        command = [python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr[-4000:])
    return python
