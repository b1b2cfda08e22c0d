#!/usr/bin/env bash
# The Python of .venv-sglang as SGLang needs it without a GPU; the stand-ins are for SGLang and its children alone.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
export PYTHONSAFEPATH=1 PYTHONWARNINGS=ignore SGLANG_USE_CPU_ENGINE=1 PYTHONPATH="$here/stand_in"
exec "$here/../../.venv-sglang/bin/python" "$@"
