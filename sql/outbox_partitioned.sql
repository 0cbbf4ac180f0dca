-- Creates the outbox table, partitioned by day. Old events are removed by dropping a partition,
-- which needs no vacuuming and generates hardly any WAL.
--
--   psql -v schema=public -v table=outbox -f sql/outbox_partitioned.sql
--
-- Run by: the role that will own the table, which needs CREATE on the schema. Run guard.sql first.
-- A superuser can run this file too: new partitions belong to the table's owner. Safe to run again.
-- To always have partitions for today and the next seven days (UTC), run this file every day from
-- cron or pg_cron. Alternatively, `walpost maintain`, or `walpost run` with `retention`, can create
-- and drop the partitions.
-- `walpost init --partitioned` runs the same SQL: uuidv7.sql, this file, no_update.sql.
--
-- Drop a day's partition manually only after all of its events have been delivered to Kafka:
--   ALTER TABLE public.outbox DETACH PARTITION public.outbox_p20251101;
--   SELECT pg_catalog.pg_current_wal_lsn();
--   -- wait until confirmed_flush_lsn of the slot in pg_replication_slots is above this LSN, then
--   DROP TABLE public.outbox_p20251101;
-- Rows that are detached or dropped before they are delivered are still delivered, because they are
-- read from WAL. However, if the slot is lost, such rows can't be resent. Set lock_timeout, because
-- DETACH waits for all transactions that use the table, and inserts queue up behind it.
\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox
\endif
\if :{?max_event_bytes}
\else
\set max_event_bytes 990000
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
BEGIN;
\set examine owners
\ir examine.sql
\set outbox_transaction on
\ir uuidv7.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';

DO $walpost$
DECLARE
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
BEGIN
    PERFORM set_config('walpost.table_is_new',
        (to_regclass(format('%I.%I', in_schema, outbox_name)) IS NULL)::text, false);
END
$walpost$;

-- The columns, checks and max_event_bytes are the same as in outbox.sql, which explains them. The
-- primary key of a partitioned table must contain the partition key, so the server does not enforce
-- that `id` alone is unique. In practice, UUIDs are unique without such a constraint.
CREATE TABLE IF NOT EXISTS :"schema".:"table" (
    id            uuid        NOT NULL,
    aggregatetype text        NOT NULL,
    aggregateid   text        NOT NULL,
    type          text        NOT NULL,
    payload       jsonb,
    headers       jsonb,
    created_at    timestamptz NOT NULL DEFAULT now(),

    PRIMARY KEY (id, created_at),
    CONSTRAINT walpost_headers_object CHECK (jsonb_typeof(headers) = 'object'),
    CONSTRAINT walpost_event_size CHECK (
        coalesce(octet_length(payload::text), 0) + coalesce(octet_length(headers::text), 0) <= :'max_event_bytes'::int8),
    CONSTRAINT walpost_aggregatetype_fits_topic_name CHECK (
        octet_length(aggregatetype) BETWEEN 1 AND 236 AND aggregatetype !~ '[^a-zA-Z0-9._-]'),
    CONSTRAINT walpost_aggregateid_up_to_1024_bytes CHECK (octet_length(aggregateid) <= 1024),
    CONSTRAINT walpost_type_up_to_1024_bytes CHECK (octet_length(type) <= 1024)
) PARTITION BY RANGE (created_at);

DO $walpost$
DECLARE
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
    outbox text := format('%I.%I', in_schema, outbox_name);
    today date := (now() AT TIME ZONE 'UTC')::date;
    day date;
    -- Leaves space for the suffix of a partition's name, because names are limited to 63 bytes.
    stem text := left(outbox_name, 53);
    partition_name text;
    table_owner name;
    code_of_others text;
