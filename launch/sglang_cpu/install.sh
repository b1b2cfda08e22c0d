#!/usr/bin/env bash
# Build .venv-sglang: a real SGLang server for machines without a GPU, apart from .venv because the two disagree on versions.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

REQUIREMENTS="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)/requirements.txt"
VENV="$ROOT/.venv-sglang"

usage() {
    cat <<'TEXT'
usage: bash launch/sglang_cpu/install.sh

Makes .venv-sglang and installs SGLang for CPU into it, exactly the versions of launch/sglang_cpu/requirements.txt
(some minutes and 3 GB the first time, nothing when it is there already). Two may run at once: the second one waits.
  --help   this text
Environment: PYTHON (interpreter for .venv-sglang: 3.11 or 3.12), MEGATRON_RC_TORCH_INDEX (package index of the CPU
build of torch).
TEXT
}

install_sglang() {
    local version key
    mkdir -p "$VENV"
    exec 9>"$VENV/install.lock"
    flock --nonblock 9 || { say "another process is installing into .venv-sglang; waiting for it" && flock 9; }
    child_environment
    make_venv
    version="$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    [[ "$version" == 3.11 || "$version" == 3.12 ]] ||
        die "SGLang has wheels for Python 3.11 and 3.12, and $VENV holds $version; remove it and name another by PYTHON"
    key="$({ echo "$ROOT $TORCH_INDEX" && cat "$REQUIREMENTS"; } | sha256sum)"
    install_once '' "$key" "$REQUIREMENTS" --no-deps -r "$REQUIREMENTS"
}

case "${1:-}" in
    '') install_sglang ;;
    --help | -h) usage ;;
    *) die "unknown argument '$1'; known: --help" ;;
esac
