"""Every trap of the confusion matrix, planted in real engines with five seeds: one rule answers, the wanted one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SEEDS = ["0", "1", "2", "3", "4"]


@pytest.mark.full
@pytest.mark.timeout(3 * 3600)
def test_every_trap_of_five_seeds_is_answered_by_its_rule_alone(tmp_path: Path) -> None:
    """One and a half hours on two cores; MEGATRON_RC_TRAPS names a folder that keeps models and dumps."""
    folder = os.environ.get("MEGATRON_RC_TRAPS", str(tmp_path))
    command = [sys.executable, "benchmarks/diagnosis/confusion.py", "--server", "--folder", folder, "--seeds", *SEEDS]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    run = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert run.returncode == 0, run.stdout
    assert len(re.findall(r"5 of 5 \|$", run.stdout, re.MULTILINE)) == 31
