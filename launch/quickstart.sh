#!/usr/bin/env bash
# Train a small Qwen3 on arithmetic by RL three times from one checkpoint, and write a report with one figure: what rollouts
# 16 updates old do to a run, and what a correction does about it. With --single, one run on two processes.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/quickstart.sh [--preset NAME] [--set KEY=VALUE] [--single] [--moe] [--steps N] [--seed N] [--out DIR]

Makes .venv when it is missing, installs, then trains Qwen3 with Megatron-Core three times from one checkpoint, two runs at
a time on one core each: with an exact sampler; with rollouts 16 updates old; with the same rollouts and the correction
seq-tis. Writes DIR/report.html, and prints the next commands to try. Started again, it continues what it began. With less
than 2 cores, or where the first steps predict more than 15 minutes, it makes the single run.
  --preset NAME    correction of the third run in place of seq-tis, such as token-tis; figure and report name it. The
                   other two runs are not made again. The single run, which corrects nothing, is trained with it
  --set KEY=VALUE  another field of all runs, such as train.lr=1e-4, without spaces; may be repeated (docs/settings.md)
  --single         one run on 2 processes (tensor parallel), on rollouts of a bf16 engine; a run already in DIR is replaced
  --moe            the single run of a Qwen3-MoE, with expert parallelism
  --steps N        rollout steps of reinforcement learning (default: train.steps of the recipe in launch/recipes)
  --seed N         random seed (default: 1)
  --out DIR        where the runs go (default: runs/quickstart-seed1, runs/quickstart-single-seed1, runs/quickstart-moe-seed1,
                   ... in the repository)
  --help           this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

# Prints the recipe of the three runs: with --preset a copy in $out, in which everything that names seq-tis names that one.
recipe_of_three() {
    local recipe="$ROOT/launch/recipes/quickstart.yaml"
    [[ "$preset" ]] || { echo "$recipe" && return; }
    mkdir -p -- "$out"
    # the committed runs lie relative to the recipe
    sed -e "s|seq-tis|$preset|g" -e "s|\.\./\.\./benchmarks|${ROOT//[&|\\]/\\&}/benchmarks|" "$recipe" >"$out/quickstart.yaml"
    echo "$out/quickstart.yaml"
}

# Trains the three runs; fails if the first steps predict more than 15 minutes.
compare_runs() {
    local started=$SECONDS status=0
    say "training the three runs of launch/recipes/quickstart.yaml${preset:+ with $preset}, seed $seed, into $out"
    CUDA_VISIBLE_DEVICES='' "$VENV/bin/python" -m megatron_rc grid "$(recipe_of_three)" --workers 2 --give-up-minutes 15 \
        --seeds "$seed" --output "$out" "${options[@]}" ${steps:+--set "train.steps=$steps"} || status=$?
    ((status != 3)) || return 1
    ((status == 0)) || die "a run failed; the line above says why, and the same command continues the others"
    [[ -f "$out/report.html" ]] || die "the runs ended without $out/report.html"
    say "done in $((SECONDS - started)) s; open $out/report.html in a browser"
    next_commands "$out/uncorrected/seed-$seed"
}

# Dies unless $out may hold the three runs.
check_compared_out() {
    [[ ! -e "$out" || -d "$out/warm" || -f "$out/quickstart.yaml" || -z "$(ls -A -- "$out")" ]] ||
        die "$out is not empty and holds no earlier run of this script; --out takes a new folder"
}

# Dies for a --set that the three runs themselves differ by, and for what is no name of a preset.
check_choices() {
    local assignment
    [[ "$preset" =~ ^[a-z0-9-]*$ ]] || die "--preset takes one name of docs/presets.md, got '$preset'"
    [[ ! "$single$moe" ]] || return 0
    for assignment in $set; do
        case "${assignment%%=*}" in
            correction | correction.* | rollout.lag)
                die "the runs differ by ${assignment%%=*}: --set cannot change it for all; --preset NAME changes the correction" ;;
        esac
    done
}

moe='' single='' preset='' set='' seed=1 steps='' out='' options=()
take_options "--preset NAME, --set ASSIGNMENT, --single, --moe, --steps N, --seed N, --out DIR" "$@"
check_choices
for assignment in $set; do options+=(--set "$assignment"); done
if [[ ! "$single$moe" ]] && (($(cores) < 2)); then
    say "this machine has one core, and the three runs need two: this is the single run (--single)"
    single=1
fi
if [[ "$single$moe" ]]; then
    kind="$([[ "$moe" ]] && echo moe || echo single)"
    out="${out:-$ROOT/runs/quickstart-$kind-seed$seed}"
    check_out
    prepare quickstart train,report
    train_recipe "quickstart_$kind" "${options[@]}" ${preset:+--set "correction=$preset"}
    exit
fi
out="${out:-$ROOT/runs/quickstart-seed$seed}"
check_compared_out
prepare quickstart train,report
compare_runs && exit
out="$out/single"
say "this machine is too slow for the three runs: this is the single run (--single)"
check_out
train_recipe quickstart_single "${options[@]}" ${preset:+--set "correction=$preset"}
