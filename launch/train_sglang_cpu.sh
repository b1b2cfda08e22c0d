#!/usr/bin/env bash
# Train a small Qwen3 on arithmetic by RL with rollouts of a real SGLang server, all on this machine's CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/train_sglang_cpu.sh [--moe] [--steps N] [--seed N] [--sync WAY] [--out DIR]

Makes .venv and .venv-sglang when they are missing, warms a Qwen3 up on demonstrations, serves it with SGLang on
127.0.0.1, and trains it with Megatron-Core on 2 processes on that server's rollouts. Writes DIR/train/report.html.
  --moe       Qwen3-MoE with expert parallelism; the routes of every token arrive with the rollouts
  --steps N   rollout steps (default: train.steps of launch/recipes/sglang_cpu.yaml)
  --seed N    random seed (default: 1)
  --sync WAY  how weights reach the server: disk, tensor or distributed (default: tensor)
  --out DIR   where the run goes (default: runs/sglang-seed1, runs/sglang-moe-seed1, ... in the repository)
  --help      this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

moe='' seed=1 steps='' sync=tensor out=''
while (($#)); do
    case "$1" in
        --moe) moe=-moe ;;
        --steps | --seed)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || die "$1 takes a whole number, got '${2:-}'"
            [[ "$1" == --seed ]] && seed="$2" || steps="$2"
            shift
            ;;
        --sync)
            [[ "${2:-}" =~ ^(disk|tensor|distributed)$ ]] || die "--sync takes disk, tensor or distributed, got '${2:-}'"
            sync="$2"
            shift
            ;;
        --out)
            [[ -n "${2:-}" ]] || die "--out takes a directory"
            out="$(realpath -m -- "$2")"
            shift
            ;;
        --help | -h)
            usage
            exit 0
            ;;
        *) die "unknown argument '$1'; known: --moe, --steps N, --seed N, --sync WAY, --out DIR, --help" ;;
    esac
    shift
done
out="${out:-$ROOT/runs/sglang$moe-seed$seed}"
if [[ -e "$out" && ! -f "$out/warm/metrics.jsonl" && -n "$(ls -A -- "$out")" ]]; then
    die "$out is not empty and holds no earlier run; --out takes a new folder, or that of a run to replace"
fi

prepare train-sglang train,report,sglang
bash "$ROOT/launch/sglang_cpu/install.sh"
mkdir -p "$out"

job() {
    "$VENV/bin/python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
        -m megatron_rc train "$ROOT/launch/recipes/sglang_cpu${moe/-/_}.yaml" --fresh --set "train.seed=$seed" "$@" ||
        die "the run failed; what stopped it is said above the launcher's own traceback"
}

started=$SECONDS
say "warming up, seed $seed, into $out/warm"
job --set "output='${out//\'/\'\'}/warm'" --set rollout.engine=hf --set rollout.sglang.capture_routes=false \
    --set train.steps=0

port="$(free_port "$VENV/bin/python")"
bash "$ROOT/launch/sglang_cpu/serve.sh" "$out/warm/hf" --port "$port" --log "$out/sglang.log" --background --stop-with $$
trap 'bash "$ROOT/launch/sglang_cpu/serve.sh" stop --port "$port" --log "$out/sglang.log"' EXIT

"$VENV/bin/megatron-rc" doctor --sglang "http://127.0.0.1:$port" --config "$ROOT/launch/recipes/sglang_cpu${moe/-/_}.yaml" \
    --hf-path "$out/warm/hf" || die "the server and the job do not go together; each error above says what to change"

arguments=(--set "output='${out//\'/\'\'}/train'" --set "model.hf_path='${out//\'/\'\'}/warm/hf'" --set warmup.steps=0)
arguments+=(--set "rollout.sglang.urls=['http://127.0.0.1:$port']" --set "rollout.sglang.weight_sync=$sync")
[[ -z "$steps" ]] || arguments+=(--set "train.steps=$steps")
say "training on the server's rollouts, into $out/train"
job "${arguments[@]}"
say "done in $((SECONDS - started)) s; open $out/train/report.html in a browser"
