-- Compares the records on standard input (partition, offset, id) with the committed events in the slot demo_witness.
-- Prints one row of counts: committed, delivered, missing, repeated, out of order, never committed.
BEGIN;

CREATE TEMPORARY TABLE received (partition int, "offset" bigint, id uuid) ON COMMIT DROP;
\copy received FROM pstdin

-- A consumer that has lost its connection to a broker may print a record twice, so lines with the
-- same partition and offset are merged.
WITH delivered AS (
    SELECT DISTINCT partition, "offset", id FROM received
), committed AS (
    -- test_decoding returns transactions in commit order. Peeking does not consume them, so the
    -- next report includes them too.
    SELECT substring(data FROM 'id\[uuid\]:''([^'']+)''')::uuid AS id, nth
    FROM pg_logical_slot_peek_changes('demo_witness', NULL, NULL) WITH ORDINALITY AS change (lsn, xid, data, nth)
    WHERE data LIKE 'table public.outbox: INSERT:%'
), first_delivery AS (
    SELECT DISTINCT ON (id) id, partition, "offset" FROM delivered ORDER BY id, partition, "offset"
), in_partition AS (
    SELECT nth, max(nth) OVER (
        PARTITION BY partition ORDER BY "offset" ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS highest_before
    FROM first_delivery JOIN committed USING (id)
)
SELECT (SELECT count(*) FROM committed),
    (SELECT count(*) FROM delivered),
    (SELECT count(*) FROM committed WHERE id NOT IN (SELECT id FROM delivered)),
    (SELECT count(*) FROM delivered) - (SELECT count(*) FROM first_delivery),
    (SELECT count(*) FROM in_partition WHERE nth < highest_before),
    (SELECT count(*) FROM first_delivery WHERE id NOT IN (SELECT id FROM committed));

COMMIT;
