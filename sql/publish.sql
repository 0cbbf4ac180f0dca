-- The outbox without a table: walpost.publish() writes an event only to WAL.
--
--   psql -f sql/publish.sql
--
--   SELECT walpost.publish('order', '4711', 'OrderPlaced', '{"total": "12.50"}');
--
-- The variable max_event_bytes limits the size of an event in bytes; the default is 990000. If the
-- variable is not set, a second run keeps the existing limit.
--
-- The event is part of the transaction that calls the function: it is delivered if and when that
-- transaction commits, in commit order, and never if it is rolled back, even to a savepoint.
-- Nothing is stored in a table, so there is nothing to vacuum or to delete, but if the slot is
-- lost, the events can't be sent again.
--
-- Run by: a role with CREATE on the database; a second time, the same role. Safe to run again: the
-- functions are replaced, and privileges that were granted or revoked on them are kept. `walpost
-- init --outbox messages` runs the same.
--
-- Who may publish: initially, only the owner of the functions may. sql/writer.sql
-- (`walpost init --writer shop`) allows the role `shop` to publish. If PUBLIC may call the
-- functions, `walpost check` reports it, with the statements that revoke it.
--
-- Who may forge events: these functions use pg_logical_emit_message(), which PostgreSQL allows
-- every role to call. Any role that may call it can write any event, or a message that is not an
-- event, with any prefix. Therefore, revoke the privilege from PUBLIC as a superuser, in each
-- database with such an outbox; sql/writer.sql has granted it to the writers:
--   REVOKE EXECUTE ON FUNCTION pg_catalog.pg_logical_emit_message(boolean, text, text),
--       pg_catalog.pg_logical_emit_message(boolean, text, bytea) FROM PUBLIC;
-- Since PostgreSQL 17, both functions have one more argument: (boolean, text, text, boolean),
-- (boolean, text, bytea, boolean).
--
-- The bodies run in the calling session, with its search_path. Therefore every function, operator
-- and type in them is qualified with its schema: if only a name is given, a function in a schema of
-- that path whose argument types match better is called instead. SET search_path on the functions
-- would prevent that too, but would also prevent `publish` from being inlined into the statement
-- that calls it.
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
-- The functions belong to no table, so no table's owner is trusted with them.
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
    -- Walpost does not accept a larger message as an event.
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
    -- Nothing is revoked from functions that already exist.
    PERFORM pg_catalog.set_config('walpost.publish_is_new', (NOT EXISTS (SELECT FROM pg_catalog.pg_proc
        WHERE pronamespace = 'walpost'::pg_catalog.regnamespace
        AND proname IN ('publish', 'publish_bytes')))::pg_catalog.text, false);
END
$walpost$;

-- For payloads other than JSON: Avro, Protobuf, or text as convert_to(..., 'UTF8'). NULL is also a
-- payload.
-- `prefix` selects the outbox of the event: it is the pipeline's `prefix`, by default walpost_ and
-- its name. An event with a prefix that no pipeline has is not delivered, and no error is reported.
-- The envelope is documented in src/outbox/envelope.rs. The envelope is a single expression, and
-- the last step is an assignment, because each PL/pgSQL statement has a cost, and PERFORM has the
-- highest.
CREATE OR REPLACE FUNCTION walpost.publish_bytes(
    aggregatetype pg_catalog.text, aggregateid pg_catalog.text, type pg_catalog.text, payload pg_catalog.bytea,
    headers pg_catalog.jsonb DEFAULT NULL, id pg_catalog.uuid DEFAULT pg_catalog.gen_random_uuid(),
    prefix pg_catalog.text DEFAULT 'walpost_outbox')
RETURNS pg_catalog.uuid LANGUAGE plpgsql VOLATILE AS $walpost$
DECLARE
    -- NULL if one of the first three arguments or the id is NULL. Text is converted to UTF-8,
    -- because a message is sent byte for byte.
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
    -- The limit is the same as walpost_event_size in outbox.sql, which explains it.
    ELSIF pg_catalog.octet_length(envelope) OPERATOR(pg_catalog.>) walpost.max_event_bytes() THEN
        RAISE EXCEPTION 'event has % bytes: at most % are allowed', pg_catalog.octet_length(envelope), walpost.max_event_bytes()
            USING ERRCODE = 'program_limit_exceeded',
            HINT = 'Store large data where consumers can fetch it, and send a reference. To allow larger events, raise the limits '
                'of Kafka, then run: walpost init --max-event-bytes BYTES --config FILE.';
    -- The limits are those of the constraints in outbox.sql, which explains them.
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

-- For JSON payloads. An SQL function of this form is inlined into the statement that calls it, at
-- no extra cost; its body is parsed when the function is created.
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

-- Another role may have created an object that did not exist when it was first examined.
\set examine 'owners present'
\ir examine.sql
COMMIT;
-- Restores the variable for the files that the same psql runs next.
\set table :table_of_session
