"""Rollouts through the training process of a slime tree on CPU, in the environment of Megatron-LM's own runs."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts.megatron_lm.own_program import ON_CPU, REPOSITORY, TINY, alone
from hosts.slime import sources

JOB = Path(__file__).parent / "on_cpu/actor_job.py"
COMMIT = "624b824a898ab0ec1fcb4d373004c7f3852bf515"
HOW = (
    "SLIME_DIR, SLIME_MEGATRON_DIR and MEGATRON_LM_PYTHON must name two trees and an interpreter: git clone "
    f"https://github.com/THUDM/slime && git -C slime checkout {COMMIT[:12]}; git clone "
    "https://github.com/NVIDIA/Megatron-LM && git -C Megatron-LM checkout 1dcf0dafa884, then git apply "
    "docker/patch/latest/megatron.patch and megatron-sglang-aligned.patch of slime there; python3.12 -m venv own && "
    f"own/bin/pip install -r {(ON_CPU / 'requirements.txt').relative_to(REPOSITORY)}"
)
FLAGS = TINY + shlex.split("""
--debug-train-only --global-batch-size 4 --rollout-batch-size 1 --n-samples-per-prompt 4 --num-rollout 3
--actor-num-nodes 1 --actor-num-gpus-per-node 1 --advantage-estimator grpo --pretrained-checkpoint none
--vocab-size 30 --make-vocab-size-divisible-by 2 --tokenizer-type NullTokenizer --spec packed_layer layer_of
""")


def run(folder: Path, flags: list[str], settings: str = "") -> list[dict[str, Any]]:
    """What slime logged of the three train steps.

    Args:
        flags: of slime, besides FLAGS.
        settings: YAML for --custom-config-path; "": none.
    """
    tree, megatron = sources.folder("slime"), os.environ.get("SLIME_MEGATRON_DIR")
    python = os.environ.get("MEGATRON_LM_PYTHON", sys.executable if sys.version_info >= (3, 12) else "")
    if not (tree and megatron and python):
        pytest.skip(HOW)
    folder.mkdir()
    if settings:
        (folder / "rc.yaml").write_text(settings)
        flags = [*flags, "--custom-config-path", str(folder / "rc.yaml")]
    environment = alone(tree.resolve(), Path(megatron).resolve(), port=29873)
    command = [python, "-W", "ignore", str(JOB), str(folder / "log.json"), *FLAGS, *flags]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return [step for step in json.loads((folder / "log.json").read_text()) if "train/loss" in step]
