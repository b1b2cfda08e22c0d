#!/usr/bin/env bash
# Lint, type-check and test this repository in .venv, which is made when missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/test.sh [--full] [pytest arguments]

Makes .venv and .venv-sglang when they are missing, installs, then runs ruff, mypy and pytest. Paths are relative to the repository.
Without pytest arguments the kernels also run with the oldest Triton supported, installed beside .venv's own.
  --full   also the tests marked full (slow, large)
  --help   this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
    usage
    exit 0
fi

triton_version() { python -c 'import triton; print(triton.__version__)'; }

cd "$ROOT"
prepare test dev
prepare_megatron_training 0.17.1 0.19.2
bash launch/sglang_cpu/install.sh
PATH="$VENV/bin:$PATH"

say "ruff check"
ruff check --quiet .
say "ruff format --check"
ruff format --check --quiet . || die "the files above are not formatted; run .venv/bin/ruff format ."
say "mypy megatron_rc"
mypy --no-error-summary megatron_rc
ran=0
# With arguments, the chosen tests may all be of the other kind; pytest then answers 5.
run_tests() {
    local status=0
    python -m pytest -n 2 --dist worksteal --quiet "$@" || status=$?
    case "$status $#" in
        0\ *) ran=1 ;;
        5\ 0 | [!5]*) exit "$status" ;;
    esac
}

say "pytest on 2 processes"
run_tests "$@"
say "pytest on 2 processes: the kernels, interpreted by triton $(triton_version)"
TRITON_INTERPRET=1 run_tests "$@"
((ran)) || die "no test was chosen by: $*"

if (($# == 0)) || [[ "$*" == "--full" ]]; then
    prepare_triton 3.6.0 "numpy<2.4"
    older="$VENV/triton-3.6.0"
    version="$(PYTHONPATH="$older" triton_version)"
    [[ "$version" == 3.6.0 ]] || die "$older holds triton 3.6.0, but $version is what runs"
    say "pytest: every kernel, interpreted by triton $version"
    # what numpy says about that interpreter, and why numpy>=2.4 does not go with it
    PYTHONPATH="$older" TRITON_INTERPRET=1 python -m pytest --quiet tests/kernels/test_calls.py \
        -W ignore::DeprecationWarning:triton.runtime.interpreter
fi
say "all checks passed"
