# Shared by the scripts of this folder: find Python, make .venv, install, and the environment of what they start.
# Sourced, never run; the caller has set -euo pipefail.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
TORCH_INDEX="${MEGATRON_RC_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"

say() { printf '[%4ds] %s\n' "$SECONDS" "$*"; }

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# What every process started by a launch script inherits.
child_environment() {
    # the repository root stays off sys.path: there, find_spec("triton_kernels") would find our kernel folder, and
    # SGLang and vLLM would take it for Triton's package of that name
    export PYTHONSAFEPATH=1
    # without compiled files, which a first import leaves, every process would compile all that it imports
    unset PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
    # one thread per process: the parallel ranks fill the cores
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    # gloo otherwise listens on whatever interface the host's name resolves to
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"
    # nothing that these scripts run needs a download
    export HF_HUB_OFFLINE=1
}

is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# Prints the interpreter to make .venv with: $PYTHON, or the first of the usual names that is 3.11 or newer.
find_python() {
    local candidate
    if [[ -n "${PYTHON:-}" ]]; then
        is_python_311 "$PYTHON" || die "PYTHON=$PYTHON is not a working Python 3.11 or newer"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3; do
        is_python_311 "$candidate" && echo "$candidate" && return
    done
    die "no Python 3.11 or newer found; install one, or name it with PYTHON=/path/to/python3.11"
}

make_venv() {
    local python
    if [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        is_python_311 "$VENV/bin/python" || die "$VENV holds a Python older than 3.11; remove that folder and run again"
        return
    fi
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot make virtual environments; install its venv module (Debian, Ubuntu: python3-venv)"
    say "making $VENV with $("$python" --version)"
    "$python" -m venv "$VENV"
}

# Runs pip with its output in $1; shows it only when pip fails. What is installed is compiled when it is first imported:
# most of it never is, and to compile it all takes as long as everything else.
logged_pip() {
    local log="$1"
    shift
    "$VENV/bin/python" -m pip --disable-pip-version-check --no-input "$@" >>"$log" 2>&1 && return
    cat "$log" >&2
    return 1
}

# install_once NAME KEY PINS ARGUMENTS...: pip install ARGUMENTS into $VENV, after the torch that the file PINS names, unless
# $VENV/installedNAME says that this was done with the same KEY.
install_once() {
    local stamp="$VENV/installed$1" log="$VENV/install$1.log" key="$2" pins="$3" folder="${VENV##*/}"
    shift 3
    if [[ -f "$stamp" && "$(<"$stamp")" == "$key" ]]; then
        say "the installation in $folder is up to date"
        return
    fi
    say "installing into $folder (some minutes and about 3 GB the first time; progress in ${log#"$ROOT"/})"
    rm -f "$stamp" "$log"
    # the CPU build first and from its own index: PyPI's torch brings gigabytes of CUDA, and another triton
    logged_pip "$log" install --no-compile --retries 2 --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' "$pins")" ||
        die "no CPU build of torch could be installed; MEGATRON_RC_TORCH_INDEX names another package index"
    logged_pip "$log" install --no-compile "$@" || die "installation failed (see above); it is safe to run this again"
    echo "$key" >"$stamp"
    say "installed"
}

# prepare NAME EXTRAS: make .venv and install this repository with EXTRAS, unless NAME was installed from the same files.
prepare() {
    local pins="$ROOT/constraints-cpu.txt" key
    child_environment
    make_venv
    key="$(
        { "$VENV/bin/python" --version && echo "$ROOT $2 $TORCH_INDEX" && cat "$ROOT"/{setup.py,pyproject.toml} "$pins"; } |
            sha256sum
    )"
    install_once "-$1" "$key" "$pins" -c "$pins" -e "$ROOT[$2]"
}

