-- Creates the role that `walpost run` connects as, with no more privileges than the role needs.
--
--   psql -v schema=public -v table=outbox -v role=walpost -f sql/role.sql
--
-- Run by: a superuser, or a role that owns the outbox and the journal and has CREATEROLE and
-- REPLICATION. Run journal.sql first. Up to PostgreSQL 15, only a superuser may grant REPLICATION.
-- However, if Walpost's role already exists and has REPLICATION, the owner of the outbox and the
-- journal can run this file. Safe to run again. The role is created without a password: set one
-- with \password in psql, or configure peer, cert or another authentication method in pg_hba.conf.
--
-- On Amazon RDS and Aurora, replication requires membership in the role rds_replication rather than
-- the attribute REPLICATION, so Walpost's role becomes a member of rds_replication.
--
-- Reading a slot requires REPLICATION, which is a powerful privilege: the role can read the whole
-- database from WAL. Configure pg_hba.conf so that the role can connect only from Walpost's
-- address. For a logical slot, pg_hba.conf needs only an entry for the slot's database, not one for
-- `replication`.
-- Reading rows from WAL requires no privilege on the outbox. The role needs SELECT for rows that
-- are older than the slot, and for commands that compare or send the table's rows, such as `walpost
-- verify`. For a message outbox, which has no table, set -v table=.
-- The role can read the journal and add entries to it, but the server fills in who added an entry
-- and when. In walpost.slot_state, the role stores the positions that it has confirmed. In
-- walpost.table_state, it stores how tables are published.
\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox
\endif
\if :{?role}
\else
\set role walpost
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
\set examine 'journal slot_state table_state'
\ir examine.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.role = :'role';

DO $walpost$
DECLARE
    name text := current_setting('walpost.role');
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
    outbox text := format('%I.%I', in_schema, outbox_name);
    found pg_roles;
    -- The role rds_replication exists only on RDS and Aurora.
    replicators oid := (SELECT oid FROM pg_roles WHERE rolname = 'rds_replication');
    make text := format(CASE WHEN replicators IS NULL THEN 'CREATE ROLE %1$I LOGIN REPLICATION'
        ELSE 'CREATE ROLE %1$I LOGIN; GRANT rds_replication TO %1$I' END, name);
    change text := format(CASE WHEN replicators IS NULL THEN 'ALTER ROLE %1$I LOGIN REPLICATION;'
        ELSE 'ALTER ROLE %1$I LOGIN; GRANT rds_replication TO %1$I;' END, name);
    members text;
BEGIN
    SELECT * INTO found FROM pg_roles WHERE rolname = name;
    IF found IS NULL THEN
        BEGIN
            EXECUTE make;
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE EXCEPTION 'role % can''t create role %, which will be able to read all WAL: %', quote_ident(current_user), quote_ident(name),
                SQLERRM USING ERRCODE = 'insufficient_privilege', HINT = format('%s, run by %s; then run this again '
                    'to finish.', make, CASE
                        WHEN replicators IS NOT NULL THEN 'a member of rds_superuser'
                        WHEN current_setting('server_version_num')::int < 160000 THEN 'a superuser'
                        ELSE 'a superuser or a role with CREATEROLE and REPLICATION' END);
        END;
    ELSIF NOT (found.rolcanlogin AND (found.rolreplication OR found.rolsuper
        OR (replicators IS NOT NULL AND pg_has_role(found.oid, replicators, 'MEMBER')))) THEN
        RAISE EXCEPTION 'role % exists but lacks LOGIN or REPLICATION', quote_ident(name) USING HINT = format(
            'If you created it: %s Otherwise, the role that created it may know its password: DROP ROLE %I; then run this again.',
            change, name);
    END IF;
    -- Members of the role can do everything that the role can, including reading all of WAL.
    SELECT string_agg(quote_ident(pg_get_userbyid(member)), ', ') INTO members FROM pg_auth_members JOIN pg_roles r ON r.oid = member
        WHERE roleid = (SELECT oid FROM pg_roles WHERE rolname = name) AND NOT r.rolsuper AND r.rolname <> current_user;
    IF members IS NOT NULL THEN
        RAISE WARNING 'role % has members, which can act as it and read all WAL. Unless this is intended: REVOKE % FROM %',
            quote_ident(name), quote_ident(name),
            regexp_replace(members, E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]', '?', 'g');
    END IF;
    -- By default, every role has the privilege CONNECT through PUBLIC. The grant is skipped if
    -- Walpost's role already has the privilege and the current role may not grant it.
    IF has_database_privilege(current_user, current_database(), 'CONNECT WITH GRANT OPTION')
        OR NOT has_database_privilege(name, current_database(), 'CONNECT') THEN
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), name);
        -- Without the grant option, GRANT merely issues a warning, so the result has to be checked.
        IF NOT has_database_privilege(name, current_database(), 'CONNECT') THEN
            RAISE EXCEPTION 'role % could not be granted CONNECT on database % by role %', quote_ident(name),
                quote_ident(current_database()), quote_ident(current_user) USING ERRCODE = 'insufficient_privilege',
                    HINT = format('As the owner of the database, or a superuser: GRANT CONNECT ON DATABASE %I TO %I;',
                        current_database(), name);
        END IF;
    END IF;
    IF to_regclass('walpost.journal') IS NULL THEN
        RAISE EXCEPTION 'table walpost.journal does not exist' USING
            HINT = 'Run sql/journal.sql of Walpost in this database first';
    END IF;
    EXECUTE format('GRANT USAGE ON SCHEMA walpost TO %I', name);
    EXECUTE format('GRANT SELECT, INSERT (pipeline, slot, action, from_lsn, to_lsn, detail) ON walpost.journal TO %I', name);
    IF to_regclass('walpost.slot_state') IS NULL THEN
        RAISE NOTICE 'table walpost.slot_state does not exist' USING
            HINT = 'Run sql/journal.sql of Walpost in this database, and this file again';
    ELSE
        EXECUTE format('GRANT SELECT, INSERT, UPDATE ON walpost.slot_state TO %I', name);
    END IF;
    IF to_regclass('walpost.table_state') IS NULL THEN
        RAISE NOTICE 'table walpost.table_state does not exist' USING
            HINT = 'Run sql/journal.sql of Walpost in this database, and this file again';
    ELSE
        EXECUTE format('GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO %I', name);
    END IF;
    IF outbox_name = '' THEN
        RETURN;
    END IF;
    IF to_regclass(outbox) IS NULL THEN
        RAISE NOTICE 'table % does not exist yet: role % can''t read it', outbox, quote_ident(name)
            USING HINT = 'Create the table, and run this file again.';
        RETURN;
    END IF;
    IF NOT has_schema_privilege(name, in_schema, 'USAGE') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', in_schema, name);
        IF NOT has_schema_privilege(name, in_schema, 'USAGE') THEN
            RAISE EXCEPTION 'role % could not be granted USAGE on schema % by role %', quote_ident(name), quote_ident(in_schema),
                quote_ident(current_user) USING ERRCODE = 'insufficient_privilege',
                    HINT = format('As the owner of the schema, or a superuser: GRANT USAGE ON SCHEMA %I TO %I;', in_schema, name);
        END IF;
    END IF;
    IF NOT has_table_privilege(name, outbox, 'SELECT') THEN
        EXECUTE format('GRANT SELECT ON %s TO %I', outbox, name);
    END IF;
END
$walpost$;
