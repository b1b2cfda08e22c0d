#!/usr/bin/env bash
# Serve a checkpoint with a real SGLang server on this machine's CPU: `megatron-rc serve --cpu` by the Python of
# .venv-sglang, which is made when missing. --help lists the options.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$here/../common.sh"
# help needs no SGLang
[[ "${1:-}" != --help && "${1:-}" != -h ]] || exec bash "$ROOT/launch/serve_sglang.sh" --help
bash "$here/install.sh" >&2
child_environment
export PYTHONPATH="$ROOT" SGLANG_PYTHON="$here/python.sh"
exec "$ROOT/.venv-sglang/bin/python" -m megatron_rc serve --cpu --timeout 300 "$@"
