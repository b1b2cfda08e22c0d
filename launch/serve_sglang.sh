#!/usr/bin/env bash
# Serve a model for rollouts with the SGLang of this machine's Python, on its GPUs: `megatron-rc serve` by the interpreter
# $PYTHON (default python3), for which nothing needs to be installed but SGLang. --help lists the options.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
python="${PYTHON:-python3}"
"$python" -c 'import typer, yaml' 2>/dev/null || die "$python cannot run megatron-rc serve; pip install --no-deps typer pyyaml there, or name another interpreter with PYTHON=/path/to/python"
export PYTHONSAFEPATH=1 PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_rc serve "$@"
