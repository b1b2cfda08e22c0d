#!/usr/bin/env bash
# Check the kernels on the GPU of this machine and time them, with whatever torch and triton its python3 has; one JSON.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: bash benchmarks/gpu.sh [--stage 1|2|3] [--minutes N] [--out FOLDER] [--smoke] [options of benchmarks/kernels.py]

Runs from this checkout, on one GPU; nothing is installed and nothing is downloaded. Everything goes into one JSON,
FOLDER/gpu-<device>.json, which is written anew after every check and every row: a run that is cut short has lost nothing,
and the same command goes on. Send that file back. It ends with a table of what was reached beside the targets.
  stage 1        every kernel against fp64 (benchmarks/gpu_check.py), then rows of benchmarks/kernels.py
  stage 2        the other rows, beside every peer that can be imported, then the sweep of launch shapes
  stage 3        counters of Nsight Compute (if ncu is there), the quickstart on CUDA, rows that are still missing
  --stage N      that stage alone, for places that end a command after ten minutes; without it, all three
  --minutes N    time for each stage (9): a command that takes longer than its share of it is ended
  --out FOLDER   where the JSON goes (runs/gpu; for --smoke a temporary folder, which is deleted)
  --smoke        no GPU: toy sizes in Triton's interpreter, everything checked and nothing timed
  --help         this text
A call that does not come back in two minutes is given up: its process is ended, and the next one goes on without it.
Exit status 1: a kernel is wrong, or a row failed. What a peer, a counter or the quickstart lacks is written down, no more.
Environment: PYTHON (interpreter, python3), CUDA_VISIBLE_DEVICES (the first GPU of it is used).
TEXT
}

die() {
    echo "gpu.sh: $*" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
minutes=9 out="" stages=(1 2 3) smoke=0 others=()
while (($#)); do
    case "$1" in
        --minutes) minutes="${2:?--minutes needs a number}" && shift ;;
        --out) out="${2:?--out needs a folder}" && shift ;;
        --stage) stages=("${2:?--stage needs 1, 2 or 3}") && shift ;;
        --smoke) smoke=1 ;;
        --help | -h) usage && exit 0 ;;
        *) others+=("$1") ;;
    esac
    shift
done
[[ "$minutes" =~ ^[0-9]+$ ]] || die "--minutes must be a whole number, got $minutes"
[[ "${stages[0]}" =~ ^[123]$ ]] || die "--stage must be 1, 2 or 3, got ${stages[0]}"
command -v timeout >/dev/null || die "timeout, of GNU coreutils, is not on PATH"

temporary="$(mktemp -d)"
child=""
trap 'rm -rf "$temporary"' EXIT
trap '[[ -z "$child" ]] || kill "$child" 2>/dev/null; exit 143' INT TERM
# the package under its name, without the root of the checkout on sys.path: the folder triton_kernels there must not be
# found in place of another package of that name
mkdir "$temporary/site" && ln -s "$root/megatron_rc" "$temporary/site/megatron_rc"
export PYTHONPATH="$temporary/site${PYTHONPATH:+:$PYTHONPATH}"
# with it a script does not find the modules beside it
unset PYTHONSAFEPATH

if ((smoke)); then
    export TRITON_INTERPRET=1
    name=smoke small=(--small) toy=(--smoke)
    out="${out:-$temporary/results}"
else
    unset TRITON_INTERPRET
    name="$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())')" ||
        die "$python sees no CUDA device; --smoke runs without one"
    small=() toy=()
    out="${out:-$root/runs/gpu}"
    probe='import torch; torch.empty(2**30, dtype=torch.uint8, device="cuda")'
    if ! PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$python" -c "$probe" 2>/dev/null; then
        echo "this machine cannot grow segments of memory: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
    fi
fi
file="$out/gpu-$name.json"
status=0

# What a command may take beyond its minutes to end by itself, and what the last one of a stage leaves for that.
grace=60 spare=75

# The seconds that are left of the stage when it must keep SECONDS for what follows; fails when none are.
left() {
    local seconds=$((begun + 60 * minutes - SECONDS - $1))
    ((seconds > 0)) && echo "$seconds"
}

in_minutes() {
    echo "$(($1 / 60)).$(($1 % 60 * 10 / 60))"
}

# limited SECONDS SCRIPT [OPTION...]: status 124 when the script, and all that it started, had to be ended.
limited() {
    local seconds="$1" script="$2"
    shift 2
    timeout -k 10 "$seconds" "$python" "$root/benchmarks/$script" "$@" &
    child=$!
    wait "$child"
}

checks() {
    # of several processes that check, one that hangs is seen after three minutes
    limited "$((30 * minutes + 200))" gpu_check.py ${small[@]+"${small[@]}"} --minutes "$(in_minutes $((30 * minutes)))" \
        --out "$file" --section checks || status=1
}

# rows SECTION KEPT-SECONDS [OPTION...]: what an earlier run has is kept. 75: a call lost the device; 124: it did not come
# back; from 128 on: it ended the process. The other rows are worth having: the next attempt goes on without that call.
rows() {
    local section="$1" kept="$2" ended=0 attempt seconds
    shift 2
    for attempt in 1 2 3 4 5; do
        seconds="$(left "$kept")" || { echo "gpu.sh: no time is left for $section; the same command goes on" && break; }
        limited $((seconds + grace)) kernels.py ${toy[@]+"${toy[@]}"} "$@" --resume --out "$file" --section "$section" \
            --minutes "$(in_minutes "$seconds")"
        ended=$?
        ((ended == 75 || ended == 124 || ended >= 128)) || break
        echo "gpu.sh: attempt $attempt ended with status $ended; the next one goes on without the call that did it"
    done
    ((ended == 0)) || status=1
}

# beside SECTION KEPT-SECONDS SCRIPT: what a machine may lack, which costs no status.
beside() {
    local seconds
    seconds="$(left "$2")" || { echo "gpu.sh: no time is left for $1" && return; }
    limited $((seconds + grace)) "$3" ${toy[@]+"${toy[@]}"} --out "$file" --section "$1" \
        --minutes "$(in_minutes "$seconds")" || echo "gpu.sh: $1 ended with status $?"
}

for stage in "${stages[@]}"; do
    begun=$SECONDS
    echo "gpu.sh: stage $stage of 3, into $file"
    case "$stage" in
        1)
            checks
            rows kernels "$spare" ${others[@]+"${others[@]}"}
            ;;
        2)
            rows kernels $((60 * minutes / 3)) ${others[@]+"${others[@]}"}
            rows sweep "$spare" --sweep
            ;;
        3)
            beside counters $((40 * minutes)) gpu_counters.py
            beside quickstart $((20 * minutes)) gpu_quickstart.py
            rows kernels "$spare" ${others[@]+"${others[@]}"}
            ;;
    esac
done
"$python" "$root/benchmarks/gpu_report.py" "$file"
exit "$status"
