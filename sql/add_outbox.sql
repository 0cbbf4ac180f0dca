-- Adds a table to a publication for several outboxes, and writes the table's existing rows to WAL
-- so that they are delivered too. Calls walpost.add_outbox (see tables.sql) after checking the
-- owner of that function.
--
--   psql -v schema=tenant_42 -v table=outbox -v publication=walpost_tenants -f sql/add_outbox.sql
--
-- If the pipeline's max_row_bytes is not the default, set the variable max_row_bytes to the
-- pipeline's value, in bytes.
--
-- Run by: a role that owns the publication and the table, or a superuser. Create the slot first,
-- because a slot delivers only changes that are written after the slot was created. Safe to run
-- again: if the table is already in the publication, nothing is changed.
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
\if :{?max_row_bytes}
\else
\set max_row_bytes 60000000
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql

\set examine 'owners outbox_row table_state'
\ir examine.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.publication = :'publication';
SET walpost.row_bytes_max = :'max_row_bytes';

DO $walpost$
DECLARE
    outbox text := format('%I.%I', current_setting('walpost.schema'), current_setting('walpost.table_name'));
    added int8;
BEGIN
    IF 'add_outbox' <> ALL (string_to_array(current_setting('walpost.examined'), ' ')) THEN
        RAISE EXCEPTION 'function walpost.add_outbox does not exist' USING ERRCODE = 'undefined_function',
            HINT = 'Create it: walpost init --config FILE; or run sql/tables.sql of Walpost in this database';
    END IF;
    added := walpost.add_outbox(outbox::regclass, current_setting('walpost.publication'));
    IF added > 0 THEN
        RAISE NOTICE 'table % has % rows, which are delivered first', outbox, added;
    END IF;
END
$walpost$;
