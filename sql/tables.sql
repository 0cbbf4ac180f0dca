-- Creates walpost.add_outbox, which adds an outbox table to a publication for several outboxes.
--
--   psql -f sql/tables.sql
--
--   SELECT walpost.add_outbox('tenant_42.outbox', 'walpost_tenants');
--
-- After this call, the table's events are delivered, whether Walpost is already running or is
-- started later. The rows that the table already contains are delivered first, as part of the same
-- transaction. To write these rows to WAL exactly once, and before any row that is inserted later,
-- the function inserts them into walpost.outbox_row, which is in the publication, and deletes them
-- again. The function returns the number of these rows, or NULL if the table was already in the
-- publication. If a table was removed from the publication earlier, it is added again without its
-- rows, since most of them have been delivered. Rows that were committed while the table was not
-- published are recorded as missing until `walpost replay --dropped-slots` sends them.
--
-- The function waits until all transactions that have written to the table end, and it blocks other
-- writers until its own transaction ends. Each existing row is written to WAL once more. If a table
-- is too large to write all of its rows to WAL, add the table with ALTER PUBLICATION, and send its
-- rows with `walpost replay`.
--
-- Run by: a role with CREATE on the database. Run guard.sql and journal.sql first. Safe to run
-- again as the same role: an existing table is examined, the function is replaced, and both keep
-- the privileges that were granted on them. `walpost init` runs the same SQL for a pipeline with
-- `tables`.
--
-- A role that adds a table must own the publication and the table, as PostgreSQL requires, and must
-- be allowed to insert into and delete from walpost.outbox_row. With these privileges on
-- walpost.outbox_row, a role can forge any event of any table, so grant them to the role that runs
-- migrations, not to an application. If several roles run migrations, grant the privileges to a role without LOGIN and
-- make them members of it; docs/tables.md contains the statements.
--   GRANT USAGE ON SCHEMA walpost TO migrator;
--   GRANT INSERT, DELETE, SELECT ON walpost.outbox_row TO migrator;
--   GRANT INSERT, UPDATE, SELECT ON walpost.table_state TO migrator;
--   GRANT EXECUTE ON FUNCTION walpost.add_outbox(regclass, name) TO migrator;
--   ALTER PUBLICATION walpost_tenants OWNER TO migrator;     -- migrator needs CREATE on the database
--   GRANT walpost TO migrator;     -- since PostgreSQL 15: row filters of the owner could run code as
--                                  -- Walpost's role anyway
\set ON_ERROR_STOP on
\if :{?table}
\else
\set table outbox
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
BEGIN;
-- The function is used for all tables. Therefore, its owner must not be a role that is trusted only
-- because that role owns one of the tables.
\set table_of_session :table
\set table ''
\set examine 'owners outbox_row table_state'
\ir examine.sql

DO $walpost$
BEGIN
    IF to_regnamespace('walpost') IS NULL THEN
        CREATE SCHEMA walpost;
    END IF;
    PERFORM set_config('walpost.add_outbox_is_new', (NOT EXISTS (SELECT FROM pg_proc
        WHERE pronamespace = 'walpost'::regnamespace AND proname = 'add_outbox'))::text, false);
    IF to_regclass('walpost.outbox_row') IS NOT NULL THEN
        RETURN;
    END IF;
    -- Without a primary key, DELETE would fail if another publication that publishes deletes
    -- contained this table.
    CREATE TABLE walpost.outbox_row (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        publication text NOT NULL,
        relation oid NOT NULL,
        table_schema text NOT NULL,
        table_name text NOT NULL,
        -- A JSON array with the name and the type OID of each column.
        column_list text NOT NULL,
        -- A JSON array with the values of the columns in column_list, as text or null.
        row_values text NOT NULL
    );
    COMMENT ON TABLE walpost.outbox_row IS 'Rows that are being written to WAL while walpost.add_outbox adds their table; otherwise empty';
END
$walpost$;

