-- Creates the replication slot, which stores Walpost's position in WAL. Every event committed after
-- the slot is created will be delivered.
--
--   PGOPTIONS='-c lock_timeout=10s' psql -v publication=walpost_outbox -v slot=walpost_outbox -f sql/slot.sql
--
-- Run by: a superuser or a role with REPLICATION. The session must be connected to the outbox's
-- database, and must not be in a transaction that has written. Safe to run again: an existing slot
-- of that name is examined but never changed.
--
-- The publication must exist first, because the server looks up the publication as it was at the
-- time of each change. If the slot is older than the publication, the server also decodes changes
-- from before the publication existed. Up to PostgreSQL 17, decoding such changes fails
-- permanently. Creating a slot waits for all open transactions to end. If lock_timeout expires
-- first, the command fails and leaves nothing behind. Since PostgreSQL 17, -v failover=', failover
-- => true' makes standbys keep a copy of the slot, so that it survives a failover. docs/standby.md
-- describes what else is required. `walpost init` creates such a slot unless --no-failover is
-- given. Once the slot exists, the server retains WAL until Walpost has confirmed it. Limit the
-- amount with max_slot_wal_keep_size, and drop the slot with teardown.sql when Walpost is no longer
-- used.
\set ON_ERROR_STOP on
\if :{?publication}
\else
\set publication walpost_outbox
\endif
\if :{?slot}
\else
\set slot walpost_outbox
\endif
\if :{?failover}
\else
\set failover ''
\endif

-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql

-- The objects are examined and used in one transaction. This transaction must not write anything,
-- because a slot can't be created in a transaction that has written.
BEGIN;
\ir prerequisites.sql
\set examine 'slot_state'
\ir examine.sql

SET walpost.publication = :'publication';
SET walpost.slot = :'slot';

DO $walpost$
DECLARE
    name text := current_setting('walpost.slot');
    publication text := current_setting('walpost.publication');
    -- The tables in the publication, if the publication is for several outboxes.
    tables text;
    only_tables text;
    add_again text;
    was_made boolean := false;
    -- Characters to replace in error messages: control characters, and characters that change the
    -- direction of text. psql prints messages unchanged, so a name that contains such characters
    -- could make a message look like a different one.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
BEGIN
    IF EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = name) THEN
        RETURN;
    ELSIF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = publication) THEN
        RAISE EXCEPTION 'publication % does not exist, but must exist before slot %', quote_ident(publication), name
            USING HINT = 'Run sql/publication.sql of Walpost in this database first';
    END IF;
    -- The suggested command uses ONLY. Without ONLY, removing a table fails if one of its children
    -- is not in the publication.
    SELECT string_agg(format('%I.%I', schemaname, tablename), ', '),
            string_agg(format('ONLY %I.%I', schemaname, tablename), ', '),
            string_agg(format('psql -v schema=%L -v table=%L -v publication=%L -f sql/add_outbox.sql;', schemaname, tablename, publication), ' ')
        INTO tables, only_tables, add_again FROM pg_publication_tables
        WHERE pubname = publication AND (schemaname, tablename) <> ('walpost', 'outbox_row')
            AND EXISTS (SELECT FROM pg_publication_tables
                WHERE pubname = publication AND schemaname = 'walpost' AND tablename = 'outbox_row');
    IF tables IS NULL THEN
        RETURN;
    END IF;
    -- If a slot existed before, under this name or another, the events that it had not delivered
    -- have been recorded, and `walpost replay` can resend them. This file can't determine which
    -- slots a pipeline has had, so any row in walpost.slot_state counts. walpost.slot_state is not
    -- read unless it was examined: if the table did not exist when the objects were examined, any
    -- role could have created it since.
    IF 'slot_state' = ANY (string_to_array(current_setting('walpost.examined'), ' ')) THEN
        IF NOT has_table_privilege('walpost.slot_state', 'SELECT') THEN
            RAISE EXCEPTION 'role % can''t read walpost.slot_state, which shows whether a slot existed before',
                quote_ident(current_user) USING ERRCODE = 'insufficient_privilege',
                    HINT = format('GRANT USAGE ON SCHEMA walpost TO %I; GRANT SELECT ON walpost.slot_state TO %1$I', current_user);
        END IF;
        was_made := EXISTS (SELECT FROM walpost.slot_state);
    END IF;
    IF NOT was_made THEN
        RAISE EXCEPTION 'publication % has tables, but slot %, which must deliver their existing rows, does not exist: %',
            quote_ident(publication), name, regexp_replace(tables, unprintable, '?', 'g') USING ERRCODE = 'object_not_in_prerequisite_state',
                DETAIL = 'The rows of a table are written into WAL for the slot when the table is added.',
                HINT = regexp_replace(format('Remove the tables, create the slot, and add them again, as walpost init does with '
                    'tables that match: ALTER PUBLICATION %I DROP TABLE %s; then run this again; then %s', publication, only_tables,
                    add_again), unprintable, '?', 'g');
    END IF;
END
$walpost$;

-- The slot is not created inside the DO block: while the server waits for a starting point, it
-- replays catalog changes made by other sessions. PL/pgSQL can then fail with "snapshot reference
-- is not owned by resource owner", leaving the slot behind.
SELECT pg_create_logical_replication_slot(:'slot', 'pgoutput':failover)
    WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = :'slot');
COMMIT;
