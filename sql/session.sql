-- Prepares the session. All other files run this file first. This file changes nothing in the
-- database.
\set ON_ERROR_STOP on
-- These settings apply to the whole session. Without these settings, a function or operator in
-- another schema of search_path could be called instead of the one in pg_catalog (CVE-2018-1058),
-- and reading a table could call the functions in its row-level security policies.
SET search_path = pg_catalog, pg_temp;
SET row_security = off;
-- If psql does not run in a terminal, it uses a client encoding that the database's owner can
-- choose. In some encodings, a backslash can be the second byte of a character, so a literal that
-- was quoted as UTF-8 could end early. Therefore, names that are passed with -v are always read as
-- UTF-8.
SET client_encoding = 'UTF8';
SET backslash_quote = 'safe_encoding';
-- The literals in these files are written for standard_conforming_strings = on. With
-- quote_all_identifiers = off, the server quotes names only if necessary. The checks that compare
-- names require that.
SET standard_conforming_strings = on;
SET quote_all_identifiers = off;
SET datestyle = 'ISO';
-- At isolation level REPEATABLE READ or SERIALIZABLE, examine.sql would see the catalogs as of the
-- start of the transaction.
SET default_transaction_isolation = 'read committed';
SET default_transaction_read_only = off;
-- With constraint_exclusion = on, the planner would evaluate the partition keys of all ancestors of
-- every table that is read.
SET constraint_exclusion = partition;
-- With ALTER DATABASE ... SET role, the database's owner can make every session start as another
-- role, whose objects would then be trusted. The statements below undo such a setting. A role that
-- was set within the session is kept.
DO $walpost$
BEGIN
    -- Sets search_path again: behind a connection pooler, the statements above may have run in a
    -- different session.
    SET LOCAL search_path = pg_catalog, pg_temp;
    IF current_setting('role') <> 'none' AND EXISTS (SELECT FROM pg_db_role_setting, unnest(setconfig) AS setting
        WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
            AND setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user))
            -- The cast truncates the value to the maximum length of a name, as the server did when
            -- it set the role.
            AND setting LIKE 'role=%' AND substr(setting, 6)::name = current_setting('role')) THEN
        PERFORM set_config('role', 'none', false);
    END IF;
    -- Warnings must not be suppressed, because they can report that other roles have too many
    -- privileges.
    IF current_setting('client_min_messages') IN ('error', 'fatal', 'panic') THEN
        PERFORM set_config('client_min_messages', 'notice', false);
    END IF;
END
$walpost$;
