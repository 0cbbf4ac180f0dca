#!/usr/bin/env bash
# The demo on this machine: private servers in a temporary folder, Walpost between them, a shop, a verdict. `./dev demo` builds
# what it needs and starts it.
#
#   run.sh WALPOST POSTGRES_BIN KAFKA_LIB      the binary, and the folders of the servers' programs
set -euo pipefail
# shellcheck source=deploy/demo/servers.sh
. "$(dirname "${BASH_SOURCE[0]}")/servers.sh" "$@"

# Walpost's database, and where it says how it is.
postgres=
http=
suspects=(postgres kafka init walpost shop consumer)
clients=(follow shop consumer walpost)

# How Walpost is: a table, and below it what is wrong. Fails if anything is.
status() { "$walpost" status --postgres "$postgres" --http "$http"; }

sink_is_dead() {
    status >"$work/status" 2>&1 || true
    grep -q 'Kafka is unreachable' "$work/status"
}

# Kafka dies while the shop is open, and comes back with what it had.
outage() {
    await consumer test -s "$work/records"
    echo "demo: Kafka is killed, and the shop goes on"
    # The shell reports whoever was killed.
    stop kafka KILL 2>/dev/null || true
    await walpost sink_is_dead
    cat "$work/status"
    echo "demo: /readyz says 503; if it lasts for two minutes, the alert WalpostKafkaDown fires (docs/operations.md)"
    start_kafka
    await walpost status
    echo "demo: Kafka is back, and Walpost has gone on by itself"
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
echo "demo: how it is, for a browser, as long as this runs: http://$http"

: >"$work/records"
start consumer "$here/consume.sh" "$bootstrap" "$work/records" \
    "${jvm[@]}" org.apache.kafka.tools.consumer.ConsoleConsumer
start shop "$here/shop.sh"
# Only what they say for people: the consumer also warns that its topic isn't there yet.
setsid bash -c 'tail -q -n +1 -f "$@" | grep --line-buffered -E "^(shop|record):"' - \
    "$work/shop.log" "$work/consumer.log" &
pid_of[follow]=$!

outage
shop=${pid_of[shop]}
wait "$shop" || fail shop "the shop failed"
unset "pid_of[shop]"
# Waits for the last record, not for the verdict.
if runs walpost; then "$here/report.sh" "$work/records" >/dev/null || true; fi
stop follow TERM || true
echo "demo: walpost verify"
"$walpost" verify --postgres "$postgres" --kafka "$bootstrap" || fail walpost "walpost verify has found something"
keep "$http" "psql -h $PGHOST -U postgres shop -c \"INSERT INTO outbox (aggregatetype, aggregateid, type, payload)" \
    "    VALUES ('order', '4711', 'OrderPlaced', '{}')\"" \
    "$walpost status --postgres '$postgres' --http $http"
stop walpost TERM || fail walpost "walpost ended with status $?"
# Walpost is gone, so the topic is complete: the verdict is on all of it, also on what came twice.
records=$("${jvm[@]}" org.apache.kafka.tools.GetOffsetShell \
    --bootstrap-server "$bootstrap" --topic outbox.event.order |
    awk -F : '{ sum += $3 } END { print sum + 0 }')
"$here/report.sh" "$work/records" "$records" || fail walpost "not every event arrived exactly once and in order"
next_steps