CREATE OR REPLACE FUNCTION walpost.add_outbox(outbox pg_catalog.regclass, publication pg_catalog.name DEFAULT 'walpost_outbox')
RETURNS pg_catalog.int8 LANGUAGE plpgsql VOLATILE
-- Values must be formatted as they are in the replication stream. Walpost uses the same settings
-- for its replication connections.
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on SET row_security = off SET datestyle = 'ISO' SET intervalstyle = 'postgres'
SET extra_float_digits = 3 SET bytea_output = 'hex' SET timezone = 'UTC'
AS $walpost$
DECLARE
    -- The maximum size of a row: the value that `walpost init` set, or Walpost's default minus an
    -- allowance for the other columns.
    row_bytes_max CONSTANT int8 := coalesce(nullif(current_setting('walpost.row_bytes_max', true), '')::int8, 60000000);
    its_schema name;
    its_name name;
    kind "char";
    column_list text;
    row_values text;
    ordering text;
    added int8;
    longest int;
    code_of_others text;
    related text;
    -- Characters to replace in error messages: control characters, and characters that change the
    -- direction of text. psql prints messages unchanged, so a name that contains such characters
    -- could make a message look like a different one.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
    -- This database's values for the columns system_id and database_oid of walpost.table_state.
    system text := (SELECT system_identifier::text FROM pg_control_system());
    here oid := (SELECT oid FROM pg_database WHERE datname = current_database());
    was_published boolean;
    former_timeout CONSTANT text := current_setting('lock_timeout');
    -- By default, a statement waits indefinitely for a lock that another session holds.
    timeout CONSTANT text := CASE former_timeout WHEN '0' THEN '10s' ELSE former_timeout END;
    publication_oid oid;
    via_root boolean;
    -- The OIDs of the outbox, its partitions, its partition ancestors and walpost.outbox_row,
    -- excluding tables that are not in the publication.
    members oid[];
    holders text;
    untrusted name;
    -- The privilege that is needed to act as another role. Since PostgreSQL 16, membership is not
    -- sufficient.
    act_as CONSTANT text := CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END;
