"""train_rl.py of a Megatron-LM tree, run as its own script on CPU with a tiny model, in an environment of its own."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hosts.megatron_lm import sources

ON_CPU = Path(__file__).parent / "on_cpu"
REPOSITORY = Path(__file__).parents[4]
COMMIT = "d98e8a64ddf34856e74b24714e3bedb2f5a39553"
HOW = (
    "MEGATRON_LM_DIR and MEGATRON_LM_PYTHON must name a tree and an interpreter: git clone "
    f"https://github.com/NVIDIA/Megatron-LM && git -C Megatron-LM checkout {COMMIT[:12]}; python3.12 -m venv own && "
    f"own/bin/pip install -r {(ON_CPU / 'requirements.txt').relative_to(REPOSITORY)}"
)
ENVIRONMENT = "[{agent_type: AceMathAgent, agent_args: {}, weight: 1.0}]"
TINY = shlex.split("""
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --max-position-embeddings 24
--micro-batch-size 1 --lr 1e-3 --min-lr 1e-3 --lr-decay-style constant --transformer-impl local --no-rope-fusion
--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear
--attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --no-gradient-accumulation-fusion
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-persist-layer-norm
--distributed-backend gloo --eval-iters 0
""")
"""A tiny model and its training, of any program of Megatron."""
FLAGS = TINY + shlex.split("""
--global-batch-size 8 --train-iters 3 --seed 1 --perform-rl-step --grpo-prompts-per-step 2 --grpo-group-size 4
--grpo-iterations 1 --rl-inference-logprobs-is-correction --spec packed_layer layer
""")
"""Those of train_rl.py."""
WITH_ENGINE = shlex.split("""
--calculate-per-token-loss --cuda-graph-impl none --eval-interval 1000 --log-interval 1 --bf16
--tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 2 --inference-max-seq-length 24
--inference-dynamic-batching-buffer-size-gb 0.01
""")


def environment_of(*trees: Path) -> dict[str, str]:
    """Variables of a process on CPU that imports these source trees, the stand-ins and this package."""
    path = os.pathsep.join(map(str, (ON_CPU, *trees, REPOSITORY)))
    here = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return {**os.environ, **here, "PYTHONPATH": path, "NO_VCS_VERSION": "1"}


def alone(*trees: Path, port: int) -> dict[str, str]:
    """The same for the one rank of a script that finds modules next to itself."""
    kept = {name: value for name, value in environment_of(*trees).items() if name != "PYTHONSAFEPATH"}
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**kept, **rank}


def run(folder: Path, patch: list[str]) -> tuple[dict[str, list[float]], str]:
    """Three steps of train_rl.py in bf16, patched with these options; skips where a tree or its Python is missing.

    Returns name -> value of every step, from the host's own tensorboard file, and the output.
    """
    python = os.environ.get("MEGATRON_LM_PYTHON", sys.executable if sys.version_info >= (3, 12) else "")
    if not (sources.named() and python):
        pytest.skip(HOW)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tree = sources.tree().resolve()
    (folder / "environments.yaml").write_text(ENVIRONMENT)
    environment = alone(tree, port=29871) | {"LANGRL_LOG_DIR": str(folder)}
    tokens = str(folder / "tokenizer")
    subprocess.run([python, str(ON_CPU / "tokenizer.py"), tokens], check=True, capture_output=True, timeout=300)
    before = ["-m", "megatron_rc", "patch", "--rc-host", "megatron-lm", *patch]
    files = ["--tokenizer-model", tokens, "--langrl-env-config", str(folder / "environments.yaml")]
    files += ["--tensorboard-dir", str(folder / "tensorboard")]
    command = [python, "-W", "ignore", *before, str(tree / "train_rl.py"), *FLAGS, *WITH_ENGINE, *files]
    with (folder / "output").open("w") as output:
        done = subprocess.run(command, env=environment, cwd=folder, stdout=output, stderr=output, timeout=600)
    text = (folder / "output").read_text()
    assert done.returncode == 0, text[-4000:]
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [e.value for e in events.Scalars(name)] for name in events.Tags()["scalars"]}, text
