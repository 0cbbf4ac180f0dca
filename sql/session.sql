-- Prepares the session. The other files run this file, which changes nothing in the database.
\set ON_ERROR_STOP on
-- These settings apply to the whole session. Otherwise, a function or an operator in another schema
-- of the path could be called instead of pg_catalog's, and a query of a table could call the
-- functions of its policies (CVE-2018-1058).
SET search_path = pg_catalog, pg_temp;
SET row_security = off;
-- Without a terminal, psql takes the client's encoding from the server, where the owner of the
-- database chooses it. In some encodings, a backslash is the second byte of a character, which
-- would end a literal that was written in UTF-8. Therefore, names given with -v are read as UTF-8.
SET client_encoding = 'UTF8';
SET backslash_quote = 'safe_encoding';
-- The literals in these files rely on the first setting. Names that the server prints are compared
-- with names that are quoted only if necessary.
SET standard_conforming_strings = on;
SET quote_all_identifiers = off;
SET datestyle = 'ISO';
-- At a different isolation level, an examination would see the catalogs as they were when the
-- transaction began.
SET default_transaction_isolation = 'read committed';
SET default_transaction_read_only = off;
-- With `on`, the planner evaluates the partition keys above every table that is read.
SET constraint_exclusion = partition;
-- The owner of the database can make every session begin as another role (ALTER DATABASE ... SET
-- role), whose objects would then be trusted. A role that was set in the session itself is kept.
DO $walpost$
BEGIN
    -- Through a pooler, the statements above may have been run in another session.
    SET LOCAL search_path = pg_catalog, pg_temp;
    IF current_setting('role') <> 'none' AND EXISTS (SELECT FROM pg_db_role_setting, unnest(setconfig) AS setting
        WHERE setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
            AND setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user))
            -- The server has truncated a longer setting to the length of a name.
            AND setting LIKE 'role=%' AND substr(setting, 6)::name = current_setting('role')) THEN
        PERFORM set_config('role', 'none', false);
    END IF;
    -- Warnings must be shown, because they can report privileges of other roles.
    IF current_setting('client_min_messages') IN ('error', 'fatal', 'panic') THEN
        PERFORM set_config('client_min_messages', 'notice', false);
    END IF;
END
$walpost$;
