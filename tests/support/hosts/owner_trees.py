"""Source trees of hosts, each with a copy to which its patch of docs/hosts/patches/ is applied."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts.megatron_lm.own_program import COMMIT, FLAGS, environment_of

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
PATCHES = ROOT / "docs/hosts/patches"
HOSTS = {
    "verl": ("VERL_DIR", "1dda039b9c6311889a9c9a26040677e1254814f9"),
    "slime": ("SLIME_DIR", "624b824a898ab0ec1fcb4d373004c7f3852bf515"),
    "megatron_lm": ("MEGATRON_LM_DIR", COMMIT),
}


@cache
def trees(host: str, folder: Path) -> tuple[Path, Path]:
    """The host's source tree, and a copy with the patch applied, whose changed files must compile."""
    if not os.environ.get(HOSTS[host][0]):
        pytest.skip(f"{HOSTS[host][0]} names no source tree of {host}")
    own, copy = Path(os.environ[HOSTS[host][0]]).resolve(), folder / host
    patch = PATCHES / f"{host}.patch"
    shutil.copytree(own, copy, ignore=shutil.ignore_patterns(".git", "docs", "tests", "docker"), symlinks=True)
    subprocess.run(["git", "init", "-q", str(copy)], check=True)  # git would look for a repository above
    for check in (["--check"], []):
        subprocess.run(["git", "apply", "--unidiff-zero", *check, str(patch)], cwd=copy, check=True)
    (copy / "PATCHED").touch()
    for name in re.findall(r"^\+\+\+ b/(.*)", patch.read_text(), re.M):
        compile((copy / name).read_text(), name, "exec")
    return own, copy


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    environment = {**environment, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "ignore", *command]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


@cache
def outcomes(host: str, folder: Path) -> list[dict[str, Any]]:
    """What the functions return in the host's tree and in the copy with the patch."""
    path, found = os.pathsep.join([str(HERE.parent), str(ROOT), os.environ.get("PYTHONPATH", "")]), []
    for tree in trees(host, folder):
        command = [str(HERE / "owner_patches.py"), host, str(tree), str(folder / "out")]
        run(command, folder, {**os.environ, "PYTHONPATH": path})
        found.append(torch.load(folder / "out"))
    return found


def steps(cases: tuple[dict[str, Any], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Two steps of Megatron-LM on CPU, in its tree and in the copy, without the last log-prob of each answer."""
    found = []
    for tree, named in zip(trees("megatron_lm", folder), cases, strict=True):
        jobs = {name: {"length": 6, "missing": 1, "args": args} for name, args in named.items()}
        variables = {"RL_JOB_CASES": json.dumps(jobs), "RL_JOB_OUT": str(folder / "steps")}
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
        command = [*torchrun, str(HERE / "megatron_lm/rl_job.py"), *FLAGS, "--train-iters", "2"]
        run(command, folder, environment_of(tree) | variables)
        found.append(json.loads((folder / "steps").read_text()))
    return found


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def parses(code: str) -> bool:
    """Alone, or as parameters, arguments or entries of a dictionary."""
    for before, after in (("", ""), ("def f(", "): pass"), ("f(", ")"), ("{", "}")):
        try:
            ast.parse(f"{before}{code if before else textwrap.dedent(code)}{after}")
        except SyntaxError:
            continue
        return True
    return False
