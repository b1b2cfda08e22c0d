#!/usr/bin/env bash
# Test the kernels on the GPU of this machine and time them, with whatever torch and triton its python3 has; one JSON.
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: bash benchmarks/gpu.sh [--stage 1|2|3] [--minutes N] [--out FOLDER] [--smoke] [options of benchmarks/speed/run.py]

Runs from this checkout, on one GPU; installs and downloads nothing. Everything goes into one JSON, FOLDER/gpu-<device>.json,
which is replaced after every case: a run that is cut short has lost nothing, and the same command goes on.
  stage 1        tests/kernels on the device, every kernel against fp64 or plain PyTorch
  stage 2        the cases of benchmarks/speed/run.py, beside every peer that can be imported, and the targets
  stage 3        cases that are still missing, the sweep of launch shapes, the quickstart's single run on CUDA
  --stage N      that stage alone, for places that end a command after ten minutes; without it, all three
  --minutes N    time for each stage (9); what takes longer is ended
  --out FOLDER   where the JSON goes (runs/gpu; for --smoke a temporary folder, which is deleted)
  --smoke        no GPU: toy sizes in Triton's interpreter, everything checked and nothing timed
  --help         this text
Stage 1 needs pytest and hypothesis. With pytest-xdist, five processes share the work, most of which is compiling.
Fetch their wheels where there is a network, for the Python of the GPU's machine:
    pip download -d wheels --only-binary :all: --python-version 3.12 pytest hypothesis pytest-timeout pytest-xdist
    python3 -m pip install --no-index --find-links wheels pytest hypothesis pytest-timeout pytest-xdist
With --python-version, name --platform manylinux2014_x86_64 too where the other machine is not like this one.
Stage 3 needs what training needs (megatron-core, transformers). What is missing is written down; stages 2 and 3 go on.
Exit status 1: a test failed or could not run, a kernel is wrong, or a case failed; peers and quickstart cost no status.
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
[[ "$minutes" =~ ^[1-9][0-9]*$ ]] || die "--minutes must be a whole number, got $minutes"
[[ "${stages[0]}" =~ ^[123]$ ]] || die "--stage must be 1, 2 or 3, got ${stages[0]}"
command -v timeout >/dev/null || die "timeout, of GNU coreutils, is not on PATH"

temporary="$(mktemp -d)"
trap 'rm -rf "$temporary"' EXIT
child=""
trap '[[ -z "$child" ]] || kill "$child" 2>/dev/null; exit 143' INT TERM
# the package under its name, without the root of the checkout on sys.path: the folder triton_kernels there must not be
# found in place of another package of that name
mkdir "$temporary/site" && ln -s "$root/megatron_rc" "$temporary/site/megatron_rc"
export PYTHONPATH="$temporary/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1

quickstart=(train "$root/launch/recipes/quickstart_single.yaml" --set parallel.tensor=1 --set cluster.gpus_per_node=1)
quickstart+=(--set "output=$temporary/quickstart")
if ((smoke)); then
    export TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES=""
    name=smoke toy=(--smoke) tests=(tests/kernels/test_calls.py)
    quickstart+=(--set train.steps=2 --set warmup.steps=2 --set rollout.prompts_per_step=8)
    out="${out:-$temporary/results}"
else
    unset TRITON_INTERPRET
    name="$("$python" -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-").lower())')" ||
        die "$python sees no CUDA device; --smoke runs without one"
    toy=() tests=(tests/kernels)
    "$python" -c "import xdist" 2>/dev/null && tests+=(-n 5)
    out="${out:-$root/runs/gpu}"
fi
file="$out/gpu-$name.json"
status=0

# timed SECONDS-KEPT OPTION...: run.py within what is left of the stage but for the seconds kept; 124 when it was ended.
timed() {
    local seconds=$((begun + 60 * minutes - SECONDS - $1))
    shift
    ((seconds > 30)) || { echo "gpu.sh: no time is left for this part; the same command goes on" && return 0; }
    timeout -k 10 "$seconds" "$python" "$root/benchmarks/speed/run.py" ${toy[@]+"${toy[@]}"} --out "$file" \
        --minutes "$(((seconds - 30) / 60)).$(((seconds - 30) % 60 / 6))" "$@" &
    child=$!
    wait "$child"
}

cd "$root" || exit 2
for stage in "${stages[@]}"; do
    begun=$SECONDS
    echo "gpu.sh: stage $stage of 3, into $file"
    case "$stage" in
        1) timed 10 --stage tests "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" || status=1 ;;
        2) timed 10 ${others[@]+"${others[@]}"} || status=1 ;;
        3)
            timed $((40 * minutes)) ${others[@]+"${others[@]}"} || status=1
            timed $((25 * minutes)) --sweep || status=1
            timed 10 --stage quickstart "$python" -m megatron_rc "${quickstart[@]}" || echo "gpu.sh: no quickstart"
            ;;
    esac
done
"$python" "$root/benchmarks/speed/report.py" "$file"
exit "$status"
