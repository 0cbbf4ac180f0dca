#!/usr/bin/env bash
# Customers buy concurrently, in transactions that are quick, slow, or rolled back. Requires the outbox table.
# Connects as psql does: PGHOST, PGUSER, PGDATABASE.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

sessions=6
transactions=10

query() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }

# Prints the transactions of session $1.
purchases() {
    local customers=(anna bela gina hans tina) items=(tea cup pot jam) step seed
    for ((step = 0; step < transactions; step++)); do
        seed=$((step * sessions + $1))
        echo "BEGIN;"
        echo "SELECT place_order('${customers[seed % 5]}', '${items[seed % 4]}') AS number \\gset"
        # Other transactions commit while this one is still open.
        ((seed % 3 != 0)) || echo "SELECT pg_sleep(0.1 + random() * 0.3);"
        ((seed % 4 != 1)) || echo "SELECT pay_order(:number);"
        ((seed % 7 != 2)) || echo "SAVEPOINT gift; SELECT place_order('anna', 'gift'); ROLLBACK TO gift;"
        if (((step + $1) % 6 == 5)); then echo "ROLLBACK;"; else echo "COMMIT;"; fi
        # A pause, so that the output can be followed.
        echo "SELECT pg_sleep(random() * 0.8);"
    done
}

# Two sessions of one customer. The order with the lower number commits last: a reader that polls for numbers above the
# last one that it has read would miss this order.
lower_number_commits_last() {
    local first second slow
    coproc SLOW { query; }
    # The shell unsets a coprocess's variables when the coprocess ends.
    slow=$SLOW_PID
    echo "BEGIN; SELECT place_order('anna', 'the slow one');" >&"${SLOW[1]}"
    read -r first <&"${SLOW[0]}"
    echo "shop: anna's order $first is placed, and its transaction stays open"
    second=$(query -c "SELECT place_order('anna', 'the quick one')")
    echo "shop: anna's order $second is placed and committed"
    echo "COMMIT; \\q" >&"${SLOW[1]}"
    wait "$slow"
    echo "shop: anna's order $first is committed, after order $second: so $second comes before $first below"
}

query -f shop.sql >/dev/null
echo "shop: $sessions sessions with $transactions transactions each, some slow, some rolled back"
running=()
for ((session = 0; session < sessions; session++)); do
    purchases "$session" | query >/dev/null &
    running+=($!)
done
lower_number_commits_last
for session in "${running[@]}"; do
    wait "$session"
done
echo "shop: closed"
