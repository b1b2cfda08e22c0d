"""The files of docs/hosts/losses.md, and the trees of prime-rl, SkyRL and TRL next to which they run."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPOSITORY = Path(__file__).parents[4]
PAGE = (REPOSITORY / "docs/hosts/losses.md").read_text()
PYTHON = "LOSS_HOSTS_PYTHON"
TREES = {
    "prime_rl": ("PRIME_RL_DIR", "PrimeIntellect-ai/prime-rl", "559b44772e47", "src packages/prime-rl-configs/src"),
    "skyrl": ("SKYRL_DIR", "NovaSky-AI/SkyRL", "a9564572eb8e", ". skyrl-gym"),
    "trl": ("TRL_DIR", "huggingface/trl", "f2cd57710ae3", "."),
}
"""Host -> the variable that names its source tree, repository on GitHub, commit, and what goes on PYTHONPATH."""


def text(name: str) -> str:
    """A file of the page."""
    (found,) = re.findall(rf"```python\n# {name}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def answers(host: str, folder: Path) -> dict[str, Any]:
    """What the job of a host, HOST_job.py, printed next to its tree; the file of the page lies in ``folder``."""
    variable, repository, commit, folders = TREES[host]
    root, python = os.environ.get(variable), os.environ.get(PYTHON)
    if not (root and python):
        pytest.skip(
            f"{variable} and {PYTHON} must name a tree and an interpreter: git clone https://github.com/{repository} "
            f"&& git -C {Path(repository).name} checkout {commit}; python3.12 -m venv own && own/bin/pip install -r "
            f"{(HERE / 'requirements.txt').relative_to(REPOSITORY)}"
        )
    for name in re.findall(r"```python\n# (\w+\.py)\n", PAGE):
        (folder / name).write_text(text(name))
    path = [folder, *(Path(root, each) for each in folders.split()), REPOSITORY, REPOSITORY / "tests/support"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "WANDB_MODE": "disabled"}
    command = [python, "-W", "ignore", str(HERE / f"{host}_job.py")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])
