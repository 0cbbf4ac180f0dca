-- The outbox without a table: walpost.publish() writes an event into the write-ahead log alone.
--
--   psql -f sql/publish.sql
--
--   SELECT walpost.publish('order', '4711', 'OrderPlaced', '{"total": "12.50"}');
--
-- The event belongs to the transaction that calls it: it is delivered if and when that commits, in commit order, and
-- never if it is rolled back, also to a savepoint. Nothing is stored in a table, so there is nothing to vacuum or to
-- delete; and nothing to send again from, once the slot is lost.
-- Run by: a role with CREATE on the database; a second time, the same role. Twice without harm: the functions are
-- replaced, what was granted or revoked on them stays. `walpost init --outbox log` runs the same.
--
-- Everybody may call them, as everybody may call pg_logical_emit_message(), which they stand on. To let only a role
-- `shop` publish, take both away:
--   REVOKE USAGE ON SCHEMA walpost FROM PUBLIC;
--   GRANT USAGE ON SCHEMA walpost TO shop;
--   REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, text),
--       pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC;
--   GRANT EXECUTE ON FUNCTION pg_logical_emit_message(boolean, text, bytea) TO shop;
-- From PostgreSQL 17 on both have one more argument: (boolean, text, text, boolean), (boolean, text, bytea, boolean).
-- ALTER FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text) SECURITY DEFINER SET search_path =
-- pg_catalog, pg_temp saves the last line, and costs each call a few microseconds; running this file takes it back.
\set ON_ERROR_STOP on
-- search_path is pg_catalog from here on, also for what the session does next (examine.sql says why).
SET search_path = pg_catalog;
SET row_security = off;
-- There is no table whose owner could own them.
\set table ''
\set examine owners
\ir examine.sql

DO $walpost$
BEGIN
    -- Granted with the schema, and never again: it may have been revoked since.
    IF to_regnamespace('walpost') IS NULL THEN
        CREATE SCHEMA walpost;
        GRANT USAGE ON SCHEMA walpost TO PUBLIC;
    END IF;
END
$walpost$;

-- Payloads that are no JSON: Avro, Protobuf, text as convert_to(..., 'UTF8'). NULL is a payload too.
-- `prefix` says which outbox the event is for: the pipeline's `prefix`, by default walpost_ and its name. An event with
-- a prefix that no pipeline has goes nowhere, and nobody is told.
-- The envelope is documented in src/outbox/envelope.rs. It is one expression, and the last step an assignment, because
-- in PL/pgSQL each statement costs, and PERFORM most.
CREATE OR REPLACE FUNCTION walpost.publish_bytes(
    aggregatetype text, aggregateid text, type text, payload bytea, headers jsonb DEFAULT NULL,
    id uuid DEFAULT gen_random_uuid(), prefix text DEFAULT 'walpost_outbox')
RETURNS uuid LANGUAGE plpgsql VOLATILE AS $walpost$
DECLARE
    -- NULL if one of the first three or the id is. UTF-8, since a message is sent in the bytes it has.
    envelope bytea := '\x01'::bytea || uuid_send(id) || timestamptz_send(now())
        || int4send(octet_length(convert_to(aggregatetype, 'UTF8'))) || convert_to(aggregatetype, 'UTF8')
        || int4send(octet_length(convert_to(aggregateid, 'UTF8'))) || convert_to(aggregateid, 'UTF8')
        || int4send(octet_length(convert_to(type, 'UTF8'))) || convert_to(type, 'UTF8')
        || CASE WHEN headers IS NULL THEN '\xffffffff'::bytea
            ELSE int4send(octet_length(convert_to(headers::text, 'UTF8'))) || convert_to(headers::text, 'UTF8') END
        || CASE WHEN payload IS NULL THEN '\x00'::bytea ELSE '\x01'::bytea || payload END;
    lsn pg_lsn;
BEGIN
    IF envelope IS NULL OR prefix IS NULL THEN
        RAISE EXCEPTION 'aggregatetype, aggregateid, type, id and prefix of an event can not be null'
            USING ERRCODE = 'null_value_not_allowed';
    ELSIF jsonb_typeof(headers) <> 'object' THEN
        RAISE EXCEPTION 'headers of an event are a JSON object, not %', jsonb_typeof(headers)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Each member becomes a header of the record.';
    -- As walpost_event_size in outbox.sql, which has the reasons.
    ELSIF octet_length(envelope) > 16777216 THEN
        RAISE EXCEPTION 'event of % bytes: at most 16777216 are allowed', octet_length(envelope)
            USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Put what is large where consumers can fetch it, and send a reference.';
    END IF;
    lsn := pg_logical_emit_message(true, prefix, envelope);
    RETURN id;
END
$walpost$;

COMMENT ON FUNCTION walpost.publish_bytes(text, text, text, bytea, jsonb, uuid, text)
    IS 'Writes an event into the write-ahead log, and returns its id';

-- Payloads in JSON. An SQL function of this form becomes part of the statement that calls it, and costs nothing more.
CREATE OR REPLACE FUNCTION walpost.publish(
    aggregatetype text, aggregateid text, type text, payload jsonb, headers jsonb DEFAULT NULL,
    id uuid DEFAULT gen_random_uuid(), prefix text DEFAULT 'walpost_outbox')
RETURNS uuid LANGUAGE sql VOLATILE AS $walpost$
    SELECT walpost.publish_bytes(aggregatetype, aggregateid, type, convert_to(payload::text, 'UTF8'), headers, id, prefix)
$walpost$;

COMMENT ON FUNCTION walpost.publish(text, text, text, jsonb, jsonb, uuid, text)
    IS 'Writes an event with a payload in JSON into the write-ahead log, and returns its id';
