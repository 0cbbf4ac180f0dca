-- Allows a service's role to send events. Superusers and the outbox's owner already have the
-- required privileges.
--
--   psql -v schema=public -v table=outbox -v writer=shop -f sql/writer.sql
--
-- Run by: the owner of the outbox. For a message outbox (-v table=), run publish.sql first. Then,
-- the owner of the functions can run this file. Once PUBLIC may no longer call
-- pg_logical_emit_message(), only a superuser can run it. Run this file once for each role. Safe to
-- run again. `walpost init --writer shop` runs the same SQL. This file revokes nothing.
--
-- For a table, the role is granted INSERT and the other privileges that inserting requires. For a
-- message outbox, the role is granted EXECUTE on walpost.publish, walpost.publish_bytes and the
-- functions that they call. A role that may send events can send any event: the role can't be
-- limited to certain aggregates.
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
BEGIN;
\set examine owners
\ir examine.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.writer = :'writer';

DO $walpost$
DECLARE
    name text := pg_catalog.current_setting('walpost.writer');
    in_schema text := pg_catalog.current_setting('walpost.schema');
    outbox_name text := pg_catalog.current_setting('walpost.table_name');
    outbox text := pg_catalog.format('%I.%I', in_schema, outbox_name);
    emit regprocedure := coalesce(
        pg_catalog.to_regprocedure('pg_catalog.pg_logical_emit_message(boolean, text, bytea, boolean)'),
        pg_catalog.to_regprocedure('pg_catalog.pg_logical_emit_message(boolean, text, bytea)'));
    uuidv7 regprocedure;
    sequence regclass;
    lacking text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = name) THEN
        RAISE EXCEPTION 'role % does not exist, but should send events', pg_catalog.quote_ident(name)
            USING HINT = pg_catalog.format('CREATE ROLE %I LOGIN; or name another writer.', name);
    END IF;
    IF outbox_name = '' THEN
        IF 'publish' <> ALL (string_to_array(current_setting('walpost.examined'), ' ')) THEN
            RAISE EXCEPTION 'function walpost.publish does not exist' USING ERRCODE = 'undefined_function',
                HINT = 'Create it: walpost init --config FILE; or run sql/publish.sql of Walpost in this database';
        END IF;
        EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA walpost TO %I', name);
        EXECUTE pg_catalog.format(
            'GRANT EXECUTE ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text), '
            'walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text), walpost.max_event_bytes() TO %I', name);
        -- Grants EXECUTE directly to the role, so that the role can still call the function after
        -- EXECUTE has been revoked from PUBLIC.
        IF pg_catalog.has_function_privilege(emit, 'EXECUTE WITH GRANT OPTION') THEN
            EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %I', emit, name);
        ELSIF NOT pg_catalog.has_function_privilege(name, emit, 'EXECUTE') THEN
            RAISE EXCEPTION 'role % may not call %', pg_catalog.quote_ident(name), emit
                USING HINT = pg_catalog.format('As a superuser: GRANT EXECUTE ON FUNCTION %s TO %I;', emit, name);
        END IF;
        RETURN;
    END IF;
    IF NOT pg_catalog.has_schema_privilege(name, in_schema, 'USAGE') THEN
        EXECUTE pg_catalog.format('GRANT USAGE ON SCHEMA %I TO %I', in_schema, name);
    END IF;
    EXECUTE pg_catalog.format('GRANT INSERT ON %s TO %I', outbox, name);
    -- Up to PostgreSQL 17, the default of the column `id` calls walpost_uuidv7().
    uuidv7 := pg_catalog.to_regprocedure(pg_catalog.format('%I.walpost_uuidv7()', in_schema));
    IF uuidv7 IS NOT NULL AND NOT pg_catalog.has_function_privilege(name, uuidv7, 'EXECUTE') THEN
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION %s TO %I', uuidv7, name);
    END IF;
    -- An insert into a serial column requires USAGE on its sequence. Identity columns require no
    -- privilege.
    FOR sequence IN SELECT d.objid::pg_catalog.regclass FROM pg_catalog.pg_depend d
        JOIN pg_catalog.pg_class c ON c.oid = d.objid AND c.relkind = 'S'
        WHERE d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass AND d.refobjid = outbox::pg_catalog.regclass
        AND d.deptype = 'a'
    LOOP
        EXECUTE pg_catalog.format('GRANT USAGE ON SEQUENCE %s TO %I', sequence, name);
    END LOOP;
    -- Without the grant option, GRANT merely issues a warning, so the result has to be checked.
    SELECT pg_catalog.string_agg(line, ' ') INTO lacking FROM (VALUES
        (pg_catalog.has_schema_privilege(name, in_schema, 'USAGE'),
            pg_catalog.format('GRANT USAGE ON SCHEMA %I TO %I;', in_schema, name)),
        (pg_catalog.has_table_privilege(name, outbox, 'INSERT'), pg_catalog.format('GRANT INSERT ON %s TO %I;', outbox, name))
    ) AS rights (has, line) WHERE NOT has;
    IF lacking IS NOT NULL THEN
        RAISE EXCEPTION 'role % could not be granted the privileges to send events to table % by role %', pg_catalog.quote_ident(name), outbox,
            pg_catalog.quote_ident(current_user) USING ERRCODE = 'insufficient_privilege',
                HINT = pg_catalog.format('As the owner, or a superuser: %s', lacking);
    END IF;
END
$walpost$;
COMMIT;
