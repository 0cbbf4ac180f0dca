-- Stops the replication of an outbox: drops the slot, then the publication. This file is meant for
-- operators. Walpost never runs this file.
--
--   psql -v schema=public -v table=outbox -v publication=walpost_outbox -v slot=walpost_outbox -v role=walpost \
--        -f sql/teardown.sql
--
-- Stop `walpost run` first. Events that have not been delivered yet stay in the table, but will
-- never be delivered: a new slot delivers only events that are committed after it is created.
-- Dropping the slot can't be undone. In a message outbox (-v table=), undelivered events are lost
-- together with the slot. Safe to run again.
-- To remove what Walpost has recorded about a slot that no longer exists, set `publication` to an
-- empty string (-v publication=). The publication is then kept, because another pipeline may use it.
-- Run by: a superuser, or the owner of the publication if it may also drop slots (REPLICATION).
\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox
\endif
\if :{?publication}
\else
\set publication walpost_outbox
\endif
\if :{?slot}
\else
\set slot walpost_outbox
\endif
\if :{?role}
\else
\set role walpost
\endif

-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
\set examine 'slot_state table_state'
\ir examine.sql

SET walpost.slot = :'slot';

DO $walpost$
DECLARE
    name text := current_setting('walpost.slot');
    found pg_replication_slots;
BEGIN
    SELECT * INTO found FROM pg_replication_slots WHERE slot_name = name;
    IF found IS NULL THEN
        RAISE NOTICE 'slot % does not exist, skipping', name;
    ELSIF found.database IS DISTINCT FROM current_database() OR found.plugin <> 'pgoutput' THEN
        RAISE EXCEPTION 'slot % does not belong to this database or does not use pgoutput, so it was not dropped', name;
    ELSIF found.active THEN
        RAISE EXCEPTION 'slot % is in use by PID %', name, found.active_pid
            USING HINT = 'Stop the walpost run process that uses it.';
    ELSE
        PERFORM pg_catalog.pg_drop_replication_slot(name);
        RAISE NOTICE 'slot % dropped; it was confirmed up to %, and WAL ended at %',
            name, found.confirmed_flush_lsn, pg_current_wal_lsn();
    END IF;
END
$walpost$;

-- The slot's row is deleted from walpost.slot_state. Otherwise, if a new slot of the same name were
-- created, Walpost would report that another program had moved the slot. Walpost's tables are
-- examined again while they are locked, because a transaction that was still open when they were
-- first examined may have added a trigger.
SELECT coalesce(string_agg(c.relname, ' '), '') AS own_tables, count(*) > 0 AS has_own_tables
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'walpost'
    AND c.relname IN ('slot_state', 'table_state')
    AND c.relname = ANY (string_to_array(current_setting('walpost.examined'), ' '))
    AND has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
    AND has_table_privilege(c.oid, 'DELETE') \gset
\if :has_own_tables
BEGIN;
SELECT format('LOCK TABLE walpost.%I IN SHARE ROW EXCLUSIVE MODE', name)
    FROM unnest(string_to_array(:'own_tables', ' ')) AS name \gexec
\ir examine.sql
SELECT format('DELETE FROM walpost.%I WHERE slot = %L', name, :'slot')
    FROM unnest(string_to_array(:'own_tables', ' ')) AS name \gexec
COMMIT;
\endif

SELECT :'publication' <> '' AS is_publication, :'table' <> '' AS is_table \gset
\if :is_publication
DROP PUBLICATION IF EXISTS :"publication";
\endif

\echo 'Not removed: the outbox, its functions, schema walpost with the journal, and the role. To remove them too:'
\if :is_table
\echo '   ' DROP TABLE :"schema".:"table" ';'
\echo '   ' DROP FUNCTION IF EXISTS :"schema".walpost_no_update(), :"schema".walpost_uuidv7() ';'
\endif
\echo '   ' DROP SCHEMA IF EXISTS walpost CASCADE ';  -- if no other pipeline uses this database: the journal is for all of them'
\echo '   ' DROP OWNED BY :"role" '; -- in this database: its privileges'
\echo '   ' DROP ROLE :"role" ';     -- once it has no privileges left in any database'
