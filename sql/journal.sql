-- What Walpost keeps in the database.
-- The journal: what was done to a pipeline that WAL can't tell. Events that a person had skipped, that a dropped slot had
-- not delivered, that were copied at the start or sent again, and tables that are set aside.
-- The slot's state: one row a slot, with the last place that Walpost may have confirmed. A slot that is beyond it was moved,
-- or dropped and re-created, by somebody else.
-- The tables' state: one row for each slot and table, with what makes the table a part of the publication. If that is replaced,
-- rows may have been committed while the table was not published.
--
--   psql -f sql/journal.sql
--
-- Run by: a role with CREATE on the database; a second time, anybody. Twice without harm: an existing
-- table is examined, and used unchanged. The
-- tables serve all pipelines of the database. sql/role.sql lets Walpost's role read the journal and add to it, and do
-- neither UPDATE nor DELETE, and change the states of slots and tables. They are in no publication: what they say is no event.
\set ON_ERROR_STOP on
-- search_path is pg_catalog, pg_temp from here on, also for what the session does next.
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
            RAISE EXCEPTION 'table walpost.journal exists and lacks: %', missing
                USING HINT = 'ALTER TABLE walpost.journal RENAME TO journal_old; then run this again.';
        END IF;
    ELSE
        CREATE TABLE walpost.journal (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
            at timestamptz NOT NULL DEFAULT now(),
            pipeline text NOT NULL,
            slot text NOT NULL,
            action text NOT NULL CHECK (action IN ('snapshot', 'skip', 'drop slot', 'replay', 'set aside')),
            -- What it was done to: after from_lsn, up to to_lsn.
            from_lsn pg_lsn,
            to_lsn pg_lsn,
            by_role text NOT NULL DEFAULT session_user,
            detail jsonb NOT NULL DEFAULT '{}'
        );
        COMMENT ON TABLE walpost.journal IS 'What was done to the pipelines of Walpost that WAL can not tell';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'slot_state') THEN
        -- Half of each page stays free, so that an UPDATE needs no new index entry.
        CREATE TABLE walpost.slot_state (
            slot text PRIMARY KEY,
            pipeline text NOT NULL,
            -- Of the format of this row.
            version integer NOT NULL,
            -- The cluster, the database and the timeline that the LSNs are of: a copy of this table can be in another one.
            system_id text NOT NULL,
            database_oid oid NOT NULL,
            timeline integer NOT NULL,
            -- Where walpost init made the slot; NULL if something else did.
            created_lsn pg_lsn,
            -- Something was read from the slot.
            begun boolean NOT NULL,
            -- Nothing beyond this was confirmed by Walpost.
            confirmed_lsn pg_lsn NOT NULL,
            at timestamptz NOT NULL,
            -- Why the pipeline halted last: JSON, with the position that was confirmed then. If more was confirmed since, the
            -- pipeline has continued.
            halt text
        ) WITH (fillfactor = 50);
        COMMENT ON TABLE walpost.slot_state IS 'What Walpost has confirmed of its slots, to notice that one was moved or re-created';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'table_state') THEN
        CREATE TABLE walpost.table_state (
            slot text NOT NULL,
            table_schema text NOT NULL,
            table_name text NOT NULL,
            -- Of the format of this row.
            version integer NOT NULL,
            -- The cluster and the database that the OIDs are of: a copy of this table can be in another one.
            system_id text NOT NULL,
            database_oid oid NOT NULL,
            publication text NOT NULL,
            relation oid NOT NULL,
            -- OIDs in pg_publication_rel, pg_publication_namespace and pg_publication, each of which publishes the table.
            memberships text NOT NULL,
            -- The table was found unpublished, and was not found published since.
            is_out boolean NOT NULL,
            -- When the table was last found published: the position that the slot had confirmed, and the transaction id, with its
            -- epoch, below which everything had been delivered. NULL if unknown.
            seen_lsn pg_lsn,
            seen_xid text,
            -- The table had left the publication by here; NULL if it is published, or if that is unknown.
            out_lsn pg_lsn,
            at timestamptz NOT NULL,
            PRIMARY KEY (slot, table_schema, table_name)
        ) WITH (fillfactor = 50);
        COMMENT ON TABLE walpost.table_state IS 'How the tables of Walpost''s slots are published, to notice that one was not for a while';
    END IF;
END
$walpost$;

-- Another role can have created what did not exist at the top.
\set examine 'journal slot_state table_state present'
\ir examine.sql
COMMIT;
