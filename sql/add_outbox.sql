-- Adds a table to the outboxes of a publication, with the rows that it has: walpost.add_outbox of tables.sql, once it is certain
-- that no code of others runs.
--
--   psql -v schema=tenant_42 -v table=outbox -v publication=walpost_tenants -f sql/add_outbox.sql
--
-- Run by: who owns the publication and the table, or a superuser; after the slot is there, which delivers the rows. Twice without
-- harm: a table that is in the publication stays as it is.
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
-- search_path is pg_catalog from here on, also for what the session does next (examine.sql says why).
SET search_path = pg_catalog;
SET row_security = off;

-- What is examined is locked by this against what would change it before it is used.
BEGIN;
LOCK TABLE :"schema".:"table" IN SHARE ROW EXCLUSIVE MODE;
LOCK TABLE walpost.outbox_row IN ROW EXCLUSIVE MODE;
\set examine 'owners outbox_row read'
\ir examine.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.publication = :'publication';

DO $walpost$
DECLARE
    outbox text := format('%I.%I', current_setting('walpost.schema'), current_setting('walpost.table_name'));
    added int8;
BEGIN
    -- Of a table that is in the publication no row is read.
    IF current_setting('walpost.code_of_others') <> '' AND NOT EXISTS (SELECT FROM pg_publication_tables
        WHERE pubname = current_setting('walpost.publication') AND schemaname = current_setting('walpost.schema')
        AND tablename = current_setting('walpost.table_name')) THEN
        RAISE EXCEPTION 'reading table % would run code of other roles as role %: %', outbox, quote_ident(current_user),
            current_setting('walpost.code_of_others') USING ERRCODE = 'insufficient_privilege',
                HINT = format('Have it added by the owner of the table: SELECT walpost.add_outbox(%L, %L)', outbox,
                    current_setting('walpost.publication'));
    END IF;
    added := walpost.add_outbox(outbox::regclass, current_setting('walpost.publication'));
    IF added > 0 THEN
        RAISE NOTICE 'table % had % rows, which are delivered first', outbox, added;
    END IF;
END
$walpost$;
COMMIT;
