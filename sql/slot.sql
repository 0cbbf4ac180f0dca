-- The replication slot: Walpost's place in WAL. What is committed from now on is delivered.
--
--   PGOPTIONS='-c lock_timeout=10s' psql -v publication=walpost_outbox -v slot=walpost_outbox -f sql/slot.sql
--
-- Run by: a superuser or a role with REPLICATION, in the outbox's database, not inside a transaction that has written.
-- Twice without harm: a slot of that name that is there already is examined, never changed.
--
-- The publication must be there first: it is looked up as of each change in WAL, and a slot that is older than its
-- publication meets changes from before it, which up to PostgreSQL 17 is an error for ever.
-- Making a slot waits until every transaction that is open at that moment has ended. With lock_timeout it gives up
-- instead, and leaves nothing behind.
-- From PostgreSQL 17 on, -v failover=', failover => true' has a standby keep a copy of the slot, so that it follows a failover;
-- docs/standby.md has what else that takes. `walpost init` does it unless --no-failover is given.
-- From here on the server retains WAL until Walpost has confirmed it: bound that with max_slot_wal_keep_size, and
-- drop the slot with teardown.sql when Walpost is to go for good.
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

-- search_path is pg_catalog from here on, also for what the session does next.
\ir session.sql

\ir prerequisites.sql

SET walpost.publication = :'publication';
SET walpost.slot = :'slot';

DO $walpost$
DECLARE
    name text := current_setting('walpost.slot');
BEGIN
    IF NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = name)
        AND NOT EXISTS (SELECT FROM pg_publication WHERE pubname = current_setting('walpost.publication')) THEN
        RAISE EXCEPTION 'publication % does not exist, and must be there before slot %',
            quote_ident(current_setting('walpost.publication')), name
            USING HINT = 'Run sql/publication.sql first.';
    END IF;
END
$walpost$;

-- Not inside the DO block: while a slot waits for its starting point it replays other sessions' catalog changes, and
-- PL/pgSQL can then fail with "snapshot reference is not owned by resource owner", leaving the slot behind.
SELECT pg_create_logical_replication_slot(:'slot', 'pgoutput':failover)
    WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = :'slot');
