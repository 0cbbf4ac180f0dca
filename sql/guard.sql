-- Lets Walpost lock a table and examine it before a statement uses it.
--
--   psql -f sql/guard.sql
--
-- Whoever owns a table can add an index, a constraint or statistics that call a function, and the planner evaluates that
-- function as the role that reads the table. An examination finds such objects, but it is worth something only if none can be
-- added between the examination and the statement, and if the table keeps its name until then. Walpost's role has SELECT alone,
-- which locks nothing, so a function does it.
--
--   SELECT walpost.lock_and_examine('public', 'outbox', 'SELECT');
--
-- Until the transaction ends, nobody can change the definition of the table or of what inherits from it, or rename its schema.
-- Reading and writing rows goes on; VACUUM, CREATE INDEX and ALTER TABLE wait. The result lists what would run code of other
-- roles as the caller, and is empty if nothing would; it is null if there is no such table. The third argument says what the
-- statement does: SELECT, DELETE, each with conditions on created_at and the primary key at most; COMPARE, which is a SELECT with a
-- condition on any column; or ALTER, which attaches or detaches a partition.
--
-- Run by: a superuser, since a schema that another role owns can be kept from being renamed by a superuser alone. A role that is
-- not a superuser can run it too: tables in schemas of other roles are then refused. Safe to run again: the function is replaced.
-- `walpost init` runs the same.
\set ON_ERROR_STOP on
-- search_path is pg_catalog from here on, also for what the session does next.
\ir session.sql
\set table ''
\set examine owners
\ir examine.sql

DO $walpost$
BEGIN
    IF to_regnamespace('walpost') IS NULL THEN
        CREATE SCHEMA walpost;
    END IF;
END
$walpost$;

CREATE OR REPLACE FUNCTION walpost.lock_and_examine(
    schema_name pg_catalog.text, table_name pg_catalog.text, statement pg_catalog.text)
RETURNS pg_catalog.text LANGUAGE plpgsql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET row_security = off
AS $walpost$
DECLARE
    caller name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
    -- Roles that can act as the caller anyway. Up to PostgreSQL 15, CREATEROLE can make itself a member of every role that is not
    -- a superuser.
    trusted oid[] := (SELECT array_agg(oid) FROM pg_roles WHERE pg_has_role(oid, caller, 'MEMBER')
        OR rolcreaterole AND current_setting('server_version_num')::int < 160000
            AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = caller));
    definer_is_superuser boolean := (SELECT rolsuper FROM pg_roles WHERE rolname = current_user);
    outbox oid;
    kind "char";
    table_owner oid;
    schema_oid oid;
    schema_owner oid;
    tables oid[];
    calls text;
