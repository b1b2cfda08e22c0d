"""What a user can mend is one sentence, a non-zero exit, and no lost step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import DENSE, MOE, run_job, settings_file

from megatron_rc.report.log import read_metrics

JOB: dict[str, Any] = {
    "model": {"config": DENSE},
    "task": {"options": {"levels": {"2x1": 1.0}, "held_out": 3}},
    "rollout": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
    "train": {"steps": 1},
}


def error_of(tmp_path: Path, *assignments: str, job: dict[str, Any] | None = None, processes: int = 1) -> str:
    """The one sentence a refused job prints."""
    chosen = [f"output={tmp_path / 'out'}", *assignments]
    done = run_job(
        settings_file(tmp_path, job or JOB), *(w for a in chosen for w in ("--set", a)), processes=processes
    )
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron-rc: error: ")]
    assert len(said) == 1, done.stderr[-3000:]
    assert processes > 1 or "Traceback" not in done.stderr
    return said[0].removeprefix("megatron-rc: error: ")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.learning_rate=1", "unknown field 'train.learning_rate'"),
        ("correction=tokn-tis", "unknown preset 'tokn-tis'; did you mean 'token-tis'?"),
        ("task.options.levles={2x1: 1}", "unknown field 'task.options.levles'; did you mean 'levels'?"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tmp_path: Path, assignment: str, message: str):
    assert message in error_of(tmp_path, assignment)
