#!/usr/bin/env bash
# Train a small Qwen3 on arithmetic by RL on two CPU processes, and write a report of the run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/quickstart.sh [--moe] [--steps N] [--seed N] [--out DIR]

Makes .venv when it is missing, installs, then trains Qwen3 with Megatron-Core on 2 processes (tensor parallel) on
rollouts of another engine, and writes DIR/report.html. A run already in DIR is replaced.
  --moe      Qwen3-MoE with expert parallelism instead of the dense model
  --steps N  rollout steps of reinforcement learning (default: train.steps of launch/recipes/quickstart_single.yaml)
  --seed N   random seed (default: 1)
  --out DIR  where the run goes (default: runs/quickstart-seed1, runs/quickstart-moe-seed1, ... in the repository)
  --help     this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

moe='' seed=1 steps='' out=''
take_options "--moe, --steps N, --seed N, --out DIR" "$@"
out="${out:-$ROOT/runs/quickstart${moe:+-moe}-seed$seed}"
check_out
[[ ! "$moe" ]] || kind=moe
prepare quickstart train,report
train_recipe "quickstart_${kind:-single}"