BEGIN
    -- Under another isolation level the queries below would see the catalogs as they were before the table was locked.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'walpost.lock_and_examine was called in a transaction with isolation level %, expected read committed',
            current_setting('transaction_isolation') USING ERRCODE = 'active_sql_transaction';
    END IF;
    SELECT c.oid, c.relkind, c.relowner, n.oid, CASE WHEN n.nspowner = to_regrole('pg_database_owner')
            THEN (SELECT datdba FROM pg_database WHERE datname = current_database()) ELSE n.nspowner END
        INTO outbox, kind, table_owner, schema_oid, schema_owner FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = schema_name AND c.relname = table_name;
    IF outbox IS NULL THEN
        RETURN NULL;
    ELSIF kind NOT IN ('r', 'p') THEN
        RETURN format('%I.%I is not a table', schema_name, table_name);
    END IF;
    -- The lock keeps VACUUM out, so it is given to roles that could take it themselves, and to Walpost's.
    IF NOT (has_table_privilege(caller, outbox, 'UPDATE, DELETE, TRUNCATE') OR pg_has_role(caller, table_owner, 'USAGE')
        OR has_table_privilege(caller, outbox, 'SELECT')
            AND coalesce(has_table_privilege(caller, to_regclass('walpost.slot_state'), 'UPDATE'), false)) THEN
        RAISE EXCEPTION 'permission denied for table %', table_name USING ERRCODE = 'insufficient_privilege';
    END IF;

    -- With partitions and whatever else inherits from it.
    WITH RECURSIVE tree (oid) AS (
        SELECT outbox UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
    ) SELECT array_agg(oid) INTO tables FROM tree;
    -- If only trusted roles could change anything, there is nothing to keep them from.
    IF schema_owner <> ALL (trusted)
        -- Who owns a partitioned table can give indexes to its partitions, also to those of others.
        OR EXISTS (SELECT FROM pg_class WHERE relowner <> ALL (trusted)
            AND (oid = ANY (tables) OR oid IN (SELECT pg_partition_ancestors(outbox))))
        OR EXISTS (SELECT FROM pg_class, aclexplode(relacl) WHERE oid = ANY (tables)
            AND privilege_type IN ('TRIGGER', 'REFERENCES') AND grantee <> ALL (trusted))
        OR EXISTS (SELECT FROM pg_attribute, aclexplode(attacl) WHERE attrelid = ANY (tables)
            AND privilege_type = 'REFERENCES' AND grantee <> ALL (trusted))
    THEN
        IF definer_is_superuser THEN
            -- Renaming a schema takes no lock on its tables; it updates this row.
            PERFORM FROM pg_namespace WHERE oid = schema_oid AND nspname = schema_name FOR KEY SHARE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'schema % was renamed while table %.% was being examined', quote_ident(schema_name),
                    quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_in_use',
                        HINT = 'Run the same command again.';
            END IF;
        ELSIF schema_owner <> ALL (trusted) THEN
            RETURN format('schema %I belongs to role %I, who could put another table in the place of this one; a superuser can '
                'prevent that: ALTER FUNCTION walpost.lock_and_examine(text, text, text) OWNER TO ...', schema_name,
                pg_get_userbyid(schema_owner));
        END IF;
        BEGIN
            EXECUTE format('LOCK TABLE %I.%I IN SHARE UPDATE EXCLUSIVE MODE', schema_name, table_name);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE EXCEPTION 'role % owns function walpost.lock_and_examine and may not lock table %.%', quote_ident(current_user),
                quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_not_in_prerequisite_state',
                    HINT = format('As a superuser: ALTER FUNCTION walpost.lock_and_examine(text, text, text) OWNER TO CURRENT_USER; '
                        'or: GRANT %I TO %I', pg_get_userbyid(table_owner), current_user);
        END;
        -- Its name can have led to another table until it was locked.
        IF NOT EXISTS (SELECT FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation' AND granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND relation = outbox
            AND mode = 'ShareUpdateExclusiveLock') THEN
            RAISE EXCEPTION 'table %.% was replaced by another one while it was being examined', quote_ident(schema_name),
                quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
        END IF;
        WITH RECURSIVE tree (oid) AS (
            SELECT outbox UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
        ) SELECT array_agg(oid) INTO tables FROM tree;
    END IF;

    -- What PostgreSQL brings along itself is pinned, and not in pg_depend.
    WITH RECURSIVE compared (attname, type) AS (
        SELECT attname, atttypid FROM pg_attribute WHERE attrelid = outbox AND attnum > 0 AND NOT attisdropped
            AND (statement = 'COMPARE' OR attname = 'created_at')
        UNION SELECT attname, typbasetype FROM compared JOIN pg_type ON oid = type WHERE typbasetype <> 0
    ), linked (oid, conname) AS (
        -- Deleting rows, and attaching and detaching partitions, runs queries about the other table of a foreign key. Rows of
        -- the other table can be deleted or changed too, and so on.
        SELECT CASE WHEN conrelid = ANY (tables) THEN confrelid ELSE conrelid END, conname FROM pg_constraint
            WHERE contype = 'f' AND (conrelid = ANY (tables) OR confrelid = ANY (tables)) AND statement IN ('DELETE', 'ALTER')
        UNION SELECT next.oid, conname FROM linked CROSS JOIN LATERAL (
            SELECT conrelid FROM pg_constraint WHERE contype = 'f' AND confrelid = linked.oid
            UNION SELECT inhrelid FROM pg_inherits WHERE inhparent = linked.oid
            UNION SELECT inhparent FROM pg_inherits WHERE inhrelid = linked.oid) AS next (oid)
    ), attached (class, object) AS (
        SELECT 'pg_class'::regclass, unnest(tables)
        UNION ALL SELECT 'pg_class'::regclass, indexrelid FROM pg_index WHERE indrelid = ANY (tables)
        UNION ALL SELECT 'pg_constraint'::regclass, oid FROM pg_constraint WHERE conrelid = ANY (tables)
        UNION ALL SELECT 'pg_statistic_ext'::regclass, oid FROM pg_statistic_ext WHERE stxrelid = ANY (tables)
        UNION ALL SELECT 'pg_rewrite'::regclass, oid FROM pg_rewrite WHERE ev_class = ANY (tables) AND statement = 'DELETE'
        UNION ALL SELECT 'pg_attrdef'::regclass, d.oid FROM pg_attrdef d
            JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
            WHERE adrelid = ANY (tables) AND attgenerated <> ''
        UNION ALL SELECT 'pg_trigger'::regclass, oid FROM pg_trigger
            WHERE tgrelid = ANY (tables) AND statement = 'DELETE' AND (tgtype & 8) <> 0 -- TRIGGER_TYPE_DELETE
    ), called (class, object, function, owner) AS (
        SELECT class, object, p.oid, p.proowner FROM attached JOIN pg_depend ON classid = class AND objid = object
            JOIN pg_proc p ON refclassid = 'pg_proc'::regclass AND p.oid = refobjid
        UNION SELECT class, object, o.oprcode, p.proowner FROM attached
            JOIN pg_depend ON classid = class AND objid = object
            JOIN pg_operator o ON refclassid = 'pg_operator'::regclass AND o.oid = refobjid
            JOIN pg_proc p ON p.oid = o.oprcode
    )
    SELECT string_agg(DISTINCT text, '; ') INTO calls FROM (
        SELECT format('%s calls function %s of role %I', pg_describe_object(class, object, 0), function::regprocedure,
            pg_get_userbyid(owner)) FROM called WHERE owner <> ALL (trusted)
        -- The planner also calls the functions of an operator's negator and commutator, which its owner chooses.
        UNION ALL SELECT format('%s uses operator %s of role %I', pg_describe_object(class, object, 0), o.oid::regoperator,
                pg_get_userbyid(oprowner))
            FROM attached JOIN pg_depend ON classid = class AND objid = object
            JOIN pg_operator o ON refclassid = 'pg_operator'::regclass AND o.oid = refobjid WHERE oprowner <> ALL (trusted)
        UNION ALL SELECT format('foreign key %I connects it to table %s, which %s can change', min(conname), other.oid::regclass,
                CASE changer WHEN 0 THEN 'PUBLIC' ELSE format('role %I', pg_get_userbyid(changer)) END)
            FROM linked JOIN pg_class other USING (oid)
            CROSS JOIN LATERAL (SELECT other.relowner UNION SELECT grantee FROM aclexplode(other.relacl)
                WHERE privilege_type = 'TRIGGER') AS changers (changer)
            WHERE other.oid <> ALL (tables) AND changer <> ALL (trusted) GROUP BY other.oid, changer
        -- A cast can be added without a lock on the table, and an operator that has no exact match for the type finds it.
        UNION ALL SELECT format('column %I has type %s, to which role %I can add casts', attname, format_type(type, NULL),
                pg_get_userbyid(typowner))
            FROM compared JOIN pg_type t ON t.oid = type
            WHERE typowner <> ALL (trusted) AND typtype <> 'd' -- Casts from a domain are ignored.
        UNION ALL SELECT format('%s is a foreign table', oid::regclass) FROM pg_class
            WHERE oid = ANY (tables) AND relkind = 'f'
        -- The operators that rows are ordered and compared by are looked up by this type.
        UNION ALL SELECT format('column %I of the primary key has type %s of role %I', attname, format_type(atttypid, atttypmod),
                pg_get_userbyid(typowner))
            FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey) JOIN pg_type t ON t.oid = atttypid
            WHERE indrelid = outbox AND indisprimary AND typowner <> ALL (trusted)
    ) AS list (text);
    RETURN coalesce(calls, '');
END
$walpost$;

-- The function itself checks who calls it.
GRANT EXECUTE ON FUNCTION walpost.lock_and_examine(text, text, text) TO PUBLIC;
COMMENT ON FUNCTION walpost.lock_and_examine(text, text, text)
    IS 'Locks a table and lists the code of other roles that a statement about it would run';
