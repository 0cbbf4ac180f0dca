-- Transfers ownership of the outbox to the role that owns the application's tables.
--
--   psql -v schema=public -v table=outbox -v owner=shop -f sql/owner.sql
--
-- Run by: a superuser, or the role that created the table if it can act as the new owner. Run this
-- file after the other files, which need the owner's privileges. Only slot.sql and snapshot.sql are
-- run later. Safe to run again. `walpost init --owner shop` runs the same SQL.
--
-- Changes the owner of the table that outbox.sql or outbox_partitioned.sql created, and of those
-- partitions that belong to the current role. A table that belongs to another role, or was created
-- in another way, is rejected and left unchanged. The functions walpost_uuidv7 and
-- walpost_no_update keep their owner: outboxes of other applications in the same schema call them
-- too, so a new owner could run code as the writers of those outboxes. The publication, the journal
-- and Walpost's role are not changed either.
-- Nothing in this file runs code of the new owner: the file never assumes the new owner's role, and
-- changing an owner calls no functions.
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
SET walpost.owner = :'owner';

DO $walpost$
DECLARE
    name text := current_setting('walpost.owner');
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
    outbox text := format('%I.%I', in_schema, outbox_name);
    us oid := (SELECT oid FROM pg_roles WHERE rolname = current_user);
    is_superuser boolean := (SELECT rolsuper FROM pg_roles WHERE rolname = current_user);
    wanted oid := (SELECT oid FROM pg_roles WHERE rolname = name);
    given oid[] := '{}';
    found pg_class;
    uuidv7 regprocedure;
BEGIN
    IF wanted IS NULL THEN
        RAISE EXCEPTION 'role % does not exist, but should own table %', quote_ident(name), outbox
            USING HINT = format('CREATE ROLE %I LOGIN; or name another owner.', name);
    END IF;
    IF NOT (pg_has_role(wanted, 'MEMBER') AND pg_has_role(wanted, 'USAGE') AND CASE
        WHEN current_setting('server_version_num')::int >= 160000 THEN pg_has_role(wanted, 'SET') ELSE true END) THEN
        RAISE EXCEPTION 'role % can''t act as role %, which should own table %', quote_ident(current_user), quote_ident(name),
            outbox USING ERRCODE = 'insufficient_privilege',
                HINT = format('GRANT %I TO %I; or run this as a superuser.', name, current_user);
    END IF;
    SELECT c.* INTO found FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = in_schema AND c.relname = outbox_name;
    IF found IS NULL THEN
        RAISE EXCEPTION 'table % does not exist', outbox USING HINT = 'Run sql/outbox.sql of Walpost in this database first';
    END IF;
    IF found.relowner <> wanted THEN
        IF found.relowner <> us THEN
            RAISE EXCEPTION 'table % belongs to role %, expected role %', outbox,
                regexp_replace(quote_ident(pg_get_userbyid(found.relowner)),
                    E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]', '?', 'g'), quote_ident(name)
                USING HINT = 'Change the owner as described in docs/retention.md under "Change the owner"; or do not set an owner.';
        ELSIF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = found.oid AND conname = 'walpost_event_size') THEN
            RAISE EXCEPTION 'table % was not created by Walpost and is left unchanged: it belongs to role %, expected role %', outbox,
                quote_ident(current_user), quote_ident(name)
                USING HINT = 'Change the owner as described in docs/retention.md under "Change the owner"; or do not set an owner.';
        END IF;
        given := ARRAY[found.oid];
    END IF;
    -- Changing the owner of the partitions is safe: partitions have the same columns as the table,
    -- so the table's owner can already read all of their data.
    given := given || ARRAY (WITH RECURSIVE tree (oid) AS (
            SELECT inhrelid FROM pg_inherits WHERE inhparent = found.oid
            UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
        ) SELECT oid FROM pg_class JOIN tree USING (oid) WHERE relispartition AND relowner = us AND relowner <> wanted);
    IF given <> '{}' AND NOT is_superuser AND NOT has_schema_privilege(wanted, in_schema, 'CREATE') THEN
        RAISE EXCEPTION 'role % may not create objects in schema %, but should own table % there', quote_ident(name),
            quote_ident(in_schema), outbox USING ERRCODE = 'insufficient_privilege',
                HINT = format('GRANT CREATE ON SCHEMA %I TO %I; or run this as a superuser.', in_schema, name);
    END IF;
    FOR found IN SELECT * FROM pg_class WHERE oid = ANY (given) LOOP
        EXECUTE format('ALTER TABLE %s OWNER TO %I', found.oid::regclass, name);
        -- Since the table was examined, the schema's owner could have replaced it with a different
        -- table.
        IF (SELECT relowner FROM pg_class WHERE oid = found.oid) IS DISTINCT FROM wanted THEN
            RAISE EXCEPTION 'table % was replaced by another one in the meantime', found.relname;
        END IF;
        RAISE NOTICE 'table % now belongs to role %', regexp_replace(found.oid::regclass::text,
            E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]', '?', 'g'), quote_ident(name);
    END LOOP;
    IF NOT has_schema_privilege(wanted, in_schema, 'USAGE') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', in_schema, name);
        -- Without the grant option, GRANT merely issues a warning, so the result has to be checked.
        IF NOT has_schema_privilege(wanted, in_schema, 'USAGE') THEN
            RAISE EXCEPTION 'role % could not be granted USAGE on schema % by role %', quote_ident(name), quote_ident(in_schema),
                quote_ident(current_user) USING ERRCODE = 'insufficient_privilege',
                    HINT = format('As the owner of the schema, or a superuser: GRANT USAGE ON SCHEMA %I TO %I;', in_schema, name);
        END IF;
    END IF;
    -- Up to PostgreSQL 17, the default of the column `id` calls walpost_uuidv7().
    uuidv7 := to_regprocedure(format('%I.walpost_uuidv7()', in_schema));
    IF uuidv7 IS NOT NULL AND NOT has_function_privilege(wanted, uuidv7, 'EXECUTE') THEN
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', uuidv7, name);
    END IF;
END
$walpost$;
COMMIT;