BEGIN
    PERFORM set_config('lock_timeout', timeout, true);
    -- At isolation level REPEATABLE READ or SERIALIZABLE, the snapshot might be older than the
    -- lock. If a transaction was still open when the snapshot was taken, the snapshot would not
    -- include the rows of that transaction.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'walpost.add_outbox was called in a transaction with isolation level %, expected read committed',
            current_setting('transaction_isolation') USING ERRCODE = 'active_sql_transaction';
    END IF;
    -- This function must run as the session's role, because lock_and_examine checks which code a
    -- statement would run as that role.
    IF current_user <> (CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END) THEN
        RAISE EXCEPTION 'walpost.add_outbox was called by a function that runs as role %', quote_ident(current_user)
            USING ERRCODE = 'insufficient_privilege', HINT = 'Call it directly, or in a function that is SECURITY INVOKER.';
    END IF;
    SELECT n.nspname, c.relname, c.relkind INTO STRICT its_schema, its_name, kind
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = outbox;
    SELECT b.oid, b.pubviaroot INTO publication_oid, via_root FROM pg_publication b WHERE b.pubname = add_outbox.publication;
    -- While the locks acquired by this call are held, the name can't be made to refer to another
    -- table.
    code_of_others := walpost.lock_and_examine(its_schema::text, its_name::text, 'SELECT'::text);
    IF outbox IS DISTINCT FROM to_regclass(format('%I.%I', its_schema, its_name)) THEN
        RAISE EXCEPTION 'table %.% was replaced by another one while it was being added', quote_ident(its_schema),
            quote_ident(its_name) USING ERRCODE = 'object_in_use', HINT = 'Add it again.';
    END IF;
    -- Once the table is locked, all transactions that wrote to it have ended, and any later
    -- transaction sees that it is published. If other roles' code was found, the table is not added, and its name may
    -- refer to a view by now, in which case LOCK TABLE would lock the tables in the view's query.
    IF code_of_others = '' THEN
        EXECUTE format('LOCK TABLE %I.%I IN SHARE ROW EXCLUSIVE MODE', its_schema, its_name);
    END IF;
    IF kind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '%.% is not a table', quote_ident(its_schema), quote_ident(its_name)
            USING ERRCODE = 'wrong_object_type';
    END IF;
    -- pg_publication_tables is not used, because since PostgreSQL 17, this view locks every table
    -- in the publication.
    WITH RECURSIVE tree (oid) AS (
        SELECT outbox::oid UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
    ) SELECT array_agg(c.oid) INTO members FROM pg_class c JOIN pg_publication b ON b.oid = publication_oid
        WHERE (c.oid IN (SELECT oid FROM tree) OR c.oid IN (SELECT a.relid FROM pg_partition_ancestors(outbox) AS a)
            OR c.oid = to_regclass('walpost.outbox_row'))
        AND (b.puballtables OR EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = b.oid AND r.prrelid = c.oid));
    IF current_setting('server_version_num')::int >= 150000 THEN
        EXECUTE 'WITH RECURSIVE tree (oid) AS (
                SELECT $2 UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
            ) SELECT $1 || array_agg(c.oid) FROM pg_class c JOIN pg_publication_namespace s ON s.pnnspid = c.relnamespace
            WHERE s.pnpubid = $3 AND (c.oid IN (SELECT oid FROM tree)
                OR c.oid IN (SELECT a.relid FROM pg_partition_ancestors($2) AS a) OR c.oid = to_regclass(''walpost.outbox_row''))'
            INTO members USING members, outbox::oid, publication_oid;
    END IF;
    -- If a partition ancestor is published without publish_via_partition_root, PostgreSQL already
    -- sends this table's rows under this table's name.
    IF outbox = ANY (members) OR NOT via_root AND EXISTS (
            SELECT FROM pg_partition_ancestors(outbox) AS a WHERE a.relid = ANY (members)) THEN
        PERFORM set_config('lock_timeout', former_timeout, true);
        RETURN NULL;
    ELSIF code_of_others IS DISTINCT FROM '' THEN
        RAISE EXCEPTION 'reading table %.% would run code of other roles as role %: %', quote_ident(its_schema),
            quote_ident(its_name), quote_ident(current_user), code_of_others USING ERRCODE = 'insufficient_privilege',
                HINT = format('Add it as the owner of the table: SELECT walpost.add_outbox(%L, %L)',
                    format('%I.%I', its_schema, its_name), publication);
    END IF;
    IF to_regclass('walpost.outbox_row') = ANY (members) IS NOT TRUE THEN
        RAISE EXCEPTION 'publication % does not exist, or does not contain table walpost.outbox_row', quote_ident(publication)
            USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = format('Create it: walpost init --config FILE; or run sql/publication.sql of Walpost in this database. If it exists: '
                    'ALTER PUBLICATION %I ADD TABLE walpost.outbox_row', publication);
    END IF;
    -- The slot must exist before the rows are written to WAL below, because a slot does not send
    -- changes that were written before the slot was created.
    IF NOT EXISTS (SELECT FROM pg_replication_slots WHERE plugin = 'pgoutput' AND NOT temporary
        AND database = current_database() AND confirmed_flush_lsn IS NOT NULL) THEN
        RAISE EXCEPTION 'no replication slot of database % could deliver the rows of table %.%', quote_ident(current_database()),
            quote_ident(its_schema), quote_ident(its_name) USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Create it: walpost init --config FILE; or run sql/slot.sql of Walpost in this database. Then add the table';
    END IF;
    -- If another table inherits from this table, PostgreSQL would send the other table's rows under
    -- the name of that other table.
    SELECT regexp_replace(format('%I.%I', n.nspname, c.relname), unprintable, '?', 'g') INTO related
        FROM pg_inherits JOIN pg_class c ON c.oid = inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE inhparent = outbox AND NOT c.relispartition LIMIT 1;
    IF related IS NOT NULL THEN
        RAISE EXCEPTION 'table % inherits from table %.%, so PostgreSQL would send its rows under a different table name', related,
            quote_ident(its_schema), quote_ident(its_name) USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = format('As the owner of %2$I.%3$I, insert its rows there, and end the inheritance: ALTER TABLE %1$s NO INHERIT %2$I.%3$I',
                    related, its_schema, its_name);
    END IF;
    -- If an ancestor is published, this partition's rows are already sent as rows of the ancestor,
    -- and would be delivered twice.
    SELECT regexp_replace(format('%I.%I', n.nspname, c.relname), unprintable, '?', 'g') INTO related
        FROM pg_partition_ancestors(outbox) AS a JOIN pg_class c ON c.oid = a.relid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = ANY (members) AND a.relid <> outbox LIMIT 1;
    IF related IS NOT NULL THEN
        RAISE EXCEPTION '%.% is a partition of table %, which is in publication %', quote_ident(its_schema),
            quote_ident(its_name), related, quote_ident(publication) USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Its rows are already delivered as rows of that table.';
    END IF;
    -- If a partition is already published, its rows would be copied with those of the other
    -- partitions, and delivered twice.
    SELECT regexp_replace(format('%I.%I', n.nspname, c.relname), unprintable, '?', 'g') INTO related
        FROM pg_partition_tree(outbox) AS t JOIN pg_class c ON c.oid = t.relid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = ANY (members) AND t.relid <> outbox LIMIT 1;
    IF related IS NOT NULL THEN
        RAISE EXCEPTION 'partition % of table %.% is already in publication %', related, quote_ident(its_schema),
            quote_ident(its_name), quote_ident(publication) USING ERRCODE = 'object_not_in_prerequisite_state',
                HINT = 'Adding the table would deliver the rows of that partition again. Add its other partitions one by one.';
    END IF;
    IF to_regclass('walpost.table_state') IS NULL THEN
        RAISE EXCEPTION 'table walpost.table_state does not exist' USING ERRCODE = 'undefined_table',
            HINT = 'Create it: walpost init --config FILE; or run sql/journal.sql and sql/role.sql of Walpost in this database';
    ELSIF NOT (has_table_privilege('walpost.table_state', 'SELECT') AND has_table_privilege('walpost.table_state', 'INSERT')
        AND has_table_privilege('walpost.table_state', 'UPDATE')) THEN
        RAISE EXCEPTION 'permission denied for table walpost.table_state' USING ERRCODE = 'insufficient_privilege',
            HINT = format('Grant it: GRANT SELECT, INSERT, UPDATE ON walpost.table_state TO %I', current_user);
    END IF;
    EXECUTE format('ALTER PUBLICATION %I ADD TABLE %I.%I', publication, its_schema, its_name);
    -- Statements on Walpost's own tables must not run other roles' code either. The first check
    -- ensures that neither table is a view, because LOCK TABLE would lock every table in the view's
    -- query. The second check is made while the tables are locked, so that nothing can be added to
    -- them until this transaction ends.
    FOR checks IN 1..2 LOOP
        SELECT c.relname INTO untrusted FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles o ON o.oid = c.relowner
            WHERE n.nspname = 'walpost' AND c.relname IN ('table_state', 'outbox_row')
            AND (c.relkind <> 'r' OR c.relrowsecurity
                OR NOT o.rolsuper AND NOT pg_has_role(c.relowner, (SELECT proowner FROM pg_proc
                    WHERE oid = 'walpost.add_outbox(regclass, name)'::regprocedure), act_as)
                OR EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid)
                OR EXISTS (SELECT FROM pg_rewrite WHERE ev_class = c.oid)
                -- Objects that users have created have OIDs of 16384 or higher.
                OR EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped
                    AND (atttypid >= 16384 OR atthasdef))
                OR EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND (indexprs IS NOT NULL OR indpred IS NOT NULL))
                OR EXISTS (SELECT FROM pg_constraint WHERE conrelid = c.oid AND contype NOT IN ('p', 'n'))
                OR EXISTS (SELECT FROM pg_inherits WHERE c.oid IN (inhrelid, inhparent))) LIMIT 1;
        IF untrusted IS NOT NULL THEN
            RAISE EXCEPTION 'table walpost.% belongs to an untrusted role, or has an object that sql/% does not create', untrusted,
                CASE untrusted WHEN 'outbox_row' THEN 'tables.sql' ELSE 'journal.sql' END
                USING ERRCODE = 'invalid_object_definition', DETAIL = 'It could run code as any role that uses the table. '
                    'It was not used, and nothing was changed.', HINT = 'To find out what it is: walpost init --config FILE';
        END IF;
        IF checks = 1 THEN
            LOCK TABLE walpost.table_state, walpost.outbox_row IN ROW EXCLUSIVE MODE;
        END IF;
    END LOOP;
    -- If a slot of the publication has already sent rows of this table, sending all of them again
    -- would duplicate them. Rows that were committed while the table was not published are recorded
    -- as missing when Walpost next compares the row in walpost.table_state with the publication.
    SELECT EXISTS (SELECT FROM walpost.table_state s WHERE s.publication = add_outbox.publication
        AND (s.relation = outbox OR outbox::oid::text = ANY (string_to_array(s.accepted_for, ',')))
        AND s.version = 1 AND s.system_id = system AND s.database_oid = here) INTO was_published;
    INSERT INTO walpost.table_state AS s (slot, table_schema, table_name, version, system_id, database_oid, publication, relation,
            memberships, is_out, seen_lsn, seen_xid, out_lsn, at, accepted_for)
        SELECT k.slot, its_schema, its_name, 1, system, here, add_outbox.publication, outbox, r.oid::text, was_published,
            CASE WHEN was_published THEN last.seen_lsn ELSE pg_current_wal_insert_lsn() END,
            -- The table is locked, so all transactions that wrote to it have ended.
            CASE WHEN was_published THEN last.seen_xid ELSE pg_snapshot_xmin(pg_current_snapshot())::text END,
            CASE WHEN was_published THEN last.out_lsn END, now(), outbox::oid::text
        FROM (SELECT DISTINCT slot FROM walpost.table_state WHERE table_state.publication = add_outbox.publication
            AND version = 1 AND system_id = system AND database_oid = here) AS k
        JOIN pg_publication b ON b.pubname = add_outbox.publication
        JOIN pg_publication_rel r ON r.prpubid = b.oid AND r.prrelid = outbox
        -- Finds the row of walpost.table_state by the table's OID, because the table may have been
        -- renamed.
        LEFT JOIN LATERAL (SELECT t.seen_lsn, t.seen_xid, t.out_lsn FROM walpost.table_state t WHERE t.slot = k.slot AND t.relation = outbox
            AND t.version = 1 AND t.system_id = system AND t.database_oid = here ORDER BY t.at DESC LIMIT 1) AS last ON true
        ON CONFLICT (slot, table_schema, table_name) DO UPDATE SET version = excluded.version, system_id = excluded.system_id,
            database_oid = excluded.database_oid, publication = excluded.publication, relation = excluded.relation,
            memberships = excluded.memberships, is_out = excluded.is_out, seen_lsn = excluded.seen_lsn,
            seen_xid = excluded.seen_xid, out_lsn = excluded.out_lsn, at = excluded.at,
            accepted_for = CASE
                WHEN NOT (s.version = 1 AND s.system_id = system AND s.database_oid = here) THEN excluded.accepted_for
                WHEN excluded.accepted_for = ANY (string_to_array(s.accepted_for, ',')) THEN s.accepted_for
                ELSE concat_ws(',', array_to_string((string_to_array(s.accepted_for, ','))
                    [cardinality(string_to_array(s.accepted_for, ',')) - 98:], ','), excluded.accepted_for) END;
    IF was_published THEN
        RAISE WARNING 'table %.% was in publication % before, so its rows are not sent again', quote_ident(its_schema),
            quote_ident(its_name), quote_ident(publication) USING HINT = format('Rows that were committed since the table was removed are '
                'recorded as missing. Send them: walpost replay --dropped-slots --table %L --config FILE', format('%I.%I', its_schema, its_name));
        PERFORM set_config('lock_timeout', former_timeout, true);
        RETURN 0;
    END IF;

    -- concat() formats values as they are in the replication stream. A cast to text would format
    -- some types differently.
    SELECT json_agg(json_build_array(attname, atttypid::int8) ORDER BY attnum)::text,
            string_agg(format('CASE num_nulls(o.%1$I) WHEN 0 THEN concat(o.%1$I) END', attname), ', ' ORDER BY attnum)
        INTO column_list, row_values FROM pg_attribute
        WHERE attrelid = outbox AND attnum > 0 AND NOT attisdropped AND attgenerated IN ('', 's');
    SELECT string_agg(format('o.%I', name), ', ' ORDER BY place) INTO ordering FROM (
        SELECT attname, 0 FROM pg_attribute WHERE attrelid = outbox AND attname = 'created_at' AND NOT attisdropped
            AND atttypid IN ('timestamptz'::regtype, 'timestamp'::regtype)
        UNION ALL SELECT attname, k.place FROM pg_index, unnest(indkey::int2[]) WITH ORDINALITY AS k (number, place)
            JOIN pg_attribute ON attnum = k.number WHERE indrelid = outbox AND indisprimary AND attrelid = outbox AND place <= indnkeyatts
    ) AS columns (name, place);
    EXECUTE format('INSERT INTO walpost.outbox_row (publication, relation, table_schema, table_name, column_list, row_values) '
        'SELECT $1, $2, $3, $4, $5, to_json(ARRAY[%s]::text[])::text FROM %I.%I AS o %s', row_values, its_schema, its_name,
        'ORDER BY ' || ordering) USING publication::text, outbox::oid, its_schema::text, its_name::text, column_list;
    GET DIAGNOSTICS added = ROW_COUNT;
    IF added > 0 THEN
        -- JSON escapes quotes, backslashes and control characters, so a row can be several times as
        -- long in walpost.outbox_row as in its own table.
        SELECT max(octet_length(r.row_values) + octet_length(r.column_list) + octet_length(r.publication)) + 1000
            INTO longest FROM walpost.outbox_row r;
        IF longest > row_bytes_max THEN
            RAISE EXCEPTION 'a row of %.% takes % bytes in walpost.outbox_row, expected at most %', quote_ident(its_schema),
                quote_ident(its_name), longest, row_bytes_max USING ERRCODE = 'program_limit_exceeded',
                HINT = format('Raise max_row_bytes of the pipeline to at least %s, restart the pipeline, and then add the table.', longest);
        END IF;
        DELETE FROM walpost.outbox_row;
    END IF;
    PERFORM set_config('lock_timeout', former_timeout, true);
    RETURN added;
