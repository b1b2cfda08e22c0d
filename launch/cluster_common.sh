# Shared by the scripts that train on a cluster: the environment of what they start, and one node of the job.
# Sourced, never run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# A cluster's environment says where GPUs, networks and reward functions are, and is kept, but for the path.
child_environment() {
    # the folder it is started in stays off sys.path: in this repository, triton_kernels/ would pass for Triton's package
    export PYTHONSAFEPATH=1
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    # Megatron orders its communication before its matrix products by it
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
}

# train_on_cluster NAME DEFAULTS OPTIONS...: this node's part of launch/recipes/NAME.yaml.
train_on_cluster() {
    local name="$1" defaults="$2" python="${PYTHON:-python3}"
    shift 2
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("megatron_rc") is None)' 2>/dev/null ||
        die "$python has no megatron_rc; install this repository there (pip install -c constraints-gpu.txt -e '.[train,sglang]'), or name another interpreter with PYTHON=/path/to/python"
    exec "$python" -m megatron_rc.cluster.node "$ROOT/launch/train_$name.sh" "$defaults" "$@"
}
