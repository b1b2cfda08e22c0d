#!/usr/bin/env bash
# Train a small Qwen3 on arithmetic by RL with rollouts of a real SGLang server, all on this machine's CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/train_sglang_cpu.sh [--moe] [--steps N] [--seed N] [--sync WAY] [--out DIR]

Makes .venv and .venv-sglang when they are missing, warms a Qwen3 up on demonstrations, serves it with SGLang on
127.0.0.1, and trains it with Megatron-Core on 2 processes on that server's rollouts. Writes DIR/report.html.
  --moe       Qwen3-MoE with expert parallelism; the routes of every token arrive with the rollouts
  --steps N   rollout steps (default: train.steps of launch/recipes/sglang_cpu.yaml)
  --seed N    random seed (default: 1)
  --sync WAY  how weights reach the server: a weight_sync of docs/sglang.md (default: tensor)
  --out DIR   where the run goes (default: runs/sglang-seed1, runs/sglang-moe-seed1, ... in the repository)
  --help      this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

moe='' seed=1 steps='' sync='' out=''
take_options "--moe, --steps N, --seed N, --sync WAY, --out DIR" "$@"
ways="$(PYTHONPATH="$ROOT" "$(find_python)" -c 'from megatron_rc.settings.sglang import TRANSPORTS; print(*TRANSPORTS)')"
[[ " $ways " == *" ${sync:=tensor} "* ]] || die "--sync takes one of $ways, got '$sync'"
out="${out:-$ROOT/runs/sglang${moe:+-moe}-seed$seed}"
check_out
prepare train-sglang train,report,sglang
bash "$ROOT/launch/sglang_cpu/install.sh"
export SGLANG_PYTHON="$ROOT/launch/sglang_cpu/python.sh"
train_recipe "sglang_cpu${moe:+_moe}" --server-port 0 --set "rollout.sglang.weight_sync=$sync"
