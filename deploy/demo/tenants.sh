#!/usr/bin/env bash
# Many outboxes on this machine, in one Walpost: a database with 20 tenants on one slot, each with an outbox in its own schema,
# and three other databases. Under load, a tenant is added and another is dropped, and a pipeline is added by a file and another
# is restarted. At the end, the records are counted. `./dev demo tenants` builds the programs and starts this script.
#
#   tenants.sh WALPOST POSTGRES_BIN KAFKA_LIB      the binary, and the folders of the servers' programs
set -euo pipefail
# shellcheck source=deploy/demo/servers.sh
. "$(dirname "${BASH_SOURCE[0]}")/servers.sh" "$@"

suspects=(postgres kafka init walpost)
clients=(walpost)
config=$work/walpost.toml
tenants=20

query() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }
url() { echo "postgresql://postgres@/$1?host=$PGHOST"; }
say() { echo "demo: $*"; }

# Creates the objects of a pipeline; with --table, one of several tables.
init() { # CONFIG PIPELINE [ARGS...]
    local config=$1 pipeline=$2
    shift 2
    "$walpost" init --config "$config" --pipeline "$pipeline" --no-role "$@" >>"$work/init.log" 2>&1 ||
        fail init "walpost init of pipeline $pipeline failed"
}

pipeline() { # NAME
    cat <<TOML
[[pipeline]]
name = "$1"
postgres = "$(url "$1")"
topic = "$1"
create_topics = { partitions = 1 }
TOML
}

# Writes transactions to an outbox until the file `stop`, or the outbox's own stop file, exists. Each transaction has three
# events; every fifth is rolled back.
write() { # DATABASE TABLE
    local number=0
    while [[ ! -e $work/stop && ! -e $work/stop.$2 ]]; do
        number=$((number + 1))
        echo "BEGIN; INSERT INTO $2 (aggregatetype, aggregateid, type, payload)
            SELECT 'order', 'order-$number', 'Placed', jsonb_build_object('line', line) FROM generate_series(1, 3) line;"
        if ((number % 5 == 0)); then echo "ROLLBACK;"; else echo "COMMIT;"; fi
        sleep "0.$((RANDOM % 10))"
    done | query -d "$1" >/dev/null
}

committed() { query -d "$1" -c "SELECT count(*) FROM $2"; } # DATABASE TABLE

# Prints the number of records in a topic.
delivered() { # TOPIC
    awk -F : -v topic="$1" '$1 == topic { sum += $3 } END { print sum + 0 }' "$work/offsets"
}

# Prints how often a pipeline has started streaming.
streams() { grep -c "streaming.*pipeline=\"\?$1\b\|pipeline=\"\?$1\b.*streaming" "$work/walpost.log" || true; }
streams_again() { (($(streams "$1") >= $2)); }

start_servers
for database in saas billing shipping support; do createdb "$database"; done
mkdir "$work/pipelines.d"
{
    cat <<TOML
control = "$work/control.sock"
[kafka]
"bootstrap.servers" = "$bootstrap"
[[fleet.source]]
directory = "pipelines.d"
[[pipeline]]
name = "saas"
postgres = "$(url saas)"
tables = ["tenant_*.outbox"]
topic = "{table.schema}"
create_topics = { partitions = 1 }
TOML
    for database in billing shipping; do pipeline "$database"; done
} >"$config"

say "walpost init: one slot for the $tenants tenants of a database, and one for each of two other databases"
init "$config" saas
for ((tenant = 1; tenant <= tenants; tenant++)); do
    query -d saas -c "CREATE SCHEMA tenant_$tenant"
    init "$config" saas --table "tenant_$tenant.outbox"
done
for database in billing shipping; do init "$config" "$database"; done

say "walpost run: three pipelines"
start walpost "$walpost" run --config "$config" --http 127.0.0.1:0
for name in saas billing shipping; do await walpost streams_again "$name" 1; done
http=$(grep -o 'http://[0-9.:]*' "$work/walpost.log" | head -n 1)
http=${http#http://}
say "the status page, while this script runs: http://$http"
sender() { query -d postgres -c "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'walpost_$1'"; }
before=$(sender saas)

for ((tenant = 1; tenant <= tenants; tenant++)); do write saas "tenant_$tenant.outbox" & done
for database in billing shipping; do write "$database" public.outbox & done
sleep 3

say "a tenant with two older events is added to the publication"
query -d saas -c "CREATE SCHEMA tenant_new; CREATE TABLE tenant_new.outbox (LIKE tenant_1.outbox INCLUDING ALL);
    INSERT INTO tenant_new.outbox (aggregatetype, aggregateid, type, payload)
    SELECT 'order', 'older', 'Placed', '{}' FROM generate_series(1, 2)"
init "$config" saas --table tenant_new.outbox
write saas tenant_new.outbox &

say "a tenant is dropped"
touch "$work/stop.tenant_7.outbox"
sleep 2
of_dropped=$(committed saas tenant_7.outbox)
PGOPTIONS='-c client_min_messages=warning' query -d saas -c "DROP SCHEMA tenant_7 CASCADE"

say "a pipeline is added by a file in pipelines.d"
pipeline support >"$work/support.toml"
init "$work/support.toml" support
mv "$work/support.toml" "$work/pipelines.d/"
await walpost streams_again support 1
write support public.outbox &

say "walpost pipeline restart billing"
"$walpost" pipeline restart billing --config "$config"
await walpost streams_again billing 2

sleep 2
touch "$work/stop"
while jobs -r | grep -q 'write '; do sleep 0.1; done
say "walpost status"
"$walpost" status --config "$config" --http "$http"
[[ $(sender saas) == "$before" ]] || fail walpost "the tenants' pipeline was restarted"
keep "$http" "psql -h $PGHOST -U postgres saas -c \"INSERT INTO tenant_1.outbox (aggregatetype, aggregateid, type, payload)" \
    "    VALUES ('order', '4711', 'OrderPlaced', '{}')\"" "$walpost pipeline list --config $config"
stop walpost TERM || fail walpost "walpost exited with status $?"
"${jvm[@]}" org.apache.kafka.tools.GetOffsetShell --bootstrap-server "$bootstrap" >"$work/offsets" 2>>"$work/kafka.log"

printf '\n%-16s %9s %9s\n' topic committed delivered
wrong=0
count() { # TOPIC COMMITTED
    local records
    records=$(delivered "$1")
    printf '%-16s %9d %9d\n' "$1" "$2" "$records"
    (($2 > 0 && $2 == records)) || wrong=$((wrong + 1))
}
for ((tenant = 1; tenant <= tenants; tenant++)); do
    if ((tenant == 7)); then
        count tenant_7 "$of_dropped"
    else
        count "tenant_$tenant" "$(committed saas "tenant_$tenant.outbox")"
    fi
done
count tenant_new "$(committed saas tenant_new.outbox)"
for database in billing shipping support; do count "$database" "$(committed "$database" public.outbox)"; done
((wrong == 0)) || fail walpost "$wrong topics do not contain exactly the committed events"
say "each event was delivered once; the tenants' pipeline used the same walsender from beginning to end"
next_steps