EXCEPTION WHEN lock_not_available THEN
    WITH RECURSIVE tree (oid) AS (
        SELECT outbox::oid UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
    ) SELECT string_agg(DISTINCT format('PID %s of role %I (application_name %L) has a lock on %s', l.pid,
            coalesce(a.usename, ''), a.application_name, CASE l.locktype WHEN 'relation' THEN l.relation::regclass::text
                ELSE format('publication %I', publication) END), '; ')
        INTO holders FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
        WHERE l.database = here AND l.pid <> pg_backend_pid() AND (l.locktype = 'object'
            AND l.classid = 'pg_publication'::regclass AND l.objid = publication_oid
        OR l.locktype = 'relation' AND l.mode NOT IN ('AccessShareLock', 'RowShareLock') AND (l.relation IN (SELECT oid FROM tree)
            OR l.mode <> 'RowExclusiveLock' AND l.relation IN (to_regclass('walpost.outbox_row'), to_regclass('walpost.table_state'))));
    RAISE EXCEPTION 'table %.% was not added to publication %, because a lock was not available within %: %',
        quote_ident(its_schema), quote_ident(its_name), quote_ident(publication), timeout,
        coalesce(regexp_replace(holders, unprintable, '?', 'g'), 'the session that held the lock is unknown')
        USING ERRCODE = 'lock_not_available', HINT = 'Add the table again when that session has ended its transaction, or terminate the '
            'session: SELECT pg_catalog.pg_terminate_backend(PID). To wait longer: SET lock_timeout.';
END
$walpost$;

DO $walpost$
BEGIN
    IF current_setting('walpost.add_outbox_is_new')::boolean THEN
        REVOKE ALL ON FUNCTION walpost.add_outbox(regclass, name) FROM PUBLIC;
        COMMENT ON FUNCTION walpost.add_outbox(regclass, name) IS 'Adds a table to the outboxes of a publication, with its rows';
    END IF;
END
$walpost$;

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\set examine 'owners outbox_row present'
\ir examine.sql
COMMIT;
-- Restores the variable `table` for files that the same psql session runs next.
\set table :table_of_session
