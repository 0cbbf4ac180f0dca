-- Creates the functions for an outbox without a table: walpost.publish() writes events only to WAL.
--
--   psql -f sql/publish.sql
--
--   SELECT walpost.publish('order', '4711', 'OrderPlaced', '{"total": "12.50"}');
--
-- The variable max_event_bytes limits the size of an event in bytes. The default is 990000. If the
-- variable is not set when this file is run again, the existing limit is kept.
--
-- An event belongs to the transaction that calls the function. Events are delivered in commit
-- order, after their transactions have committed. An event is never delivered if the call is rolled
-- back, even if only to a savepoint.
-- No table stores the events, so there is nothing to vacuum or delete. However, if the slot is
-- lost, the events can't be resent.
--
-- Run by: a role with CREATE on the database. Safe to run again as the same role: the functions are
-- replaced, but keep the privileges that were granted on them. `walpost init --outbox messages`
-- runs the same SQL.
--
-- Initially, only the functions' owner may publish events. sql/writer.sql (`walpost init --writer
-- shop`) allows the role `shop` to publish. If PUBLIC may call the functions, `walpost check`
-- reports that, along with the statements that revoke the privilege.
--
-- Events can be forged: these functions call pg_logical_emit_message(), which PostgreSQL allows
-- every role to call. A role that may call this function can write any event, and messages that are
-- not events, with any prefix. Therefore, revoke the privilege from PUBLIC as a superuser, in each
-- database with a message outbox. Writers keep the privilege, because sql/writer.sql grants it to
-- them:
--   REVOKE EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text),
--       pg_catalog.pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC;
-- Since PostgreSQL 17, both functions have one more argument: (boolean, text, text, boolean),
-- (boolean, text, bytea, boolean).
--
-- The functions run with the caller's search_path. Therefore, every function, operator and type in
-- their bodies is qualified with its schema. If a function were not qualified, a function of the
-- same name in another schema could be called instead, if its argument types matched better. SET
-- search_path would prevent such calls too, but then `publish` could not be inlined into the
-- calling statement.
\set ON_ERROR_STOP on
\if :{?table}
\else
\set table outbox
\endif
\if :{?max_event_bytes}
\else
\set max_event_bytes ''
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
BEGIN;
-- The functions are not specific to one table. Therefore, their owner must not be a role that is
-- trusted only because that role owns a table.
\set table_of_session :table
\set table ''
\set examine owners
\ir examine.sql

SET walpost.max_event_bytes = :'max_event_bytes';

DO $walpost$
DECLARE
    max_event_bytes pg_catalog.int8 := nullif(pg_catalog.current_setting('walpost.max_event_bytes'), '')::pg_catalog.int8;
BEGIN
    IF pg_catalog.to_regnamespace('walpost') IS NULL THEN
        CREATE SCHEMA walpost;
    END IF;
    -- Walpost rejects a message that is larger than both 16 MiB and max_row_bytes.
    IF max_event_bytes > 16777216 THEN
        RAISE EXCEPTION 'max_event_bytes is %, expected at most 16777216', max_event_bytes
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use a table for larger events.';
    END IF;
    IF max_event_bytes IS NOT NULL OR pg_catalog.to_regprocedure('walpost.max_event_bytes()') IS NULL THEN
        EXECUTE pg_catalog.format($ddl$
            CREATE OR REPLACE FUNCTION walpost.max_event_bytes() RETURNS pg_catalog.int8 LANGUAGE sql IMMUTABLE
            RETURN (%L::pg_catalog.int8)
            $ddl$, coalesce(max_event_bytes, 990000));
    END IF;
    -- Privileges are revoked only on new functions, so that existing functions keep the privileges
    -- that were granted on them.
    PERFORM pg_catalog.set_config('walpost.publish_is_new', (NOT EXISTS (SELECT FROM pg_catalog.pg_proc
        WHERE pronamespace = 'walpost'::pg_catalog.regnamespace
        AND proname IN ('publish', 'publish_bytes')))::pg_catalog.text, false);
END
$walpost$;

-- Publishes a payload other than JSON, such as Avro, Protobuf, or text converted with
-- convert_to(..., 'UTF8'). The payload can also be NULL.
-- `prefix` selects the event's outbox. The value must match a pipeline's `prefix`, which by default
-- is walpost_ followed by the pipeline's name. If no pipeline has this prefix, the event is not
-- delivered, and no error is reported.
-- The envelope is documented in src/outbox/envelope.rs. For speed, the envelope is built in a
-- single expression, and the message's LSN is assigned to a variable. Every PL/pgSQL statement adds
-- overhead, and PERFORM adds the most.
CREATE OR REPLACE FUNCTION walpost.publish_bytes(
    aggregatetype pg_catalog.text, aggregateid pg_catalog.text, type pg_catalog.text, payload pg_catalog.bytea,
    headers pg_catalog.jsonb DEFAULT NULL, id pg_catalog.uuid DEFAULT pg_catalog.gen_random_uuid(),
    prefix pg_catalog.text DEFAULT 'walpost_outbox')
RETURNS pg_catalog.uuid LANGUAGE plpgsql VOLATILE AS $walpost$
DECLARE
    -- The envelope is NULL if any of the first three arguments or the id is NULL. Text is converted
    -- to UTF-8, because PostgreSQL sends messages byte for byte, without converting them.
    envelope pg_catalog.bytea := E'\\x01'::pg_catalog.bytea
        OPERATOR(pg_catalog.||) pg_catalog.uuid_send(id)
        OPERATOR(pg_catalog.||) pg_catalog.timestamptz_send(pg_catalog.now())
        OPERATOR(pg_catalog.||) pg_catalog.int4send(pg_catalog.octet_length(pg_catalog.convert_to(aggregatetype, 'UTF8')))
        OPERATOR(pg_catalog.||) pg_catalog.convert_to(aggregatetype, 'UTF8')
        OPERATOR(pg_catalog.||) pg_catalog.int4send(pg_catalog.octet_length(pg_catalog.convert_to(aggregateid, 'UTF8')))
        OPERATOR(pg_catalog.||) pg_catalog.convert_to(aggregateid, 'UTF8')
        OPERATOR(pg_catalog.||) pg_catalog.int4send(pg_catalog.octet_length(pg_catalog.convert_to(type, 'UTF8')))
        OPERATOR(pg_catalog.||) pg_catalog.convert_to(type, 'UTF8')
        OPERATOR(pg_catalog.||) CASE WHEN headers IS NULL THEN E'\\xffffffff'::pg_catalog.bytea
            ELSE pg_catalog.int4send(pg_catalog.octet_length(pg_catalog.convert_to(headers::pg_catalog.text, 'UTF8')))
                OPERATOR(pg_catalog.||) pg_catalog.convert_to(headers::pg_catalog.text, 'UTF8') END
        OPERATOR(pg_catalog.||) CASE WHEN payload IS NULL THEN E'\\x00'::pg_catalog.bytea
            ELSE E'\\x01'::pg_catalog.bytea OPERATOR(pg_catalog.||) payload END;
    lsn pg_catalog.pg_lsn;
BEGIN
    IF envelope IS NULL OR prefix IS NULL THEN
        RAISE EXCEPTION 'aggregatetype, aggregateid, type, id and prefix of an event cannot be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF pg_catalog.jsonb_typeof(headers) OPERATOR(pg_catalog.<>) 'object' THEN
        RAISE EXCEPTION 'headers of an event must be a JSON object, not %', pg_catalog.jsonb_typeof(headers)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Each member becomes a header of the record.';
    -- The same limit as the constraint walpost_event_size in outbox.sql, where it is explained.
    ELSIF pg_catalog.octet_length(envelope) OPERATOR(pg_catalog.>) walpost.max_event_bytes() THEN
        RAISE EXCEPTION 'event has % bytes: at most % are allowed', pg_catalog.octet_length(envelope), walpost.max_event_bytes()
            USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Store large data where consumers can fetch it, and send a reference. To allow larger events, raise the limits '
                'of Kafka, then run: walpost init --max-event-bytes BYTES --config FILE.';
    -- The same limits as the constraints in outbox.sql, where they are explained.
    ELSIF pg_catalog.octet_length(aggregatetype) OPERATOR(pg_catalog.>) 236
        OR pg_catalog.octet_length(aggregateid) OPERATOR(pg_catalog.>) 1024
        OR pg_catalog.octet_length(type) OPERATOR(pg_catalog.>) 1024 THEN
        RAISE EXCEPTION 'aggregatetype, aggregateid and type of an event have %, % and % bytes: at most 236, 1024 and 1024 are allowed',
            pg_catalog.octet_length(aggregatetype), pg_catalog.octet_length(aggregateid), pg_catalog.octet_length(type)
            USING ERRCODE = 'program_limit_exceeded',
            HINT = 'They become a topic name, a key and a header. Put larger values into the payload.';
    ELSIF aggregatetype OPERATOR(pg_catalog.!~) '^[a-zA-Z0-9._-]+$' THEN
        RAISE EXCEPTION 'aggregatetype of an event is %, which no topic name can contain', pg_catalog.quote_literal(aggregatetype)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Use only the characters a-z A-Z 0-9 . _ - and at least one.';
    END IF;
    lsn := pg_catalog.pg_logical_emit_message(true, prefix, envelope);
    RETURN id;
END
$walpost$;

COMMENT ON FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text)
    IS 'Writes an event into WAL, and returns its id';

-- Publishes a JSON payload. PostgreSQL inlines an SQL function of this form into the calling
-- statement, at no extra cost. The function's body is parsed when the function is created.
CREATE OR REPLACE FUNCTION walpost.publish(
    aggregatetype pg_catalog.text, aggregateid pg_catalog.text, type pg_catalog.text, payload pg_catalog.jsonb,
    headers pg_catalog.jsonb DEFAULT NULL, id pg_catalog.uuid DEFAULT pg_catalog.gen_random_uuid(),
    prefix pg_catalog.text DEFAULT 'walpost_outbox')
RETURNS pg_catalog.uuid LANGUAGE sql VOLATILE
RETURN walpost.publish_bytes(aggregatetype, aggregateid, type, pg_catalog.convert_to(payload::pg_catalog.text, 'UTF8'),
    headers, id, prefix);

COMMENT ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text)
    IS 'Writes an event with a payload in JSON into WAL, and returns its id';

DO $walpost$
BEGIN
    IF pg_catalog.current_setting('walpost.publish_is_new')::pg_catalog.bool THEN
        REVOKE EXECUTE ON FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text),
            walpost.publish(text, text, text, jsonb, jsonb, uuid, text) FROM PUBLIC;
    END IF;
END
$walpost$;

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\set examine 'owners present'
\ir examine.sql
COMMIT;
-- Restores the variable `table` for files that the same psql session runs next.
\set table :table_of_session
