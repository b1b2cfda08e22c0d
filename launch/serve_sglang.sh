#!/usr/bin/env bash
# Serve a model for rollouts with the SGLang of this machine's Python, on its GPUs: `megatron-rc serve` by the interpreter
# $PYTHON (default python3), for which nothing needs to be installed but SGLang. Where python3 lacks two small packages, the
# Python of .venv starts the SGLang of python3. --help lists the options.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
python="${PYTHON:-python3}"
runs_serve() { "$1" -c 'import typer, yaml' 2>/dev/null; }
if ! runs_serve "$python"; then
    [[ ! "${PYTHON:-}" ]] && runs_serve "$VENV/bin/python" ||
        die "$python cannot run megatron-rc serve; pip install --no-deps typer pyyaml there, or name another interpreter with PYTHON=/path/to/python"
    export SGLANG_PYTHON="${SGLANG_PYTHON:-$python}"
    python="$VENV/bin/python"
fi
export PYTHONSAFEPATH=1 PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_rc serve "$@"
