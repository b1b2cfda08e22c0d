#!/usr/bin/env bash
# Lint, type-check and test this repository in .venv, which is made when missing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: bash launch/test.sh [--full] [pytest arguments]

Makes .venv when it is missing, installs, then runs ruff, mypy and pytest. Paths are relative to the repository.
  --full   also the tests marked full (slow, large)
  --help   this text
Environment: PYTHON (interpreter for .venv), MEGATRON_RC_TORCH_INDEX (package index of the CPU build of torch).
TEXT
}

if [[ "${1:-}" == "--help" || "${1:-}" == "-h" ]]; then
    usage
    exit 0
fi

cd "$ROOT"
prepare test dev,report,math,sglang
PATH="$VENV/bin:$PATH"

say "ruff check"
ruff check --quiet .
say "ruff format --check"
ruff format --check --quiet . || die "the files above are not formatted; run .venv/bin/ruff format ."
say "mypy megatron_rc"
mypy --no-error-summary megatron_rc
say "pytest on 2 processes"
python -m pytest -n 2 --dist worksteal --quiet "$@"
say "all checks passed"
