#!/usr/bin/env bash
# Check the kernels on the GPU of this machine, then time them, with whatever torch and triton its python3 has.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: bash benchmarks/gpu.sh [--minutes N] [--out FOLDER] [--resume] [--dry-run] [options of benchmarks/kernels.py]

Runs benchmarks/gpu_check.py, then benchmarks/kernels.py, from this checkout: nothing is installed. Both write their JSON
after every check and row, so a run that is cut short has lost nothing. Exit status 1: a kernel is wrong, or a row failed.
  --minutes N    time for everything (9); checks get at most half of it, and no row starts in the last 45 seconds
  --out FOLDER   where the JSON files go (benchmarks/results; a temporary folder for --dry-run)
  --resume       no checks; the rows that an earlier run did not come to
  --dry-run      no GPU: toy sizes in Triton's interpreter, everything checked and nothing timed
  --help         this text
Environment: PYTHON (interpreter, python3), CUDA_VISIBLE_DEVICES (the first GPU of it is used).
TEXT
}

die() {
    echo "gpu.sh: $*" >&2
    exit 2
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
minutes=9 out="" resume=0 dry_run=0 others=()
while (($#)); do
    case "$1" in
        --minutes) minutes="${2:?--minutes needs a number}" && shift ;;
        --out) out="${2:?--out needs a folder}" && shift ;;
        --resume) resume=1 ;;
        --dry-run) dry_run=1 ;;
        --help | -h) usage && exit 0 ;;
        *) others+=("$1") ;;
    esac
    shift
done
[[ "$minutes" =~ ^[0-9]+$ ]] || die "--minutes must be a whole number, got $minutes"

temporary="$(mktemp -d)"
trap 'rm -rf "$temporary"' EXIT
# the package under its name, without the root of the checkout on sys.path: the folder triton_kernels there must not be
# found in place of another package of that name
mkdir "$temporary/site" && ln -s "$root/megatron_rc" "$temporary/site/megatron_rc"
export PYTHONPATH="$temporary/site${PYTHONPATH:+:$PYTHONPATH}"
# with it a script does not find the modules beside it
unset PYTHONSAFEPATH

if ((dry_run)); then
    export TRITON_INTERPRET=1
    name=smoke sizes=(--small) rows=(--smoke)
    out="${out:-$temporary/results}"
else
    unset TRITON_INTERPRET
    name="$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())')" ||
        die "$python sees no CUDA device; --dry-run runs without one"
    sizes=() rows=()
    out="${out:-$root/benchmarks/results}"
    probe='import torch; torch.empty(2**30, dtype=torch.uint8, device="cuda")'
    if ! PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$python" -c "$probe" 2>/dev/null; then
        echo "this machine cannot grow segments of memory: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False
    fi
fi

status=0
if ((!resume)); then
    "$python" "$root/benchmarks/gpu_check.py" "${sizes[@]}" --minutes "$((minutes / 2)).$((minutes % 2 * 5))" \
        --out "$out/gpu-check-$name.json" || status=1
fi

# 75: a call lost the device; from 128 on: a call ended the process. Either way the others are worth having.
arguments=("${rows[@]}" "${others[@]}" --out "$out/kernels-$name.json")
((resume)) && arguments+=(--resume)
for attempt in 1 2 3 4 5; do
    left=$((60 * minutes - SECONDS - 45))
    ((left > 0)) || { echo "gpu.sh: no time is left for benchmarks/kernels.py; --resume goes on" && break; }
    "$python" "$root/benchmarks/kernels.py" "${arguments[@]}" --minutes "$((left / 60)).$((left % 60 * 10 / 60))"
    ended=$?
    ((ended == 75 || ended >= 128)) || break
    echo "gpu.sh: attempt $attempt ended with status $ended; the next one goes on without the call that did it"
    arguments+=(--resume)
done
((${ended:-0} == 0)) || status=1
exit "$status"
