-- Creates the publication, which selects the tables whose inserts the slot sends. The publication
-- must exist before the slot is created.
--
--   psql -v schema=public -v table=outbox -v publication=walpost_outbox -f sql/publication.sql
--
-- Run by: the table's owner, who needs CREATE on the database. Since PostgreSQL 15, `walpost run`
-- rejects a publication unless its owner is a superuser, may replicate, or can act as Walpost's
-- role; docs/tables.md explains why. Safe to run again: an existing publication of that name is
-- examined. The existing publication is changed only if several=on and it does not contain
-- walpost.outbox_row.
--
-- A message outbox has no table, but pgoutput always requires a publication. To create an empty
-- publication, set -v table=.
-- With -v several=on, the publication is for several outboxes. At first, such a publication
-- contains only walpost.outbox_row (see tables.sql). add_outbox.sql then adds each outbox.
-- Only inserts are published, because events never change, and deleting an old event is not itself
-- an event. With publish_via_partition_root, the rows of all partitions, including those created
-- later, are sent under the name of the partitioned table.
\set ON_ERROR_STOP on
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox
\endif
\if :{?publication}
\else
\set publication walpost_outbox
\endif
\if :{?several}
\else
\set several off
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
BEGIN;
\set examine owners
\ir examine.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.publication = :'publication';
SET walpost.several = :'several';

DO $walpost$
DECLARE
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
    outbox text := format('%I.%I', in_schema, outbox_name);
    name text := current_setting('walpost.publication');
    several boolean := current_setting('walpost.several')::boolean;
    found pg_publication;
    child text;
    -- Characters to replace in error messages: control characters, and characters that change the
    -- direction of text. psql prints messages unchanged, so a name that contains such characters
    -- could make a message look like a different one.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
    -- A row of pg_publication_tables, as JSON because its columns depend on the PostgreSQL version.
    entry jsonb;
BEGIN
    SELECT * INTO found FROM pg_publication WHERE pubname = name;
    IF found IS NULL THEN
        -- PostgreSQL would also publish tables that inherit from the outbox, and would send the
        -- rows of such a table under that table's own name.
        SELECT regexp_replace(format('%I.%I', n.nspname, c.relname), unprintable, '?', 'g') INTO child
            FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
            WHERE NOT several AND inhparent = to_regclass(outbox) AND NOT c.relispartition LIMIT 1;
        IF child IS NOT NULL THEN
            RAISE EXCEPTION 'table % inherits from table %, so PostgreSQL would send its rows under a different table name', child,
                outbox USING ERRCODE = 'object_not_in_prerequisite_state', HINT = format(
                    'As the owner of %2$s, insert its rows there, and end the inheritance: ALTER TABLE %1$s NO INHERIT %2$s', child, outbox);
        END IF;
        EXECUTE format('CREATE PUBLICATION %I %s WITH (publish = ''insert'', publish_via_partition_root = true)',
            name, CASE WHEN several THEN 'FOR TABLE walpost.outbox_row'
                WHEN outbox_name <> '' THEN 'FOR TABLE ' || outbox ELSE '' END);
        RETURN;
    END IF;

    IF several THEN
        IF NOT (found.pubinsert AND found.pubviaroot) THEN
            RAISE EXCEPTION 'publication % exists but does not publish inserts under the names of partitioned tables',
                quote_ident(name) USING HINT = format(
                    'ALTER PUBLICATION %I SET (publish = ''insert'', publish_via_partition_root = true);', name);
        END IF;
        -- pg_publication_tables is not used, because since PostgreSQL 17, this view locks every
        -- table in the publication. If the publication contains the schema walpost, also adding
        -- walpost.outbox_row itself does no harm.
        IF NOT found.puballtables AND NOT EXISTS (SELECT FROM pg_publication_rel
            WHERE prpubid = found.oid AND prrelid = to_regclass('walpost.outbox_row')) THEN
            -- The publication was created for a single table, or manually. Raising an error would
            -- also undo the creation of walpost.outbox_row. Therefore, walpost.outbox_row is added
            -- to the publication if the current role has the privileges of the publication's owner.
            IF NOT pg_has_role(found.pubowner, 'USAGE') THEN
                RAISE EXCEPTION 'publication % exists but does not contain table walpost.outbox_row', quote_ident(name)
                    USING HINT = regexp_replace(format('As its owner, %s: walpost init --config FILE; or: '
                        'ALTER PUBLICATION %I ADD TABLE walpost.outbox_row', found.pubowner::regrole, name),
                        E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]', '?', 'g');
            END IF;
            EXECUTE format('ALTER PUBLICATION %I ADD TABLE walpost.outbox_row', name);
            RAISE NOTICE 'table walpost.outbox_row was added to publication %', quote_ident(name);
        END IF;
        RETURN;
    END IF;

    IF outbox_name = '' THEN
        IF EXISTS (SELECT FROM pg_publication_tables WHERE pubname = name) THEN
            RAISE EXCEPTION 'publication % exists and contains tables, but an outbox without a table requires an empty publication',
                quote_ident(name) USING HINT = 'Choose another name for the publication.';
        END IF;
        RETURN;
    END IF;

    IF NOT found.pubinsert THEN
        RAISE EXCEPTION 'publication % exists but does not publish inserts', quote_ident(name)
            USING HINT = format('ALTER PUBLICATION %I SET (publish = ''insert'');', name);
    END IF;
    IF (SELECT relkind FROM pg_class WHERE oid = outbox::regclass) = 'p' AND NOT found.pubviaroot THEN
        RAISE EXCEPTION 'publication % exists but publishes the partitions of % under their own names',
            quote_ident(name), outbox
            USING HINT = format('ALTER PUBLICATION %I SET (publish_via_partition_root = true);', name);
    END IF;
    SELECT to_jsonb(listed) INTO entry FROM pg_publication_tables AS listed
        WHERE pubname = name AND schemaname = in_schema AND tablename = outbox_name;
    IF entry IS NULL THEN
        RAISE EXCEPTION 'publication % exists but does not contain table %', quote_ident(name), outbox
            USING HINT = format('ALTER PUBLICATION %I ADD TABLE %s;', name, outbox);
    END IF;
    IF entry ->> 'rowfilter' IS NOT NULL THEN
        RAISE WARNING 'publication % has a row filter on table %: rows for which % is not true are never delivered',
            quote_ident(name), outbox, regexp_replace(entry ->> 'rowfilter', unprintable, '?', 'g');
    END IF;
    IF found.pubupdate OR found.pubdelete OR found.pubtruncate THEN
        RAISE NOTICE 'publication % publishes more than inserts, which costs server resources and has no benefit',
            quote_ident(name) USING HINT = format('ALTER PUBLICATION %I SET (publish = ''insert'');', name);
    END IF;
END
$walpost$;

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\ir examine.sql
COMMIT;
