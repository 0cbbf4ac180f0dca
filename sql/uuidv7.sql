-- Creates walpost_uuidv7() on servers older than PostgreSQL 18, which lack uuidv7(). `outbox.sql` and
-- `outbox_partitioned.sql` run this file first.
--
--   psql -v schema=public -f sql/uuidv7.sql
--
-- A version 7 UUID (RFC 9562, section 5.7) begins with a timestamp, so new rows are added at the
-- right edge of the primary key's index. The timestamp does not indicate the commit order, which
-- Walpost takes only from WAL.
\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
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

DO $walpost$
DECLARE
    in_schema text := current_setting('walpost.schema');
    owner oid := (SELECT proowner FROM pg_proc WHERE oid = to_regprocedure(format('%I.walpost_uuidv7()', in_schema)));
BEGIN
    -- Replaces an existing function if the role may do so: if the function was created with a different search_path, it
    -- may call functions or operators in other schemas. The body created here is bound to functions and operators in
    -- pg_catalog, regardless of the inserting session's search_path.
    IF to_regprocedure('pg_catalog.uuidv7()') IS NOT NULL
        OR owner IS NOT NULL AND NOT (pg_has_role(owner, 'USAGE') AND has_schema_privilege(in_schema, 'CREATE')) THEN
        RETURN;
    END IF;
    -- The UUID consists of 48 bits of milliseconds, 4 version bits, a 12-bit fraction of the
    -- millisecond (section 6.2, method 3, as in PostgreSQL 18), and the variant and 62 random bits,
    -- which are taken from a version 4 UUID. The order of UUIDs generated within the same
    -- microsecond is random.
    EXECUTE format($ddl$
        CREATE OR REPLACE FUNCTION %I.walpost_uuidv7() RETURNS uuid
        LANGUAGE sql VOLATILE PARALLEL SAFE
        RETURN (
            SELECT encode(
                int8send((us / 1000 << 16) | (7 << 12) | (us %% 1000 * 4096 / 1000))
                    || substring(uuid_send(gen_random_uuid()) FROM 9),
                'hex')::uuid
            FROM (SELECT floor(extract(epoch FROM clock_timestamp()) * 1000000)::bigint) AS clock (us))
        $ddl$, in_schema);
    EXECUTE format($ddl$
        COMMENT ON FUNCTION %I.walpost_uuidv7() IS 'UUIDv7 (RFC 9562); PostgreSQL 18 has uuidv7()'
        $ddl$, in_schema);
END
$walpost$;

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\ir examine.sql
\if :{?outbox_transaction}
\else
COMMIT;
\endif
