-- Creates the tables in which Walpost stores its own state.
--
-- walpost.journal contains operations that can't be reconstructed from WAL: events that an operator skipped or resent,
-- events that a dropped slot had not delivered, rows that a snapshot copied, and tables that were set aside.
--
-- walpost.slot_state has one row per slot, with the highest position that Walpost may have
-- confirmed. If a slot is ahead of that position, something other than Walpost has advanced it, or
-- has dropped and re-created it.
--
-- walpost.table_state has one row per slot and table, with the OIDs of the catalog entries that put
-- the table in the publication. If these entries have been replaced, rows may have been committed
-- while the table was not published.
--
--   psql -f sql/journal.sql
--
-- Run by: a role with CREATE on the database. Any role may run it again: existing tables are
-- examined but not changed. All pipelines in the database share the tables. sql/role.sql allows
-- Walpost's role to read the journal and to add entries, but not to change or delete entries.
-- Walpost's role may also change the rows of walpost.slot_state and walpost.table_state. None of
-- the tables belongs to a publication, because their rows are not events.
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
            -- The operation affects events at positions after from_lsn, up to and including to_lsn.
            from_lsn pg_lsn,
            to_lsn pg_lsn,
            by_role text NOT NULL DEFAULT session_user,
            detail jsonb NOT NULL DEFAULT '{}'
        );
        COMMENT ON TABLE walpost.journal IS 'Operations on Walpost''s pipelines that cannot be derived from WAL';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'slot_state') THEN
        -- Half of each page is left free for HOT updates, which add no index entries.
        CREATE TABLE walpost.slot_state (
            slot text PRIMARY KEY,
            -- The pipeline to which the slot belongs. If a pipeline is defined by a row of a query,
            -- it uses only slots that belong to it.
            pipeline text NOT NULL,
            -- The version of the format of this row.
            version integer NOT NULL,
            -- The cluster, database and timeline to which the LSNs belong. These columns reveal
            -- whether the row was copied from another database.
            system_id text NOT NULL,
            database_oid oid NOT NULL,
            timeline integer NOT NULL,
            -- The position at which `walpost init` created the slot. NULL if the slot was created
            -- in another way.
            created_lsn pg_lsn,
            -- Whether anything has been read from the slot.
            begun boolean NOT NULL,
            -- The highest position that Walpost may have confirmed. The position that was actually
            -- confirmed may be lower.
            confirmed_lsn pg_lsn NOT NULL,
            at timestamptz NOT NULL,
            -- The reason why the pipeline last halted, as JSON that includes the position confirmed
            -- at that time. If a later position has been confirmed since, the pipeline has resumed.
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
            -- The version of the format of this row.
            version integer NOT NULL,
            -- The cluster and database to which the OIDs belong. These columns reveal whether the
            -- row was copied from another database.
            system_id text NOT NULL,
            database_oid oid NOT NULL,
            publication text NOT NULL,
            relation oid NOT NULL,
            -- The OIDs of all entries in pg_publication_rel, pg_publication_namespace and
            -- pg_publication that put the table in the publication.
            memberships text NOT NULL,
            -- True if it is known that, at some time after Walpost last found the table in the
            -- publication, the publication did not contain the table.
            is_out boolean NOT NULL,
            -- The slot's confirmed position when Walpost last found the table published, and a
            -- transaction ID that includes its epoch. At that time, all transactions with lower IDs
            -- had been delivered. NULL if unknown.
            seen_lsn pg_lsn,
            seen_xid text,
            -- A position at which the table had already been removed from the publication. NULL if
            -- the table is published, or if the position is unknown.
            out_lsn pg_lsn,
            at timestamptz NOT NULL,
            -- The OIDs of the tables whose rows are allowed to be published under this name: the
            -- tables that had this name when they were first recorded, the tables that
            -- walpost.add_outbox added under this name, and the tables that were passed to walpost
            -- init --table.
            accepted_for text,
            PRIMARY KEY (slot, table_schema, table_name)
        ) WITH (fillfactor = 50);
        COMMENT ON TABLE walpost.table_state IS 'How the tables of Walpost''s slots are published, to detect that a table was temporarily not published';
    END IF;
END
$walpost$;

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\set examine 'journal slot_state table_state present'
\ir examine.sql
COMMIT;
