"""The real verl: a source tree that VERL_DIR names, or an installed one, in processes of their own."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STUB = HERE / "stub"
PLUGIN = {"VERL_USE_EXTERNAL_MODULES": "megatron_rc.integrations.verl.plugin"}


def missing() -> list[str]:
    """What verl's trainer classes cannot be imported without, and is not here."""
    needed = ["transfer_queue", "tensordict", "ray", "hydra"] + ([] if os.environ.get("VERL_DIR") else ["verl"])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def environment(**variables: str) -> dict[str, str]:
    """Variables of a process that imports the real verl, with the plugin by name."""
    path = [str(HERE), str(HERE.parents[1]), os.environ.get("VERL_DIR", ""), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name != "MEGATRON_RC_CONFIG"}
    return {**kept, **PLUGIN, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


@cache
def _answers() -> dict[str, Any]:
    """Answers of every function of jobs.py and worker_jobs.py, in one process: verl takes long to import."""
    code = "import json, jobs, worker_jobs; print('ANSWER', json.dumps({**jobs.answers(), **worker_jobs.answers()}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])


def job(name: str) -> Any:
    """The answer of a function of jobs.py or worker_jobs.py, which runs next to the real verl."""
    return _answers()[name]
