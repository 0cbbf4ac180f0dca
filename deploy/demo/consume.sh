#!/usr/bin/env bash
# Shows the shop's records as they arrive, and writes the partition, offset and id of each to a file for the report.
#
#   consume.sh HOST:PORT FILE CONSUMER...      CONSUMER is Kafka's console consumer, as a command
set -euo pipefail
# In this locale, [[:cntrl:]] also matches the control characters outside of ASCII.
export LC_ALL=C.UTF-8
bootstrap=$1
records=$2
shift 2

: >"$records"
tab=$'\t'
"$@" --bootstrap-server "$bootstrap" --topic outbox.event.order --from-beginning \
    --command-property allow.auto.create.topics=false \
    --formatter-property print.partition=true --formatter-property print.offset=true \
    --formatter-property print.headers=true --formatter-property print.key=true \
    --formatter-property "key.separator=$tab" |
    while IFS=$tab read -r partition offset headers key value; do
        partition=${partition#Partition:}
        offset=${offset#Offset:}
        id=,$headers
        id=${id#*,id:}
        id=${id%%,*}
        position=${headers#*walpost-position:}
        position=${position%%,*}
        printf -v line 'record: partition %s offset %3s  %s  %-6s %s' "$partition" "$offset" "$position" "$key" "$value"
        # A terminal would interpret control characters.
        printf '%s\n' "${line//[[:cntrl:]]/?}"
        printf '%s\t%s\t%s\n' "$partition" "$offset" "$id" >>"$records"
    done
