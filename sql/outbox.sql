-- Creates the outbox table. A service inserts its events into this table, in the same transaction
-- that changes its other data.
--
--   psql -v schema=public -v table=outbox -f sql/outbox.sql
--
-- The variable max_event_bytes limits the combined size of an event's payload and headers, in bytes
-- of text. The default is 990000.
--
-- Run by: the role that will own the table, which needs CREATE on the schema. Safe to run again.
-- An existing table of that name, such as one created for Debezium, is not changed at all.
-- `walpost init` runs the same SQL: uuidv7.sql, this file, no_update.sql.
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

CREATE TABLE IF NOT EXISTS :"schema".:"table" (
    -- The value of the record's `id` header, by which consumers recognize duplicate records.
    id            uuid        NOT NULL PRIMARY KEY,
    -- Part of the record's topic name: outbox.event.<aggregatetype>.
    aggregatetype text        NOT NULL,
    -- The record's key. All events of an aggregate are sent to the same partition, which preserves
    -- their order.
    aggregateid   text        NOT NULL,
    type          text        NOT NULL,
    -- The record's value.
    payload       jsonb,
    -- A JSON object, each member of which becomes a header of the record.
    headers       jsonb,
    created_at    timestamptz NOT NULL DEFAULT now(),

    CONSTRAINT walpost_headers_object CHECK (jsonb_typeof(headers) = 'object'),
    -- Kafka rejects an event that is too large, which halts the pipeline and delays all later
    -- events. With this limit, the transaction that inserts the event fails instead. By default, a
    -- producer sends records of at most 1,000,000 bytes (message.max.bytes), and a topic accepts
    -- batches of at most 1,048,588 bytes (max.message.bytes). The default limit leaves 10,000 bytes
    -- for the key, the other headers and Kafka's own fields. To allow larger events, raise both
    -- Kafka settings first. The check uses the length of the text, because payload and headers are
    -- sent as text. pg_column_size() might return the compressed size. For a payload of one
    -- kilobyte, the check adds a few microseconds to an insert.
    CONSTRAINT walpost_event_size CHECK (
        coalesce(octet_length(payload::text), 0) + coalesce(octet_length(headers::text), 0) <= :'max_event_bytes'::int8),
    -- The columns aggregatetype, aggregateid and type become part of the topic name, the key and a
    -- header, respectively. A topic name has at most 249 characters, 13 of which are used by the
    -- prefix 'outbox.event.'. Consumers do not expect keys or headers of several megabytes. Without
    -- these limits, any role with INSERT could write rows that every pipeline for this table would
    -- have to send to the dead-letter topic. The error message that a service receives contains
    -- only the constraint's name and the row, so the name states the limit. A regular expression
    -- with a repetition count, {1,236}, takes 12 microseconds per row instead of 0.3.
    CONSTRAINT walpost_aggregatetype_fits_topic_name CHECK (
        octet_length(aggregatetype) BETWEEN 1 AND 236 AND aggregatetype !~ '[^a-zA-Z0-9._-]'),
    CONSTRAINT walpost_aggregateid_up_to_1024_bytes CHECK (octet_length(aggregateid) <= 1024),
    CONSTRAINT walpost_type_up_to_1024_bytes CHECK (octet_length(type) <= 1024)
);

DO $walpost$
DECLARE
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
BEGIN
    IF current_setting('walpost.table_is_new')::boolean AND EXISTS (SELECT FROM pg_class
        WHERE oid = to_regclass(format('%I.%I', in_schema, outbox_name))
            AND relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)) THEN
        EXECUTE format('ALTER TABLE %I.%I ALTER COLUMN id SET DEFAULT %s', in_schema, outbox_name,
            CASE WHEN to_regprocedure('pg_catalog.uuidv7()') IS NOT NULL THEN 'uuidv7()'
                ELSE format('%I.walpost_uuidv7()', in_schema) END);
        EXECUTE format('COMMENT ON CONSTRAINT walpost_aggregatetype_fits_topic_name ON %s IS %L', format('%I.%I', in_schema, outbox_name),
            'Becomes part of the topic name: 1 to 236 characters of a to z, A to Z, 0 to 9, ".", "_" and "-"');
        EXECUTE format('COMMENT ON CONSTRAINT walpost_event_size ON %s IS %L', format('%I.%I', in_schema, outbox_name),
            'The maximum size of payload and headers as text, in bytes, so that Kafka accepts the event');
    END IF;
END
$walpost$;
\ir no_update.sql

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\set examine owners
\ir examine.sql
\unset outbox_transaction
COMMIT;
