#!/usr/bin/env bash
# Compares what the consumer received with what the database committed. Fails unless every committed event arrived
# exactly once and in commit order.
#
#   report.sh FILE [RECORDS]      FILE was written by consume.sh; RECORDS is the final number of records in the topic
#
# Connects as psql does: PGHOST, PGUSER, PGDATABASE.
set -euo pipefail
records=$1
expected=${2:-}
patience_seconds=30
cd "$(dirname "${BASH_SOURCE[0]}")"

judge() { psql -XqAt -F ' ' -v ON_ERROR_STOP=1 -f report.sql <"$records"; }

# Succeeds if more records are expected.
incomplete() { if [[ -n $expected ]]; then ((delivered < expected)); else ((missing > 0)); fi; }

SECONDS=0
while
    figures=$(judge)
    read -r committed delivered missing repeated disordered unknown <<<"$figures"
    incomplete && ((SECONDS < patience_seconds))
do
    sleep 0.3
done

printf '\n%16s\n' 'shop to Kafka'
printf '%-16s %6d\n' committed "$committed" delivered "$delivered" missing "$missing" repeated "$repeated" \
    'out of order' "$disordered" 'never committed' "$unknown"
((committed > 0 && missing + repeated + disordered + unknown == 0))
