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

sglang='' seeds='' steps='' only='' out=''
take_options "--sglang, --seeds LIST, --steps N, --only CHOICES, --out DIR" "$@"
out="${out:-$ROOT/runs/moe-expert-shift${sglang:+-sglang}}"
grid="$ROOT/launch/recipes/moe_expert_shift.yaml"
options=(--output "$out" ${seeds:+--seeds "$seeds"})
[[ -z "$steps" ]] || options+=(--set "train.steps=$steps" --set "train.eval_interval=$steps")
precisions=fp32,bf16,int8
[[ -z "$sglang" ]] || options+=(--only correction=none)
for choices in $only; do
    case "$choices" in
        precision=?*) precisions="${choices#*=}" ;;
        *) options+=(--only "$choices") ;;
    esac
done

prepare moe-grid train,report,sglang
child_environment
cells() {
    "$VENV/bin/python" -m megatron_rc grid "$grid" "${options[@]}" --only "precision=$1" "${@:2}" >/dev/null ||
        die "see the cells named above; the others are in $out/table.md"
}

started=$SECONDS
if [[ -z "$sglang" ]]; then
    cells "$precisions" &
    trap 'kill $! 2>/dev/null || true' EXIT
    cells "$precisions"
    wait $!
    trap - EXIT
else
    bash "$ROOT/launch/sglang_cpu/install.sh"
    served="$("$VENV/bin/python" -m megatron_rc grid "$grid" "${options[@]}" --warm | head -n 1)"
    serve() { bash "$ROOT/launch/sglang_cpu/serve.sh" "$@" --log "$out/sglang-$precision.log"; }
    for precision in ${precisions//,/ }; do
        dtype=bfloat16
        [[ "$precision" != fp32 ]] || dtype=float32
        url="$(serve "$served" --port 0 --background --stop-with $$ --dtype "$dtype" | grep -o 'http://[0-9.:]*')"
        trap 'serve stop' EXIT
        cells "$precision" --set rollout.engine=sglang --set rollout.sglang.weight_sync=tensor \
            --set "rollout.sglang.urls=['$url']"
        serve stop
        trap - EXIT
    done
fi
"$VENV/bin/python" -m megatron_rc grid "$grid" "${options[@]}" --table
say "done in $((SECONDS - started)) s"
next_commands "$out"
