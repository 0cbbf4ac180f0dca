-- The journal: what was done to a pipeline that the write-ahead log can't tell. Events that a person had skipped, that
-- were given up, copied at the start or sent again.
--
--   psql -f sql/journal.sql
--
-- Run by: a role with CREATE on the database; a second time, anybody. Twice without harm: a journal that is there
-- already is examined, never changed. One serves all pipelines of the database. sql/role.sql lets Walpost's role read it and
-- add to it, and do neither UPDATE nor DELETE. It is in no publication: what it says is no event.
\set ON_ERROR_STOP on

DO $walpost$
DECLARE
    journal oid;
    missing text;
BEGIN
    SELECT c.oid INTO journal FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND c.relname = 'journal';
    IF journal IS NOT NULL THEN
        SELECT string_agg(name, ', ') INTO missing
            FROM unnest('{id,at,pipeline,slot,action,from_lsn,to_lsn,by_role,detail}'::text[]) AS name
            WHERE NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = journal AND attname = name AND NOT attisdropped);
        IF missing IS NOT NULL THEN
            RAISE EXCEPTION 'table walpost.journal exists and lacks: %', missing
                USING HINT = 'Give it another name, and run this again.';
        END IF;
        RETURN;
    END IF;
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = 'walpost') THEN
        CREATE SCHEMA walpost;
    END IF;
    CREATE TABLE walpost.journal (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        at timestamptz NOT NULL DEFAULT now(),
        pipeline text NOT NULL,
        slot text NOT NULL,
        action text NOT NULL CHECK (action IN ('snapshot', 'skip', 'let go', 'replay')),
        -- What it was done to: after from_lsn, up to to_lsn.
        from_lsn pg_lsn,
        to_lsn pg_lsn,
        by_role text NOT NULL DEFAULT session_user,
        detail jsonb NOT NULL DEFAULT '{}'
    );
    COMMENT ON TABLE walpost.journal IS 'What was done to the pipelines of Walpost that the log can not tell';
END
$walpost$;
