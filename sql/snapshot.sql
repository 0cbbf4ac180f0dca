-- Records whether the outbox contains rows that are older than its slot. `walpost run` delivers
-- such rows before it starts streaming.
--
--   psql -v pipeline=outbox -v schema=public -v table=outbox -v slot=walpost_outbox -f sql/snapshot.sql
--
-- Run by: a role that may read the outbox and add to the journal. Run journal.sql and slot.sql
-- first. Safe to run again: existing entries are kept.
--
-- The slot's stream does not contain rows that were committed before the slot was created. Unless
-- snapshot = "never", `walpost run` first copies these rows, together with all rows committed by
-- the time it starts. If the table is empty when the slot has just been created, there is nothing
-- to copy, and all events come from the stream, in commit order. If events have already been
-- streamed from the slot, nothing is copied either. This file adds a journal entry that states
-- whether rows have to be copied. Until these rows have been copied, `walpost run` rejects a
-- pipeline definition that would skip them.
\set ON_ERROR_STOP on
\if :{?pipeline}
\else
\set pipeline outbox
\endif
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox
\endif
\if :{?slot}
\else
\set slot walpost_outbox
\endif

-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql

-- PREPARE locks walpost.journal, so no other session can add a trigger to the table after the table
-- has been examined and before the INSERT runs.
BEGIN;
PREPARE walpost_journal AS INSERT INTO walpost.journal (pipeline) VALUES (NULL);
DEALLOCATE walpost_journal;
\set examine 'journal slot_state present read'
\ir examine.sql

SET walpost.pipeline = :'pipeline';
SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.slot = :'slot';

DO $walpost$
DECLARE
    name text := current_setting('walpost.pipeline');
    outbox_name text := current_setting('walpost.table_name');
    outbox text := format('%I.%I', current_setting('walpost.schema'), outbox_name);
    its_slot text := current_setting('walpost.slot');
    confirmed pg_lsn;
    its_detail jsonb := jsonb_build_object('table', outbox);
    why text;
    has_rows boolean;
    was_read boolean;
BEGIN
    -- A message outbox has no rows to copy. The journal is searched by slot, because the pipeline may have been renamed
    -- since the copy was started.
    IF outbox_name = '' OR EXISTS (SELECT FROM walpost.journal j
        WHERE j.slot = its_slot AND j.action = 'snapshot' AND j.detail ->> 'state' IS DISTINCT FROM 'due') THEN
        RETURN;
    END IF;
    SELECT confirmed_flush_lsn INTO STRICT confirmed FROM pg_replication_slots WHERE slot_name = its_slot;
    was_read := EXISTS (SELECT FROM pg_stat_replication_slots WHERE slot_name = its_slot AND total_txns > 0);
    -- If `walpost run` failed before it confirmed any position, the slot has not changed since
    -- `walpost init` created it.
    IF was_read AND has_table_privilege('walpost.slot_state', 'SELECT') THEN
        was_read := NOT EXISTS (SELECT FROM walpost.slot_state s WHERE s.slot = its_slot AND NOT s.begun AND s.created_lsn = confirmed
            AND s.system_id = (SELECT system_identifier::text FROM pg_control_system())
            AND s.database_oid = (SELECT oid FROM pg_database WHERE datname = current_database()));
    END IF;
    IF was_read THEN
        why := 'streamed before';
    ELSE
        SELECT coalesce(sum(pg_relation_size(relid)), 0) > 0 INTO has_rows FROM (
            SELECT outbox::regclass AS relid UNION SELECT relid FROM pg_partition_tree(outbox::regclass)) AS parts;
        -- If querying the table could run other roles' code as the current role, the table is not
        -- queried. `walpost run` will examine the table later.
        IF has_rows AND current_setting('walpost.code_of_others') = '' THEN
            EXECUTE format('SELECT EXISTS (SELECT FROM %s AS t)', outbox) INTO has_rows;
        END IF;
        IF has_rows THEN
            RAISE NOTICE 'table % has rows that may be older than slot %: walpost run delivers these rows first', outbox, its_slot
                USING HINT = 'If they were already delivered, or must not be delivered, set snapshot = "never".';
            -- The OIDs and the position are valid only in this cluster. The cluster's system
            -- identifier is recorded too, because the journal may later be restored in another
            -- cluster. The partitions are recorded, because the copy can't include partitions that
            -- are detached before it starts.
            its_detail := its_detail || jsonb_build_object('state', 'due', 'relation', outbox::regclass::oid::text,
                'partitions', (WITH RECURSIVE descendant (oid) AS (
                    SELECT inhrelid FROM pg_inherits WHERE inhparent = outbox::regclass AND NOT inhdetachpending
                    UNION SELECT i.inhrelid FROM pg_inherits i JOIN descendant d ON i.inhparent = d.oid WHERE NOT i.inhdetachpending)
                    SELECT coalesce(jsonb_agg(oid::text ORDER BY oid), '[]') FROM descendant),
                'system_id', (SELECT system_identifier::text FROM pg_control_system()));
            IF EXISTS (SELECT FROM walpost.journal j WHERE j.slot = its_slot AND j.action = 'snapshot' AND j.to_lsn = confirmed
                AND j.detail = its_detail) THEN
                RETURN;
            END IF;
        ELSE
            why := 'empty table';
        END IF;
    END IF;
    INSERT INTO walpost.journal (pipeline, slot, action, to_lsn, detail) VALUES (name, its_slot, 'snapshot', confirmed,
        its_detail || CASE WHEN why IS NULL THEN '{}' ELSE jsonb_build_object('state', 'done', 'why', why) END);
END
$walpost$;
COMMIT;
