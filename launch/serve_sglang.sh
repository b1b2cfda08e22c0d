#!/usr/bin/env bash
# Serve a model for rollouts with the SGLang of this machine's Python, on its GPUs.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/sglang_common.sh"

python="${PYTHON:-python3}" tensor_parallel=1 host=127.0.0.1 timeout=1800

usage() {
    cat <<TEXT
usage: bash launch/serve_sglang.sh MODEL [--tp N] [--port N] [--host ADDRESS] [options] [SGLang flags]
       bash launch/serve_sglang.sh stop [--port N] [--log FILE]

Serves MODEL, a directory or a name on the Hugging Face hub, with what rollout correction needs of a server. Stays in
the foreground: Ctrl-C stops the server and everything it started. Mixture-of-experts models are served with
--enable-return-routed-experts, so that routes can be compared and replayed.
  --tp N           GPUs that share one copy of the model (default $tensor_parallel)
  --host ADDRESS   address to listen on (default $host; whoever reaches it controls the server, weights included)
$(common_options)
Other options go to SGLang and win over the ones set here, among them:
  --sampling-mask-max-tokens N        the largest top-k that comes back with its kept ids (SGLang's default: 4096)
  --enable-deterministic-inference    the same answer whatever else is in the batch, and sampling seeds; slower
Environment: PYTHON (an interpreter with SGLang installed; default python3), and whatever SGLang reads.
TEXT
}

# The server keeps its user's environment, which says where caches, GPUs and networks are; only this repository must
# stay off its path, where triton_kernels/ would be taken for Triton's package of that name.
child_environment() {
    local entry entries=() kept=''
    export PYTHONSAFEPATH=1
    IFS=: read -ra entries <<<"${PYTHONPATH:-}"
    for entry in ${entries[@]+"${entries[@]}"}; do
        [[ -z "$entry" || "$(realpath -m -- "$entry")" == "$ROOT" ]] || kept+="${kept:+:}$entry"
    done
    export PYTHONPATH="$kept"
}

take_model "${1:-}"
shift
while (($#)); do
    case "$1" in
        --tp | --tp-size | --tensor-parallel-size) tensor_parallel="$(whole_number "$@")" taken=2 ;;
        --host)
            [[ -n "${2:-}" ]] || die "--host takes an address"
            host="$2" taken=2
            ;;
        *) take_option "$@" ;;
    esac
    shift "$taken"
done
[[ "$port" != 0 || "$action" == stop ]] || port="$(free_port "$python")"
log="${log:-$ROOT/runs/sglang-$port.log}"
if [[ "$action" == stop ]]; then
    stop_server
    exit
fi

child_environment
if [[ -z "$dry_run" ]]; then
    "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("sglang") is None)' ||
        die "$python has no SGLang; install it there, or name another interpreter with PYTHON=/path/to/python"
fi
experts="$(has_experts "$python" "$model")" ||
    die "the config.json of $model could not be read (see above); MODEL is a directory or a name on the hub"
command=(
    env PYTHONSAFEPATH=1 "$python" -m sglang.launch_server
    --model-path "$model" --host "$host" --port "$port" --tp-size "$tensor_parallel"
)
((experts == 0)) || command+=(--enable-return-routed-experts)
run_server "$host" "${command[@]}" ${server_flags[@]+"${server_flags[@]}"}
