-- The role that `walpost run` connects as, with no more rights than it needs.
--
--   psql -v role=walpost -f sql/role.sql
--
-- Run by: a superuser (up to PostgreSQL 15 nobody else may give REPLICATION), or from 16 on a role with CREATEROLE and
-- REPLICATION that may grant CONNECT. Twice without harm. The role gets no password: set one with \password in psql, or
-- use peer, cert or another method of pg_hba.conf.
--
-- REPLICATION is what reading a slot takes, and it is much: the role can read the whole database from the log. Let
-- pg_hba.conf admit it from Walpost's place alone; a logical slot needs only a line for its own database, none for
-- `replication`.
-- It needs no right on the outbox: rows come from the log, and the checks read the catalog alone.
\set ON_ERROR_STOP on
\if :{?role}
\else
\set role walpost
\endif

SET walpost.role = :'role';

DO $walpost$
DECLARE
    name text := current_setting('walpost.role');
    found pg_roles;
BEGIN
    SELECT * INTO found FROM pg_roles WHERE rolname = name;
    IF found IS NULL THEN
        EXECUTE format('CREATE ROLE %I LOGIN REPLICATION', name);
    ELSIF NOT (found.rolcanlogin AND (found.rolreplication OR found.rolsuper)) THEN
        RAISE EXCEPTION 'role % exists without LOGIN and REPLICATION', quote_ident(name)
            USING HINT = format('ALTER ROLE %I LOGIN REPLICATION;', name);
    END IF;
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO %I', current_database(), name);
END
$walpost$;
