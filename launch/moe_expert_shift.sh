#!/usr/bin/env bash
# Expert shift of a small Qwen3-MoE over precision of the rollouts, replay of routes, correction and mini-batches, on CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/moe_expert_shift.sh [--sglang] [--seeds LIST] [--steps N] [--only AXIS=CHOICE,...] [--out DIR]

Makes .venv when it is missing, runs every cell of launch/recipes/moe_expert_shift.yaml that is not finished, two at a time, and
writes DIR/table.md, DIR/runs.csv and DIR/grid.png. Stopped or crashed, the same command goes on where it was.
  --sglang        rollouts of a real SGLang server, one of each precision after the other, instead of the embedded engine;
                  without corrections unless --only names some
  --seeds LIST    such as 1,2,3 (default: those of the YAML)
  --steps N       rollout steps of a cell (default: train.steps of the YAML)
  --only A=C,...  these choices of an axis alone: precision, replay, correction or mini_batches; may be repeated
  --out DIR       where the grid goes (default: runs/moe-expert-shift, runs/moe-expert-shift-sglang)
  --help          this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

grid="$ROOT/launch/recipes/moe_expert_shift.yaml"
sglang='' out='' precisions='fp32,bf16,int8' corrections='' options=()
while (($#)); do
    case "$1" in
        --sglang) sglang=-sglang ;;
        --seeds)
            [[ "${2:-}" =~ ^[0-9]+(,[0-9]+)*$ ]] || die "--seeds takes whole numbers with commas between, got '${2:-}'"
            options+=(--seeds "$2")
            shift
            ;;
        --steps)
            [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || die "--steps takes a whole number above 0, got '${2:-}'"
            options+=(--set "train.steps=$2" --set "train.eval_interval=$2")
            shift
            ;;
        --only)
            case "${2:-}" in
                precision=?*) precisions="${2#*=}" ;;
                correction=?*) corrections="${2#*=}" ;;
                ?*=?*) options+=(--only "$2") ;;
                *) die "--only takes AXIS=CHOICE,..., got '${2:-}'" ;;
            esac
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
        *) die "unknown argument '$1'; known: --sglang, --seeds LIST, --steps N, --only AXIS=CHOICE, --out DIR, --help" ;;
    esac
    shift
done
out="${out:-$ROOT/runs/moe-expert-shift$sglang}"
[[ -z "$sglang" ]] || corrections="${corrections:-none}"
[[ -z "$corrections" ]] || options+=(--only "correction=$corrections")
options+=(--output "$out")

prepare moe-grid train,report,sglang
child_environment
cells() { "$VENV/bin/python" -m megatron_rc grid "$grid" "${options[@]}" "$@"; }

started=$SECONDS
if [[ -z "$sglang" ]]; then
    cells --only "precision=$precisions" >/dev/null &
    trap 'kill $! 2>/dev/null || true' EXIT
    cells --only "precision=$precisions" >/dev/null || die "see the cells named above; the others are in $out/table.md"
    wait $! || die "see the cells named above; the others are in $out/table.md"
    trap - EXIT
else
    bash "$ROOT/launch/sglang_cpu/install.sh"
    served="$(cells --warm | head -n 1)"
    serve=(bash "$ROOT/launch/sglang_cpu/serve.sh")
    IFS=, read -ra names <<<"$precisions"
    for precision in "${names[@]}"; do
        port="$(free_port "$VENV/bin/python")"
        dtype=bfloat16
        [[ "$precision" != fp32 ]] || dtype=float32
        "${serve[@]}" "$served" --port "$port" --log "$out/sglang-$precision.log" --background --stop-with $$ --dtype "$dtype"
        trap '"${serve[@]}" stop --port "$port" --log "$out/sglang-$precision.log"' EXIT
        cells --only "precision=$precision" --set rollout.engine=sglang --set rollout.sglang.weight_sync=tensor \
            --set "rollout.sglang.urls=['http://127.0.0.1:$port']" >/dev/null ||
            die "see the cells named above; the others are in $out/table.md"
        "${serve[@]}" stop --port "$port" --log "$out/sglang-$precision.log"
        trap - EXIT
    done
fi
cells --table
say "done in $((SECONDS - started)) s"