BEGIN
    IF 'lock_and_examine' <> ALL (string_to_array(current_setting('walpost.examined'), ' ')) THEN
        RAISE EXCEPTION 'function walpost.lock_and_examine does not exist, and table % cannot be used without it', outbox
            USING ERRCODE = 'undefined_function',
                HINT = 'Create it as a superuser: walpost init --config FILE; or run sql/guard.sql of Walpost in this database';
    END IF;
    -- A new partition is checked against the table's constraints, which could run other roles' code
    -- as the current role. From here until the end of this block, no other session can
    -- change the constraints.
    code_of_others := walpost.lock_and_examine(in_schema, outbox_name, 'ALTER');
    -- Checks that the name still refers to the table that was created above. Before the table was
    -- locked, it could have been renamed, and another table could have been given its name.
    IF current_setting('walpost.table_is_new')::boolean AND code_of_others = '' AND EXISTS (SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', in_schema, outbox_name))
            AND relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)) THEN
        EXECUTE format('ALTER TABLE %s ALTER COLUMN id SET DEFAULT %s', outbox,
            CASE WHEN to_regprocedure('pg_catalog.uuidv7()') IS NOT NULL THEN 'uuidv7()'
                ELSE format('%I.walpost_uuidv7()', in_schema) END);
        EXECUTE format('COMMENT ON CONSTRAINT walpost_aggregatetype_fits_topic_name ON %s IS %L', outbox,
            'Becomes part of the topic name: 1 to 236 characters of a to z, A to Z, 0 to 9, ".", "_" and "-"');
        EXECUTE format('COMMENT ON CONSTRAINT walpost_event_size ON %s IS %L', outbox,
            'The maximum size of payload and headers as text, in bytes, so that Kafka accepts the event');
        -- With a default partition, an insert never fails because no partition matches the row. The
        -- service's transaction must succeed even if partitions were not created in time, or if a
        -- row has an unusual created_at. The drawbacks are that DETACH ... CONCURRENTLY is not
        -- possible, and that a day's partition can't be created once the default partition contains
        -- rows of that day.
        EXECUTE format('CREATE TABLE %I.%I PARTITION OF %s DEFAULT', in_schema, stem || '_default', outbox);
    ELSIF (SELECT relkind FROM pg_class WHERE oid = outbox::regclass) <> 'p' THEN
        RAISE EXCEPTION 'table % exists but is not partitioned', outbox
            USING HINT = 'Use another name for the partitioned table. To keep this one: walpost init --config FILE, without --partitioned, '
                'or sql/outbox.sql.';
    ELSIF NOT EXISTS (SELECT FROM pg_constraint WHERE conrelid = outbox::regclass AND conname = 'walpost_event_size')
    THEN
        RAISE NOTICE 'table % was not created by Walpost, so no partitions are created for it', outbox;
        RETURN;
    ELSIF NOT EXISTS (SELECT FROM pg_partitioned_table JOIN pg_attribute ON attrelid = partrelid AND attnum = partattrs[0]
        WHERE partrelid = outbox::regclass AND partstrat = 'r' AND partnatts = 1 AND atttypid = 'timestamptz'::regtype)
    THEN
        RAISE EXCEPTION 'table % exists but is not partitioned by range of one column of type timestamptz', outbox
            USING HINT = 'Use another name for the partitioned table.';
    ELSIF code_of_others IS DISTINCT FROM '' THEN
        RAISE EXCEPTION 'table % has code of other roles that creating partitions could run as %: %', outbox,
            quote_ident(current_user), code_of_others
            USING ERRCODE = 'invalid_object_definition',
                HINT = format('Run this as the owner of the table, or drop the objects that call the code.');
    END IF;

    table_owner := pg_get_userbyid((SELECT relowner FROM pg_class WHERE oid = outbox::regclass));
    FOR day IN SELECT today + ahead FROM generate_series(0, 7) AS ahead LOOP
        partition_name := stem || to_char(day, '"_p"YYYYMMDD');
        CONTINUE WHEN EXISTS (SELECT FROM pg_inherits WHERE inhparent = outbox::regclass
            AND inhrelid = to_regclass(format('%I.%I', in_schema, partition_name)));
        -- CREATE TABLE ... PARTITION OF would wait for every transaction that uses the outbox, and
        -- all inserts would queue up behind it. ATTACH PARTITION does not block inserts.
        BEGIN
            EXECUTE format('CREATE TABLE %I.%I (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED)',
                in_schema, partition_name, outbox);
            -- The partition must belong to the table's owner. The table's owner can add indexes to
            -- the table, and PostgreSQL builds each index as the owner of the partition.
            IF table_owner <> current_user THEN
                EXECUTE format('ALTER TABLE %I.%I OWNER TO %I', in_schema, partition_name, table_owner);
            END IF;
            EXECUTE format('ALTER TABLE %s ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)', outbox,
                in_schema, partition_name, day || ' 00:00+00', day + 1 || ' 00:00+00');
        EXCEPTION WHEN duplicate_table OR duplicate_object THEN
            RAISE WARNING 'partition % was not created: another object has this name', partition_name
                USING HINT = 'Rows of that day are stored in the default partition. Find out who created the object, and rename or drop '
                    'it. Then run this again.';
        WHEN check_violation THEN
            RAISE WARNING 'partition % was not created: the default partition has rows of that day', partition_name
                USING HINT = 'These rows are still delivered. Run this file daily, so that partitions are created in time.';
        END;
    END LOOP;
END
$walpost$;
\ir no_update.sql

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\set examine owners
\ir examine.sql
\unset outbox_transaction
COMMIT;
