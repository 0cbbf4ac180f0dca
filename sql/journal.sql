-- The tables in which Walpost records its work in the database.
--
-- The journal contains operations on pipelines that can't be derived from WAL: events that an
-- operator skipped, that a dropped slot had not delivered, or that were copied by a snapshot or sent
-- again, and tables that were set aside.
--
-- The state of slots has one row for each slot, with the last position that Walpost may have
-- confirmed. A slot that is ahead of this position was moved, or dropped and re-created, by
-- something else.
--
-- The state of tables has one row for each slot and table, with the catalog entries that make the
-- table part of the publication. If these entries are replaced, rows may have been committed while
-- the table was not published.
--
--   psql -f sql/journal.sql
--
-- Run by: a role with CREATE on the database; a second time, any role. Safe to run again: an
-- existing table is examined, and used unchanged. The tables serve all pipelines of the database.
-- sql/role.sql allows Walpost's role to read the journal and add to it, but not to update or delete
-- entries, and to change the states of slots and tables. The tables are in no publication, because
-- their rows are not events.
\set ON_ERROR_STOP on
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
BEGIN;
\set examine 'journal slot_state table_state'
\ir examine.sql

DO $walpost$
DECLARE
    journal oid;
    missing text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'walpost') THEN
        CREATE SCHEMA walpost;
    END IF;
    SELECT c.oid INTO journal FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'journal';
    IF journal IS NOT NULL THEN
        SELECT string_agg(name, ', ') INTO missing
            FROM unnest('{id,at,pipeline,slot,action,from_lsn,to_lsn,by_role,detail}'::text[]) AS name
            WHERE NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = journal AND attname = name AND NOT attisdropped);
        IF missing IS NOT NULL THEN
            RAISE EXCEPTION 'table walpost.journal exists but lacks columns: %', missing
                USING HINT = 'ALTER TABLE walpost.journal RENAME TO journal_old; then run this again.';
        END IF;
    ELSE
        CREATE TABLE walpost.journal (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            at timestamptz NOT NULL DEFAULT now(),
            pipeline text NOT NULL,
            slot text NOT NULL,
            action text NOT NULL CHECK (action IN ('snapshot', 'skip', 'drop slot', 'replay', 'set aside')),
            -- The operation affects events after from_lsn, up to to_lsn.
            from_lsn pg_lsn,
            to_lsn pg_lsn,
            by_role text NOT NULL DEFAULT session_user,
            detail jsonb NOT NULL DEFAULT '{}'
        );
        COMMENT ON TABLE walpost.journal IS 'Operations on Walpost''s pipelines that cannot be derived from WAL';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'slot_state') THEN
        -- Half of each page stays free, so that an UPDATE needs no new index entry.
        CREATE TABLE walpost.slot_state (
            slot text PRIMARY KEY,
            pipeline text NOT NULL,
            -- Version of the format of this row.
            version integer NOT NULL,
            -- The cluster, database and timeline to which the LSNs belong, because this table may
            -- have been copied to another database.
            system_id text NOT NULL,
            database_oid oid NOT NULL,
            timeline integer NOT NULL,
            -- The position at which walpost init created the slot; NULL if something else created
            -- it.
            created_lsn pg_lsn,
            -- Whether anything was read from the slot.
            begun boolean NOT NULL,
            -- Walpost has not confirmed any later position.
            confirmed_lsn pg_lsn NOT NULL,
            at timestamptz NOT NULL,
            -- Why the pipeline last halted: JSON, with the confirmed position at the halt. If a
            -- later position has been confirmed since, the pipeline has continued.
            halt text
        ) WITH (fillfactor = 50);
        COMMENT ON TABLE walpost.slot_state IS 'The confirmed position of each of Walpost''s slots, to detect that a slot was moved or re-created';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'table_state') THEN
        CREATE TABLE walpost.table_state (
            slot text NOT NULL,
            table_schema text NOT NULL,
            table_name text NOT NULL,
            -- Version of the format of this row.
            version integer NOT NULL,
            -- The cluster and database to which the OIDs belong, because this table may have been
            -- copied to another database.
            system_id text NOT NULL,
            database_oid oid NOT NULL,
            publication text NOT NULL,
            relation oid NOT NULL,
            -- OIDs in pg_publication_rel, pg_publication_namespace and pg_publication, each of
            -- which publishes the table.
            memberships text NOT NULL,
            -- Whether the table was found unpublished, and has not been found published since.
            is_out boolean NOT NULL,
            -- When the table was last found published: the position that the slot had confirmed,
            -- and the transaction ID, with its epoch, below which everything had been delivered.
            -- NULL if unknown.
            seen_lsn pg_lsn,
            seen_xid text,
            -- A position at which the table had already left the publication; NULL if the table
            -- is published, or if the position is unknown.
            out_lsn pg_lsn,
            at timestamptz NOT NULL,
            PRIMARY KEY (slot, table_schema, table_name)
        ) WITH (fillfactor = 50);
        COMMENT ON TABLE walpost.table_state IS 'How the tables of Walpost''s slots are published, to detect that a table was temporarily not published';
    END IF;
END
$walpost$;

-- Another role may have created an object that did not exist when it was first examined.
\set examine 'journal slot_state table_state present'
\ir examine.sql
COMMIT;
