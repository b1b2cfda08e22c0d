#!/usr/bin/env bash
# The collapse lab: which gaps between sampler and trainer harm a run, what saves it, and what only seems to; on CPU.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

stages=(mechanism clip recovery presets rates controls schedules centering precision papers routes turns long)

usage() {
    cat <<TEXT
usage: bash launch/collapse_lab.sh [--quick] [--stage LIST] [--seeds LIST] [--plan] [--left] [--budget-minutes N] [--out DIR]
                                   [--docs] [--task FILE.jsonl --model DIR] [--reward MODULE:FUNCTION] [--set KEY=VALUE]

Makes .venv when it is missing, installs, then runs the stages of launch/recipes/collapse one after the other, two runs at a
time on one core each. All stages take hours, which --plan prints; the first lines of each YAML say what it asks. Stopped
or crashed, the same command goes on where it was. Each DIR/STAGE has table.md and endpoints.csv; no file of the repository
that is committed changes, unless --docs asks for it.
  --docs              then write the verdict: put the rows of all finished runs of these stages in DIR into
                      benchmarks/collapse/runs.csv, where they replace the rows of the same runs, and write docs/collapse.md.
                      Refused with --quick, --task and --set, whose runs are not those of the plan
  --quick             three runs of one seed: exact sampler; rollouts 16 updates old; those with seq-tis
  --stage LIST        some stages, such as mechanism,presets (default: all):
                      ${stages[*]}
  --seeds LIST        such as 1,2,3 (default: those of each YAML)
  --plan              print the runs that have no committed row yet, their hours and what they can decide; run nothing
  --left              only the runs of the plan that have no committed row yet
  --budget-minutes N  start no run that would end later, and say what is left
  --out DIR           where the runs go (default: runs/collapse, with --task runs/collapse-FILE)
  --task FILE.jsonl   prompts and answers of your own (docs/tasks.md) in place of the arithmetic; needs --model. Responses have
                      at most $(longest_response) tokens, as those of the arithmetic: change that by --set
  --model DIR         checkpoint with a tokenizer that every run of --task starts from, without a warm-up
  --reward NAME       MODULE:FUNCTION that scores the answers of --task; MODULE.py may lie beside FILE.jsonl
                      (default: megatron_rc.tasks.math_answer:math_answer)
  --set KEY=VALUE     another field of all runs, such as rollout.max_new_tokens=256, without spaces; may be repeated
  --help              this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

# Prints the most tokens of a response: the last one of --set, or that of all stages that --task runs.
longest_response() {
    local assignment tokens
    tokens="$(sed -n 's/.*max_new_tokens: *\([0-9]*\).*/\1/p' "$ROOT/launch/recipes/collapse/base.yaml")"
    for assignment in ${set:-}; do
        [[ "$assignment" != rollout.max_new_tokens=* ]] || tokens="${assignment#*=}"
    done
    echo "$tokens"
}

# Sets $chosen to the stages to run, and dies for one that there is not.
choose_stages() {
    local name all=("${stages[@]}")
    [[ ! "$quick" ]] || all=(quick)
    # the other stages bring tasks or models of their own
    [[ ! "$task" || "$quick" ]] || all=(mechanism presets rates controls schedules precision)
    chosen=("${all[@]}")
    [[ -n "$stage" ]] || return 0
    read -ra chosen <<<"${stage//,/ }"
    for name in "${chosen[@]}"; do
        [[ " ${all[*]} " == *" $name "* ]] || die "there is no stage '$name' here; known: ${all[*]}"
    done
}

# Adds what --task and --model change to $options.
choose_task() {
    [[ -n "$task$model" ]] || return 0
    [[ -n "$task" && -n "$model" ]] || die "--task and --model need each other: a file has no tokenizer"
    [[ -f "$task" ]] || die "--task: there is no file $task"
    local path
    path="$(realpath -- "$task")"
    options+=(--set "task={kind: jsonl, options: {path: '${path//\'/\'\'}', reward: '$reward'}}")
    options+=(--set "model={hf_path: '${model//\'/\'\'}'}" --set warmup.steps=0)
}

# Sets $recipes to those of $chosen; with --left, to those with only the runs that have no committed row.
choose_recipes() {
    local name folder="$ROOT/launch/recipes/collapse"
    if [[ "$left" ]]; then
        folder="$out/left"
        "$VENV/bin/python" "$ROOT/benchmarks/collapse/verdict.py" --left "$folder" >/dev/null
    fi
    recipes=()
    for name in "${chosen[@]}"; do
        [[ ! -f "$folder/$name.yaml" ]] || recipes+=("$folder/$name.yaml")
    done
}

# Reads the rows of the stages that have any into benchmarks/collapse/runs.csv, and writes docs/collapse.md.
write_verdict() {
    local name folders=()
    for name in "${chosen[@]}"; do
        [[ ! -f "$out/$name/table.md" ]] || folders+=("$out/$name")
    done
    ((${#folders[@]})) || die "no run is finished, so that there is nothing to judge"
    "$VENV/bin/python" "$ROOT/benchmarks/collapse/verdict.py" --read "${folders[@]}" --docs
}

quick='' docs='' plan='' left='' stage='' seeds='' budget_minutes='' task='' model='' reward='' set='' out='' options=()
take_options "--quick, --docs, --plan, --left, --stage LIST, --seeds LIST, --budget-minutes N, --task FILE, --model DIR, --reward NAME, --set ASSIGNMENT, --out DIR" "$@"
[[ ! "$docs" || ! "$quick$task$set" ]] || die "--docs writes the verdict of the plan: leave out --quick, --task and --set"
[[ ! "$left" || ! "$quick$task$set$seeds" ]] || die "--left runs what the plan lacks: leave out --quick, --task, --set and --seeds"
reward="${reward:-megatron_rc.tasks.math_answer:math_answer}"
choose_stages
choose_task
name="$(basename -- "${task%.jsonl}")"
out="${out:-$ROOT/runs/collapse${name:+-$name}}"
for assignment in $set; do options+=(--set "$assignment"); done
options+=(${seeds:+--seeds "$seeds"} ${budget_minutes:+--budget-minutes "$budget_minutes"})

if [[ "$task" ]]; then
    say "responses have at most $(longest_response) tokens (rollout.max_new_tokens); --set rollout.max_new_tokens=N changes that"
fi
if [[ "$docs$left$plan" ]]; then
    # the statistics of the verdict need what the tests need
    prepare test dev
else
    prepare collapse train,report
fi
if [[ "$plan" ]]; then
    exec "$VENV/bin/python" "$ROOT/benchmarks/collapse/verdict.py" --plan
fi
choose_recipes
((${#recipes[@]})) || { say "every run of ${chosen[*]} has a committed row" && exit 0; }
folder="$out"
((${#recipes[@]} > 1)) || folder="$out/$(basename "${recipes[0]}" .yaml)"
started=$SECONDS status=0
workers=$(($(cores) < 2 ? 1 : 2))
say "running $(basename -as .yaml "${recipes[@]}" | xargs) into $out, $workers at a time"
CUDA_VISIBLE_DEVICES='' "$VENV/bin/python" -m megatron_rc grid "${recipes[@]}" \
    --workers "$workers" --output "$folder" "${options[@]}" || status=$?
[[ ! "$docs" ]] || write_verdict
((status == 0)) || die "some runs failed, see the lines above; the same command tries them again"
[[ "$docs$quick$task$set" ]] || say "no committed file has changed; the same command with --docs writes the verdict"
say "done in $((SECONDS - started)) s"
next_commands "$out"