# prepare_triton VERSION NUMPY: a second Triton, with the numpy it goes with, in $VENV/triton-VERSION: as much of both as
# the interpreter needs. Whoever puts that folder first on PYTHONPATH runs with it.
prepare_triton() {
    local version="$1" numpy="$2" folder log key
    folder="$VENV/triton-$version"
    log="$VENV/install-triton-$version.log"
    key="triton $version $numpy $("$VENV/bin/python" --version)"
    [[ ! -f "$folder/installed" || "$(<"$folder/installed")" != "$key" ]] || return 0
    say "installing triton $version next to the one in .venv (about 500 MB; progress in ${log#"$ROOT"/})"
    rm -rf "$folder" "$log"
    logged_pip "$log" install --no-compile --no-deps --only-binary :all: --target "$folder" "triton==$version" "$numpy" ||
        die "triton $version could not be installed (see above); it is safe to run this again"
    # compilers, debuggers and headers of GPUs: a third of it
    rm -rf "$folder"/triton/backends/nvidia/{bin,lib} "$folder"/triton/backends/*/include \
        "$folder"/triton/{profiler,FileCheck} "$folder"/triton/_C/libproton.so "$folder/bin"
    echo "$key" >"$folder/installed"
}

# prepare_megatron_training VERSION...: wheels of megatron-core that hold megatron.training, in $VENV/megatron-training. They
# are for a newer Python than .venv's: tests unpack them.
prepare_megatron_training() {
    local version folder="$VENV/megatron-training" log="$VENV/install-megatron-training.log"
    for version in "$@"; do
        compgen -G "$folder/megatron_core-$version-*.whl" >/dev/null && continue
        say "downloading megatron-core $version (2 MB)"
        logged_pip "$log" download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
            --platform manylinux_2_24_x86_64 -d "$folder" "megatron-core==$version" ||
            say "no wheel of megatron-core $version was found: the tests that read it are skipped"
    done
}

# take_options KNOWN ARGUMENTS...: reads the options that KNOWN lists, such as "--moe, --steps N", into variables of their
# names. An option without a value becomes 1; one with another value than N or DIR may be repeated.
take_options() {
    local known="$1" kind name value
    shift
    while (($#)); do
        [[ "$1" != --help && "$1" != -h ]] || { usage && exit 0; }
        [[ ", $known," =~ ,\ "$1"(\ ([A-Z]+))?, ]] || die "unknown argument '$1'; known: $known, --help"
        kind="${BASH_REMATCH[2]}" name="${1#--}" value="${2:-}"
        name="${name//-/_}"
        case "$kind" in
            '') value=1 ;;
            N) [[ "$value" =~ ^[0-9]+$ ]] || die "$1 takes a whole number, got '$value'" ;;
            DIR) [[ -n "$value" ]] && value="$(realpath -m -- "$value")" || die "$1 takes a directory" ;;
            *) [[ -n "$value" ]] && value="${!name}${!name:+ }$value" || die "$1 takes $kind" ;;
        esac
        printf -v "$name" %s "$value"
        shift $((1 + (${#kind} > 0)))
    done
}

# Cores that this process may use, whatever OMP_NUM_THREADS says.
cores() { env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc; }

# next_commands FOLDER: what to type once a script is done, for the first run in FOLDER that kept a dump.
next_commands() {
    local run shown=(realpath --no-symlinks "--relative-base=$PWD" --)
    printf '\nNext, in this shell:\n  source %q\n' "$("${shown[@]}" "$VENV/bin/activate")"
    run="$(find "$1" -type d -name dump | sort | head -n 1)"
    [[ "$run" ]] || return 0
    run="$("${shown[@]}" "${run%/dump}")"
    printf '  megatron-rc analyze %q\n  megatron-rc report %q\n' "$run/dump" "$run"
}

# Dies unless $out may be replaced: a new training run deletes an earlier one there, and must not delete anything else.
check_out() {
    [[ ! -e "$out" || -f "$out/metrics.jsonl" || -z "$(ls -A -- "$out")" ]] ||
        die "$out is not empty and holds no earlier run; --out takes a new folder, or that of a run to replace"
}

# train_recipe NAME OPTIONS...: trains launch/recipes/NAME.yaml afresh on this machine's CPU, with $seed and $steps, into $out.
train_recipe() {
    local recipe="launch/recipes/$1.yaml" started=$SECONDS
    shift
    say "training $recipe, seed $seed, into $out"
    CUDA_VISIBLE_DEVICES='' "$VENV/bin/python" -m megatron_rc launch "$ROOT/$recipe" --nodes 1 --fresh "$@" \
        --set "train.seed=$seed" --set "output='${out//\'/\'\'}'" ${steps:+--set "train.steps=$steps"} ||
        die "the run failed; its own error is above the launcher's traceback"
    [[ -f "$out/report.html" ]] || die "the run ended without $out/report.html"
    say "trained in $((SECONDS - started)) s; open $out/report.html in a browser"
    next_commands "$out"
}
