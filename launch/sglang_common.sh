# Shared by serve_sglang.sh and sglang_cpu/serve.sh: their common options, starting a server, waiting for it, stopping it.
# Sourced, never run.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

action=start model='' port=30000 log='' timeout=300 background='' dry_run='' stop_with='' server_flags=()
stop_grace=20

common_options() {
    cat <<TEXT
  --port N         port to listen on (default $port; 0: any free one)
  --log FILE       where the server's output goes (default runs/sglang-PORT.log)
  --timeout S      seconds to wait for the server to answer (default $timeout)
  --background     return when the server answers; FILE with .pid for .log is what 'stop' reads
  --stop-with PID  stop the server when process PID ends, however it ends
  --dry-run        print the command and start nothing
  --help           this text
TEXT
}

# First argument: a model, or stop. Its path is made absolute, since the server runs elsewhere.
take_model() {
    case "${1:-}" in
        --help | -h)
            usage
            exit 0
            ;;
        stop) action=stop ;;
        '' | -*) die "the first argument is the model to serve, or stop; --help shows the rest" ;;
        *) model="$1" ;;
    esac
    [[ ! -d "$model" ]] || model="$(realpath -- "$model")"
}

# Takes one of the options above, or a flag for the server; $taken becomes the number of words that were used.
take_option() {
    taken=2
    case "$1" in
        --help | -h)
            usage
            exit 0
            ;;
        --background) background=1 taken=1 ;;
        --dry-run) dry_run=1 taken=1 ;;
        --port) port="$(whole_number "$@")" ;;
        --timeout) timeout="$(whole_number "$@")" ;;
        --stop-with) stop_with="$(whole_number "$@")" ;;
        --log)
            [[ -n "${2:-}" ]] || die "--log takes a file"
            log="$(realpath -m -- "$2")"
            ;;
        *) server_flags+=("$1") taken=1 ;;
    esac
}

whole_number() {
    [[ "${2:-}" =~ ^[0-9]+$ ]] || die "$1 takes a whole number, got '${2:-}'"
    echo "$2"
}

# Prints 1 when MODEL routes tokens to experts. PYTHON reads MODEL/config.json, or asks the hub for that of a model there.
has_experts() {
    local python="$1" model="$2"
    "$python" - "$model" <<'PYTHON'
import json, os, sys

model = sys.argv[1]
if not os.path.isdir(model):
    from huggingface_hub import hf_hub_download
path = os.path.join(model, "config.json") if os.path.isdir(model) else hf_hub_download(model, "config.json")
config = json.load(open(path))
text = config.get("text_config") or config
names = "num_experts", "num_local_experts", "n_routed_experts"
print(int(any((text.get(name) or 0) > 1 for name in names)))
PYTHON
}

# When process PID started: with it, a number that another process got later is not taken for it. Empty when it is gone.
started_at() {
    local status
    { status="$(<"/proc/$1/stat")"; } 2>/dev/null || return 0
    # the command's name stands in parentheses and may hold anything; field 22 of the line is field 20 behind it
    set -- ${status##*) }
    [[ "$1" == Z ]] || echo "${20}"
}

# An HTTP request without curl, which not every machine has. True when /health, which generates a token, answers 200.
answers() {
    local status=''
    { exec 3<>"/dev/tcp/$1/$2"; } 2>/dev/null || return 1
    printf 'GET /health HTTP/1.0\r\n\r\n' >&3 && read -t 30 -r status <&3
    exec 3>&-
    [[ "$status" == *' 200 '* ]]
}

port_is_taken() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# kill -0 also counts the dead that nobody has waited for yet, so states are read.
group_lives() {
    awk -v group="$1" '{ sub(/.*\) /, "") } $3 == group && $1 != "Z" { found = 1 } END { exit !found }' \
        < <(cat /proc/[0-9]*/stat 2>/dev/null)
}

# Ends process group GROUP, the server and whatever it started: asks, waits, then kills what is left.
end_group() {
    local group="$1" waited=0
    kill -TERM -- "-$group" 2>/dev/null || return 0
    while group_lives "$group" && ((waited++ < stop_grace * 5)); do sleep 0.2; done
    kill -KILL -- "-$group" 2>/dev/null || true
}

# Stops what --background started, and nothing else that has its number by now.
stop_server() {
    local pidfile="${log%.log}.pid" group started
    [[ -f "$pidfile" ]] || die "no server to stop: $pidfile, which --background writes, does not exist"
    read -r group started <"$pidfile"
    if [[ "$(started_at "$group")" == "$started" ]]; then
        end_group "$group"
        say "stopped the server, process $group"
    else
        say "the server, process $group, had ended already"
    fi
    rm -f "$pidfile"
}

# Ends GROUP as soon as process $1 or the group's leader is gone; outlives the script that starts it.
stop_group_with() {
    local watched="$1" group="$2" watched_start group_start
    watched_start="$(started_at "$watched")" group_start="$(started_at "$group")"
    (
        trap '' INT HUP TERM
        while [[ -n "$watched_start" && "$(started_at "$watched")" == "$watched_start" &&
            "$(started_at "$group")" == "$group_start" ]]; do
            sleep 1
        done
        end_group "$group"
    ) </dev/null >/dev/null 2>&1 &
}

die_of_the_server() {
    tail -n 40 -- "$log" >&2
    die "$1; the end of $log stands above"
}

wait_until_it_answers() {
    local group="$1" host="$2" next=10 begun=$SECONDS
    until answers "$host" "$port"; do
        [[ -n "$(started_at "$group")" ]] || die_of_the_server "the server ended before it answered"
        ((SECONDS - begun < timeout)) || die_of_the_server "the server did not answer within $timeout s and was stopped"
        if ((SECONDS - begun >= next)); then
            say "waiting for the server: $(tail -n 1 -- "$log" | tr -d '\r' | cut -c 1-120)"
            next=$((next + 10))
        fi
        sleep 0.5
    done
}

# run_server HOST COMMAND...: starts COMMAND, which must serve at HOST:$port, waits until it answers, and stays with it.
run_server() {
    local host="$1" group keeper
    shift
    if [[ -n "$dry_run" ]]; then
        printf '%q ' "$@"
        echo
        return
    fi
    # a server that listens everywhere is asked here
    [[ "$host" != 0.0.0.0 ]] || host=127.0.0.1
    ! port_is_taken "$host" "$port" || die "something serves port $port already; --port takes another number"
    mkdir -p -- "$(dirname -- "$log")"
    child_environment
    # a session of its own: one number names the server with all it starts, and Ctrl-C reaches this script alone
    setsid "$@" </dev/null >"$log" 2>&1 &
    group=$!
    trap 'trap "" INT TERM HUP; end_group "$group"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    stop_group_with $$ "$group"
    keeper=$!
    say "starting the server, process $group, log $log"
    wait_until_it_answers "$group" "$host"
    say "serving at http://$host:$port, process $group, log $log"
    [[ -z "$stop_with" ]] || stop_group_with "$stop_with" "$group"
    if [[ -n "$background" ]]; then
        echo "$group $(started_at "$group")" >"${log%.log}.pid"
        disown "$keeper"
        kill -KILL "$keeper"
        trap - EXIT
        return
    fi
    wait "$group" || true
    die_of_the_server "the server ended by itself"
}
