-- The role that `walpost run` connects as, with no more rights than it needs.
--
--   psql -v schema=public -v table=outbox -v role=walpost -f sql/role.sql
--
-- Run by: a superuser, or who owns outbox and journal and has CREATEROLE and REPLICATION; after journal.sql. Up to PostgreSQL
-- 15 a superuser alone may give REPLICATION: where the role is there already and has it, the owner can run the rest. Twice
-- without harm. The role gets no password: set one with \password in psql, or use peer, cert or another method of pg_hba.conf.
--
-- On Amazon RDS and Aurora there is a role rds_replication, and who is a member of it may replicate: there the role becomes one,
-- and its attribute stays unset.
--
-- REPLICATION is what reading a slot takes, and it is much: the role can read the whole database from WAL. Let
-- pg_hba.conf admit it from Walpost's place alone; a logical slot needs only a line for its own database, none for
-- `replication`.
-- Rows come from WAL, which needs no right on the outbox. SELECT is for rows that are older than the slot, and for
-- what compares or sends what the table has, such as `walpost verify`. An outbox of messages has no table: -v table=
-- Of the journal it reads all, and adds to it; who did what and when is for the server to say. What it has confirmed it
-- writes into walpost.slot_state, and how tables are published into walpost.table_state.
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
-- search_path is pg_catalog, pg_temp from here on, also for what the session does next.
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
    -- On RDS and Aurora alone.
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
            RAISE EXCEPTION 'role % can''t make role %, which is to read all of WAL: %', quote_ident(current_user), quote_ident(name),
                SQLERRM USING ERRCODE = 'insufficient_privilege', HINT = format('%s, run by %s; then run this again, which '
                    'does the rest.', make, CASE
                        WHEN replicators IS NOT NULL THEN 'a member of rds_superuser'
                        WHEN current_setting('server_version_num')::int < 160000 THEN 'a superuser'
                        ELSE 'a superuser or a role with CREATEROLE and REPLICATION' END);
        END;
    ELSIF NOT (found.rolcanlogin AND (found.rolreplication OR found.rolsuper
        OR (replicators IS NOT NULL AND pg_has_role(found.oid, replicators, 'MEMBER')))) THEN
        RAISE EXCEPTION 'role % exists without LOGIN and REPLICATION', quote_ident(name) USING HINT = change;
    END IF;
    -- Whoever is a member of it can do what it can: read all of WAL.
    SELECT string_agg(quote_ident(pg_get_userbyid(member)), ', ') INTO members FROM pg_auth_members JOIN pg_roles r ON r.oid = member
        WHERE roleid = (SELECT oid FROM pg_roles WHERE rolname = name) AND NOT r.rolsuper AND r.rolname <> current_user;
    IF members IS NOT NULL THEN
        RAISE WARNING 'role % has members, who can act as it and read all of WAL. Unless they are to: REVOKE % FROM %',
            quote_ident(name), quote_ident(name), members;
    END IF;
    -- PUBLIC has it unless it was revoked: who may not grant it need not.
    IF has_database_privilege(current_user, current_database(), 'CONNECT WITH GRANT OPTION')
        OR NOT has_database_privilege(name, current_database(), 'CONNECT') THEN
        EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), name);
        -- Who has the right, and may not pass it on, is only warned.
        IF NOT has_database_privilege(name, current_database(), 'CONNECT') THEN
            RAISE EXCEPTION 'role % can''t be let connect to database % by role %', quote_ident(name),
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
            USING HINT = 'Make the table, and run this file again.';
        RETURN;
    END IF;
    IF NOT has_schema_privilege(name, in_schema, 'USAGE') THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', in_schema, name);
        IF NOT has_schema_privilege(name, in_schema, 'USAGE') THEN
            RAISE EXCEPTION 'role % can''t be let use schema % by role %', quote_ident(name), quote_ident(in_schema),
                quote_ident(current_user) USING ERRCODE = 'insufficient_privilege',
                    HINT = format('As the owner of the schema, or a superuser: GRANT USAGE ON SCHEMA %I TO %I;', in_schema, name);
        END IF;
    END IF;
    IF NOT has_table_privilege(name, outbox, 'SELECT') THEN
        EXECUTE format('GRANT SELECT ON %s TO %I', outbox, name);
    END IF;
END
$walpost$;
