#!/usr/bin/env bash
# Serve a checkpoint with a real SGLang server on this machine's CPU.
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
source "$HERE/../sglang_common.sh"

usage() {
    cat <<TEXT
usage: bash launch/sglang_cpu/serve.sh MODEL_DIR [--port N] [--log FILE] [options] [SGLang flags]
       bash launch/sglang_cpu/serve.sh stop [--port N] [--log FILE]

Serves the Hugging Face checkpoint in MODEL_DIR (a job's OUTPUT/hf, for instance) on 127.0.0.1 with SGLang, from
.venv-sglang, which is built when missing. Token ids in, token ids out. Stays in the foreground: Ctrl-C stops the
server and everything it started. Mixture-of-experts checkpoints are served with --enable-return-routed-experts.
$(common_options)
Other options go to SGLang and win over the ones set here.
TEXT
}

take_model "${1:-}"
shift
while (($#)); do
    take_option "$@"
    shift "$taken"
done
[[ "$port" != 0 || "$action" == stop ]] || port="$(free_port "$(find_python)")"
log="${log:-$ROOT/runs/sglang-$port.log}"
if [[ "$action" == stop ]]; then
    stop_server
    exit
fi
[[ -f "$model/config.json" ]] || die "$model holds no config.json; MODEL_DIR is a Hugging Face checkpoint, such as a job's OUTPUT/hf"

[[ -n "$dry_run" ]] || bash "$HERE/install.sh"
python="$ROOT/.venv-sglang/bin/python"
# the stand-ins are for this server alone. Its processes are new ones each, so they find them by the environment
command=(
    env PYTHONSAFEPATH=1 PYTHONWARNINGS=ignore SGLANG_USE_CPU_ENGINE=1 "PYTHONPATH=$HERE/stand_in"
    "$python" -m sglang.launch_server
    --model-path "$model" --host 127.0.0.1 --port "$port"
    --device cpu --dtype float32 --attention-backend torch_native --disable-overlap-schedule
    --skip-tokenizer-init --skip-server-warmup --sleep-on-idle
    --mem-fraction-static 0.3 --max-total-tokens 32768 --max-running-requests 256
)
[[ "$(has_experts "$(find_python)" "$model")" == 0 ]] || command+=(--enable-return-routed-experts)
run_server 127.0.0.1 "${command[@]}" ${server_flags[@]+"${server_flags[@]}"}
