#!/usr/bin/env bash
# Lint, type-check and test this repository in .venv, which is made when missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/test.sh [--full] [pytest arguments]

Makes .venv and .venv-sglang when they are missing, installs, then runs ruff, mypy and pytest. Without pytest arguments the
kernels also run with the oldest supported Triton, which is installed next to that of .venv.
With paths among the arguments, such as tests/loss/test_loss.py, only those tests run: nothing but .venv is prepared, and
nothing is linted. Paths are relative to the repository.
  --full   also the tests marked full (slow, large)
  --help   this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

[[ "${1:-}" != --help && "${1:-}" != -h ]] || { usage && exit 0; }
triton_version() { python -c 'import triton; print(triton.__version__)'; }

cd "$ROOT"
paths=()
for argument in "$@"; do
    [[ ! -e "${argument%%::*}" ]] || paths+=("${argument%%::*}")
done
parallel=() background=()
trap '((${#background[@]} == 0)) || kill "${background[@]}" 2>/dev/null || true' EXIT
# what is wrong with Python is said once, before a second installation starts
child_environment
make_venv
((${#paths[@]})) || { bash launch/sglang_cpu/install.sh & background+=($!); }
prepare test dev
PATH="$VENV/bin:$PATH"
if ((${#paths[@]} == 0)); then
    prepare_triton 3.6.0 "numpy<2.4" & background+=($!)
    prepare_megatron_training 0.17.1 0.19.2
    say "ruff check"
    ruff check --quiet .
    say "ruff format --check"
    ruff format --check --quiet . || die "the files above are not formatted; run .venv/bin/ruff format ."
    say "mypy megatron_rc, in the background"
    mypy --no-error-summary megatron_rc tests/support/typed_user.py & types=$!
    for process in "${background[@]}"; do wait "$process"; done
    background=("$types") parallel=(-n 3 --dist worksteal)
fi
ran=0
# With arguments, the selected tests may all be of the other kind; pytest then answers 5.
run_tests() {
    local status=0
    python -m pytest ${parallel[@]+"${parallel[@]}"} --quiet "$@" || status=$?
    case "$status $#" in
        0\ *) ran=1 ;;
        5\ 0 | [!5]*) exit "$status" ;;
    esac
}

command -v chromium >/dev/null || say "no chromium: tests of pages in a browser are skipped (apt-get install chromium)"
say "pytest"
run_tests "$@"
for process in ${background[@]+"${background[@]}"}; do wait "$process" || die "mypy found what it printed above"; done
background=()
if ((${#paths[@]} == 0)) || grep -Eqr 'mark\.(interpreter|kernel)' "${paths[@]}"; then
    say "pytest: the kernels, interpreted by triton $(triton_version)"
    TRITON_INTERPRET=1 run_tests "$@"
fi
((ran)) || die "no test was selected by: $*"

if (($# == 0)) || [[ "$*" == "--full" ]]; then
    older="$VENV/triton-3.6.0"
    version="$(PYTHONPATH="$older" triton_version)"
    [[ "$version" == 3.6.0 ]] || die "$older holds triton 3.6.0, but $version is what runs"
    say "pytest: every kernel, interpreted by triton $version"
    # what numpy says about that interpreter, and why numpy>=2.4 does not go with it
    PYTHONPATH="$older" TRITON_INTERPRET=1 python -m pytest --quiet tests/kernels/test_calls.py \
        -W ignore::DeprecationWarning:triton.runtime.interpreter
fi
say "all checks passed"
