-- Rejects UPDATE on the outbox. `outbox.sql` and `outbox_partitioned.sql` run this file last.
--
--   psql -v schema=public -v table=outbox -f sql/no_update.sql
--
-- Only inserts are published. If a service updates a row, for example with INSERT ... ON CONFLICT
-- DO UPDATE, no consumer ever receives the change. With this trigger, the service gets an error
-- instead.
-- The trigger is added only to a table that these files created and that the current role owns. On
-- an existing table, the trigger could break a service that marks rows as processed. For such a
-- table, only the function is created, and a notice shows the command that adds the trigger.
-- To update rows manually, disable the trigger first, and enable it again afterwards: ALTER TABLE
-- ... DISABLE TRIGGER walpost_no_update, and ALTER TABLE ... ENABLE TRIGGER walpost_no_update.
\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
\if :{?outbox_transaction}
\else
BEGIN;
\endif
\set examine owners
\ir examine.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';

DO $walpost$
DECLARE
    in_schema text := current_setting('walpost.schema');
    outbox text := format('%I.%I', in_schema, current_setting('walpost.table_name'));
    create_trigger text := format(
        'CREATE TRIGGER walpost_no_update BEFORE UPDATE ON %s FOR EACH ROW EXECUTE FUNCTION %I.walpost_no_update()',
        outbox, in_schema);
    us oid := (SELECT oid FROM pg_roles WHERE rolname = current_user);
    table_owner oid;
    is_made_by_walpost boolean;
    -- The names of tables, schemas and roles can contain control characters, which psql would print
    -- unescaped.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
    shown text := regexp_replace(outbox, unprintable, '?', 'g');
    remedy text;
    is_addable boolean;
    owner oid := (SELECT proowner FROM pg_proc WHERE oid = to_regprocedure(format('%I.walpost_no_update()', in_schema)));
BEGIN
    IF owner IS NULL OR pg_has_role(owner, 'USAGE') AND has_schema_privilege(in_schema, 'CREATE') THEN
        EXECUTE format($ddl$
            CREATE OR REPLACE FUNCTION %I.walpost_no_update() RETURNS trigger LANGUAGE plpgsql
            SET search_path = pg_catalog, pg_temp AS $body$
            BEGIN
                RAISE EXCEPTION 'UPDATE rejected: %%.%% is an outbox table', TG_TABLE_SCHEMA, TG_TABLE_NAME
                    USING ERRCODE = 'feature_not_supported',
                    DETAIL = 'Only inserted rows are published: consumers would never receive the change.',
                    HINT = 'Insert a new event instead. INSERT ... ON CONFLICT can only be used with DO NOTHING.';
            END
            $body$
            $ddl$, in_schema);
    END IF;
    IF EXISTS (SELECT FROM pg_trigger WHERE tgrelid = outbox::regclass AND tgname = 'walpost_no_update') THEN
        RETURN;
    END IF;
    SELECT relowner INTO table_owner FROM pg_class WHERE oid = outbox::regclass;
    is_made_by_walpost := EXISTS (SELECT FROM pg_constraint WHERE conrelid = outbox::regclass AND conname = 'walpost_event_size');
    is_addable := is_made_by_walpost AND table_owner = us;
    -- CREATE TRIGGER finds the table by name and evaluates its partition key, which can call
    -- functions of the table's owner. Until the transaction ends, the name must refer to the same
    -- table. Locking the schema's row keeps the schema from being renamed, and locking the table
    -- keeps the table from being renamed.
    IF is_addable AND (SELECT rolsuper FROM pg_roles WHERE oid = us) THEN
        PERFORM FROM pg_namespace WHERE nspname = in_schema FOR KEY SHARE;
        is_addable := FOUND;
        -- Keeps the table from being renamed while LOCK TABLE below waits. LOCK TABLE looks up the name again after it
        -- has waited. If the name then referred to a view, LOCK TABLE would lock every table in the view's query.
        PERFORM FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = in_schema
            AND c.relname = current_setting('walpost.table_name') AND c.relowner = us AND c.relkind IN ('r', 'p') FOR KEY SHARE;
        is_addable := is_addable AND FOUND;
    ELSIF is_addable THEN
        -- Only a superuser can lock the schema's row. For any other role, the schema's owner must
        -- be trusted not to rename the schema.
        is_addable := EXISTS (SELECT FROM pg_namespace JOIN pg_roles r ON r.oid = CASE
                WHEN nspowner = to_regrole('pg_database_owner')
                    THEN (SELECT datdba FROM pg_database WHERE datname = current_database()) ELSE nspowner END
            WHERE nspname = in_schema AND (r.rolsuper OR r.oid = us));
    END IF;
    IF is_addable THEN
        -- Acquires the lock that CREATE TRIGGER needs, so that the owner can't change between the
        -- following check and CREATE TRIGGER.
        EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', outbox);
        SELECT relowner INTO table_owner FROM pg_class WHERE oid = outbox::regclass;
        is_addable := table_owner = us;
    END IF;
    IF is_addable THEN
        EXECUTE create_trigger;
        RETURN;
    END IF;
    remedy := CASE WHEN table_owner <> us
        THEN format('To reject UPDATE, log in as its owner, role %I: ', pg_get_userbyid(table_owner))
        ELSE 'To reject UPDATE: ' END;
    remedy := regexp_replace(remedy || create_trigger || ';', unprintable, '?', 'g');
    IF table_owner <> us THEN
        RAISE NOTICE 'table % accepts UPDATE, which is never published', shown USING HINT = remedy;
    ELSIF is_made_by_walpost THEN
        RAISE NOTICE 'table % accepts UPDATE, which is never published: another role owns its schema, and could replace the table '
            'with another one while the trigger is being added', shown USING HINT = remedy;
    ELSE
        RAISE NOTICE 'table % was not created by Walpost and is left unchanged: it accepts UPDATE, which is never published',
            shown USING HINT = remedy;
    END IF;
END
$walpost$;

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\ir examine.sql
\if :{?outbox_transaction}
\else
COMMIT;
\endif
