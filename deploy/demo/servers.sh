# Private servers in a temporary folder, for the demos on this machine. Everything is removed when a demo ends, even if it
# fails.
# Source this file with the arguments WALPOST POSTGRES_BIN KAFKA_LIB: the binary, and the folders of the servers' programs. The
# sourcing script sets `suspects`, whose logs are shown after a failure, and `clients`, which are stopped before the servers.
# shellcheck shell=bash
set -euo pipefail
umask 022
# shellcheck disable=SC2034  # used by the sourcing script
walpost=$(realpath "$1")
postgres_bin=$(realpath "$2")
kafka_lib=$(realpath "$3")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
kafka_settings=$here/../../tests/support/kafka
# The servers' account may not be able to enter the current folder.
cd /
patience_seconds=60

# PostgreSQL refuses to run as root. Unlike runuser, setpriv leaves no intermediate process that would have to be stopped.
as_server=()
((EUID != 0)) || as_server=(setpriv --reuid=postgres --regid=postgres --init-groups)

# A folder that the servers' account can enter, with a path short enough for a Unix-domain socket (107 bytes).
work=
for base in "${TMPDIR:-/tmp}" /tmp; do
    work=$(mktemp -d "$base/walpost-demo.XXXXXX")
    chmod 755 "$work"
    if ((${#work} < 80)) && "${as_server[@]}" test -x "$work"; then break; fi
    rm -rf "$work"
    work=
done
[[ -n $work ]] || { echo "demo: no temporary folder that the account postgres can enter" >&2; exit 1; }

declare -A pid_of=()

# Starts each process in its own session, so that Ctrl-C reaches only this script, which then stops them in order.
start() { # NAME COMMAND...
    local name=$1
    shift
    setsid "$@" >"$work/$name.log" 2>&1 </dev/null &
    pid_of[$name]=$!
}

runs() { kill -0 "${pid_of[$1]}" 2>/dev/null; }

# Returns the process's exit status. A process that ignores the signal is killed.
stop() { # NAME SIGNAL
    local name=$1 pid=${pid_of[$1]} deadline=$((SECONDS + 15))
    kill -s "$2" -- "-$pid" 2>/dev/null || true
    while runs "$name"; do
        if ((SECONDS >= deadline)); then kill -s KILL -- "-$pid" 2>/dev/null || true; fi
        sleep 0.05
    done
    unset "pid_of[$name]"
    wait "$pid"
}

# shellcheck disable=SC2329  # called by the traps below
clean_up() {
    local status=$? name
    trap - EXIT
    trap '' INT TERM HUP
    if ((status != 0 && status < 128)); then
        for name in "${suspects[@]}"; do
            [[ -s $work/$name.log ]] || continue
            printf -- '--- last lines of %s.log\n' "$name" >&2
            tail -n 20 "$work/$name.log" >&2
        done
    fi
    # Stop the clients before their servers.
    # shellcheck disable=SC2154  # set by the sourcing script
    for name in "${clients[@]}" kafka postgres; do
        [[ -z ${pid_of[$name]:-} ]] || stop "$name" "$([[ $name == postgres ]] && echo INT || echo TERM)" || true
    done
    rm -rf "$work"
    exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

fail() { # LOG MESSAGE
    suspects=("$1")
    echo "demo: $2" >&2
    exit 1
}

# Waits until the command in the remaining arguments succeeds.
await() { # SERVER COMMAND...
    local server=$1 deadline=$((SECONDS + patience_seconds))
    shift
    until "$@" >/dev/null 2>&1; do
        runs "$server" || fail "$server" "$server has exited"
        ((SECONDS < deadline)) || fail "$server" "$server is not ready after $patience_seconds s"
        sleep 0.1
    done
}

free_port() {
    local port
    while port=$((20000 + RANDOM % 10000)) && (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
    echo "$port"
}

# The start of each Kafka command line. The programs run for seconds, so only the fast compiler is used.
jvm=(java -XX:TieredStopAtLevel=1 -XX:-UsePerfData "-Dlog4j2.configurationFile=$work/log4j2.properties"
    -cp "$kafka_lib/*")

start_postgres() {
    "${as_server[@]}" mkdir "$work/postgres/socket"
    "${as_server[@]}" "$postgres_bin/initdb" -D "$work/postgres/data" -U postgres -A trust -N \
        --encoding=UTF8 --locale=C >"$work/postgres.log" 2>&1 || fail postgres "initdb failed"
    start postgres "${as_server[@]}" "$postgres_bin/postgres" -D "$work/postgres/data" \
        -k "$work/postgres/socket" -c listen_addresses= -c wal_level=logical -c log_min_error_statement=panic
}

format_kafka() {
    local port=$1 controller
    controller=$(free_port)
    while [[ $controller == "$port" ]]; do controller=$(free_port); done
    {
        cat "$kafka_settings/server.properties"
        echo "controller.quorum.voters=1@127.0.0.1:$controller"
        echo "listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$controller"
        echo "advertised.listeners=PLAINTEXT://127.0.0.1:$port"
        echo "log.dirs=$work/kafka/data"
    } >"$work/server.properties"
    "${as_server[@]}" "${jvm[@]}" kafka.tools.StorageTool format -t walpost-demo-walpost-A \
        -c "$work/server.properties" >"$work/kafka.log" 2>&1 || fail kafka "Kafka's storage can't be formatted"
}

start_kafka() {
    start kafka "${as_server[@]}" "${jvm[@]:0:1}" -Xms256m -Xmx256m "${jvm[@]:1}" \
        kafka.Kafka "$work/server.properties"
}

# Starts both servers on free ports, sets PGHOST and PGUSER for PostgreSQL, and `bootstrap` to Kafka's address.
start_servers() {
    local port
    echo "demo: starting $("$postgres_bin/postgres" --version) and Kafka"
    cp "$kafka_settings/log4j2.properties" "$work/"
    mkdir "$work/postgres" "$work/kafka"
    # PostgreSQL trusts every user who can reach its socket.
    chmod 700 "$work/postgres"
    ((EUID != 0)) || chown postgres "$work/postgres" "$work/kafka"
    start_postgres
    port=$(free_port)
    format_kafka "$port"
    start_kafka
    # shellcheck disable=SC2034  # used by the sourcing script
    bootstrap=127.0.0.1:$port
    export PGHOST=$work/postgres/socket PGUSER=postgres
    unset PGDATABASE PGPORT PGPASSWORD PGSERVICE PGOPTIONS PGSSLMODE PGHOSTADDR
    await postgres pg_isready -q -d postgres
    await kafka grep 'Kafka Server started' "$work/kafka.log"
}

# With ./dev demo --keep, keeps everything running until Ctrl-C and prints commands to try in the meantime.
keep() { # HTTP COMMAND...
    local http=$1
    shift
    [[ -n ${WALPOST_DEMO_KEEP:-} ]] || return 0
    printf '\ndemo: everything runs until Ctrl-C. The status page: http://%s\ndemo: try this in another terminal:\n' "$http"
    printf '  %s\n' "$@"
    while runs walpost; do sleep 1; done
    fail walpost "walpost has exited"
}

next_steps() {
    echo "demo: to continue with your own database, see the quick start in README.md, and docs/deploy.md"
}
