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
  --steps N  rollout steps of reinforcement learning (default: train.steps of launch/recipes/quickstart.yaml)
  --seed N   random seed (default: 1)
  --out DIR  where the run goes (default: runs/quickstart-seed1, runs/quickstart-moe-seed1, ... in the repository)
  --help     this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

name=quickstart seed=1 steps='' out=''
while (($#)); do
    case "$1" in
        --moe) name=quickstart_moe ;;
        --steps | --seed)
            [[ "${2:-}" =~ ^[0-9]+$ ]] || die "$1 takes a whole number, got '${2:-}'"
            [[ "$1" == --seed ]] && seed="$2" || steps="$2"
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
        *) die "unknown argument '$1'; known: --moe, --steps N, --seed N, --out DIR, --help" ;;
    esac
    shift
done
out="${out:-$ROOT/runs/${name//_/-}-seed$seed}"
# --fresh deletes what an earlier run left there, and must not delete anything else
if [[ -e "$out" && ! -f "$out/metrics.jsonl" && -n "$(ls -A -- "$out")" ]]; then
    die "$out is not empty and holds no earlier run; --out takes a new folder, or that of a run to replace"
fi

prepare quickstart train,report

arguments=(--fresh --set "train.seed=$seed" --set "output='${out//\'/\'\'}'")
[[ -z "$steps" ]] || arguments+=(--set "train.steps=$steps")
say "training launch/recipes/$name.yaml on 2 processes, seed $seed, into $out"
started=$SECONDS
"$VENV/bin/python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    -m megatron_rc train "$ROOT/launch/recipes/$name.yaml" "${arguments[@]}" ||
    die "the run failed; what stopped it is said above the launcher's own traceback"
[[ -f "$out/report.html" ]] || die "the run ended without $out/report.html"
say "trained in $((SECONDS - started)) s; open $out/report.html in a browser"
