#!/usr/bin/env bash
# The demo on this machine: private servers in a temporary folder, Walpost between them, a shop, and a report. `./dev demo`
# builds the programs and starts this script.
#
#   run.sh WALPOST POSTGRES_BIN KAFKA_LIB      the binary, and the folders of the servers' programs
set -euo pipefail
# shellcheck source=deploy/demo/servers.sh
. "$(dirname "${BASH_SOURCE[0]}")/servers.sh" "$@"

# Walpost's database, and the address of its status page.
postgres=
http=
suspects=(postgres kafka init walpost shop consumer)
clients=(follow shop consumer walpost)

# Prints Walpost's status: a table, and problems below the table. Fails if there is a problem.
status() { "$walpost" status --postgres "$postgres" --http "$http"; }

sink_is_dead() {
    status >"$work/status" 2>&1 || true
    grep -q 'Kafka is unreachable' "$work/status"
}

# Kafka is killed while the shop is open, and restarted with its data.
outage() {
    await consumer test -s "$work/records"
    echo "demo: Kafka is killed, and the shop stays open"
    # The shell reports the killed process.
    stop kafka KILL 2>/dev/null || true
    await walpost sink_is_dead
    cat "$work/status"
    echo "demo: /readyz returns 503; if the outage lasts two minutes, the alert WalpostKafkaDown fires (docs/operations.md)"
    start_kafka
    await walpost status
    echo "demo: Kafka is back, and Walpost has resumed by itself"
    status
}

start_servers
export PGDATABASE=shop
createdb shop

echo "demo: walpost init"
"$walpost" init --postgres "postgresql://postgres@/shop?host=$PGHOST" >"$work/init.log" 2>&1 ||
    fail init "walpost init failed"
echo "demo: walpost run"
postgres="postgresql://walpost@/shop?host=$PGHOST"
start walpost "$walpost" run --postgres "$postgres" --kafka "$bootstrap" --create-topics 3:1 --http 127.0.0.1:0
await walpost grep streaming "$work/walpost.log"
http=$(grep -o 'http://[0-9.:]*' "$work/walpost.log" | head -n 1)
http=${http#http://}
echo "demo: the status page, while this script runs: http://$http"

: >"$work/records"
start consumer "$here/consume.sh" "$bootstrap" "$work/records" \
    "${jvm[@]}" org.apache.kafka.tools.consumer.ConsoleConsumer
start shop "$here/shop.sh"
# Shows only the lines for the user: the consumer also warns that its topic does not exist yet.
setsid bash -c 'tail -q -n +1 -f "$@" | grep --line-buffered -E "^(shop|record):"' - \
    "$work/shop.log" "$work/consumer.log" &
pid_of[follow]=$!

outage
shop=${pid_of[shop]}
wait "$shop" || fail shop "the shop failed"
unset "pid_of[shop]"
# Waits for the last record and ignores the result.
if runs walpost; then "$here/report.sh" "$work/records" >/dev/null || true; fi
stop follow TERM || true
echo "demo: walpost verify"
"$walpost" verify --postgres "$postgres" --kafka "$bootstrap" || fail walpost "walpost verify reported findings"
keep "$http" "psql -h $PGHOST -U postgres shop -c \"INSERT INTO outbox (aggregatetype, aggregateid, type, payload)" \
    "    VALUES ('order', '4711', 'OrderPlaced', '{}')\"" \
    "$walpost status --postgres '$postgres' --http $http"
stop walpost TERM || fail walpost "walpost exited with status $?"
# Walpost has exited, so the topic is complete: the report covers all records, including repeated ones.
records=$("${jvm[@]}" org.apache.kafka.tools.GetOffsetShell \
    --bootstrap-server "$bootstrap" --topic outbox.event.order |
    awk -F : '{ sum += $3 } END { print sum + 0 }')
"$here/report.sh" "$work/records" "$records" || fail walpost "not every event arrived exactly once and in order"
next_steps
