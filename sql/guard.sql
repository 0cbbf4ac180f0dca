-- Lets Walpost lock a table and examine it before a statement uses it.
--
--   psql -f sql/guard.sql
--
-- The owner of a table can add an index, a constraint or statistics that call a function, and the
-- planner evaluates that function as the role that reads the table. An examination finds such
-- objects, but it is useful only if none can be added between the examination and the statement,
-- and if the table keeps its name until then. Walpost's role only has SELECT, which does not allow
-- it to lock the table, so this function locks the table.
--
--   SELECT walpost.lock_and_examine('public', 'outbox', 'SELECT');
--
-- Until the transaction ends, nobody can change the definition of the table or of tables that
-- inherit from it, or rename its schema. Rows can still be read and written; VACUUM, CREATE INDEX
-- and ALTER TABLE wait. The result lists objects that would run code of other roles as the caller,
-- and is empty if none exist; the function fails if the table does not exist. The third argument
-- is the kind of statement: SELECT or DELETE, each with conditions on at most created_at and the
-- primary key; COMPARE, a SELECT that compares any column with a literal; CONDITION, a SELECT with
-- a condition written by the operator; or ALTER, which attaches or detaches a partition.
--
-- The type of a column that is compared, and everything that the type consists of, must belong to a
-- trusted role: a literal is parsed by the type's input function, which evaluates the CHECK of a
-- domain in an array or a composite type, and casts from the type of another role would be used. A
-- column whose type is a domain over a built-in type is compared as that type, except in CONDITION.
-- Operators of an extension are called by name, so their schema must belong to a trusted role.
--
-- If a role that is not trusted can change the table, its expressions may use only PostgreSQL's own
-- objects: a function that a superuser owns can also be made to run code of another role, for
-- example populate_record() of hstore, which evaluates the CHECK of a domain.
--
-- Code stays in an object when its owner changes. Therefore functions are examined as well as
-- owners, including those of the casts and checks of a type. DELETE rejects every rule, and every
-- trigger for DELETE: even the condition of a trigger can contain code, as text that ts_rewrite()
-- runs as SQL. The queries of a foreign key find another table, types and operators by name, and run as the
-- owner of that table, so DELETE rejects foreign keys that refer to the table, and ALTER all of its
-- foreign keys.
--
-- Run by: a superuser, since only a superuser can prevent a schema of another role from being
-- renamed. A role that is not a superuser can run it too: tables in schemas of other roles are then
-- rejected. Safe to run again: the function is replaced.
-- `walpost init` runs the same SQL.
\set ON_ERROR_STOP on
\if :{?table}
\else
\set table outbox
\endif
-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql
BEGIN;
-- The objects serve all tables, so no table's owner is trusted with them.
\set table_of_session :table
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
-- JIT compilation of the query below takes seconds, running it milliseconds.
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on SET row_security = off SET jit = off
AS $walpost$
DECLARE
    caller name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
    -- Since PostgreSQL 16, a role can be a member of another role without any of its privileges, or
    -- with its privileges but without its attributes, such as REPLICATION.
    act_as text := CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END;
    -- Names can contain these control characters, and psql prints messages unchanged.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
    -- Roles that can act as the caller anyway, or can grant themselves that right, and that can
    -- also act as the roles to which RESET ROLE and RESET SESSION AUTHORIZATION return. Up to
    -- PostgreSQL 15, a role with CREATEROLE can make itself a member of any role that is not a
    -- superuser. Since PostgreSQL 16, a role can inherit the privileges of another role, and
    -- replace functions of that role, without being able to act as that role.
    trusted oid[] := ARRAY(WITH ours AS (
            SELECT oid, rolsuper FROM pg_roles WHERE rolname IN (caller, session_user)
                OR oid = (SELECT usesysid FROM pg_stat_activity WHERE pid = pg_backend_pid())
        ), able AS MATERIALIZED (
            SELECT other.oid FROM pg_roles AS other CROSS JOIN ours
                GROUP BY other.oid HAVING bool_and(pg_has_role(other.oid, ours.oid, act_as)
                OR EXISTS (SELECT FROM pg_auth_members AS m
                    WHERE m.roleid = ours.oid AND m.admin_option AND pg_has_role(other.oid, m.member, 'USAGE'))
                OR other.rolcreaterole AND act_as = 'MEMBER' AND NOT ours.rolsuper)
        )
        SELECT oid FROM able WHERE oid IN (SELECT oid FROM ours) OR NOT EXISTS (
            SELECT FROM pg_auth_members AS m WHERE m.member NOT IN (SELECT oid FROM able)
                AND pg_has_role(m.member, able.oid, 'USAGE') AND NOT pg_has_role(m.member, able.oid, act_as)));
    definer_is_superuser boolean := (SELECT rolsuper FROM pg_roles WHERE rolname = current_user);
    outbox oid;
    kind "char";
    table_owner oid;
    schema_oid oid;
    -- A schema of the table or of a partition that a role which is not trusted can rename.
    foreign_schema pg_namespace;
    tables oid[];
    -- The tables that this session has locked.
    locked oid[];
    missing record;
    -- The locked tables, and the tables of which they are partitions or from which they inherit.
    family oid[];
    -- Whether a role that is not trusted can change the table.
    is_exposed boolean;
    calls text;
BEGIN
    -- At a different isolation level, the queries below would see the catalogs as they were before the
    -- table was locked.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'walpost.lock_and_examine was called in a transaction with isolation level %, expected read committed',
            current_setting('transaction_isolation') USING ERRCODE = 'active_sql_transaction';
    END IF;
    SELECT c.oid, c.relkind, c.relowner, n.oid INTO outbox, kind, table_owner, schema_oid
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = schema_name AND c.relname = table_name;
    IF outbox IS NULL THEN
        RAISE EXCEPTION 'table %.% does not exist', quote_ident(schema_name), quote_ident(table_name)
            USING ERRCODE = 'undefined_table', HINT = 'If it was renamed temporarily, run the same command again.';
    ELSIF kind NOT IN ('r', 'p') THEN
        RETURN format('%I.%I is not a table', schema_name, table_name);
    END IF;
    -- The outbox, its partitions, and other tables that inherit from it.
    WITH RECURSIVE tree (oid) AS (
        SELECT outbox UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
    ) SELECT array_agg(oid) INTO tables FROM tree;
    -- pg_partition_ancestors is not used, because it omits a parent from which a table is being
    -- detached. The planner evaluates the partition keys of such parents, too.
    WITH RECURSIVE ancestors (oid) AS (
        SELECT unnest(tables) UNION SELECT inhparent FROM pg_inherits JOIN ancestors ON inhrelid = ancestors.oid
    ) SELECT array_agg(oid) INTO family FROM ancestors;
    -- The locks block VACUUM, so they are acquired only for Walpost's role, and for roles that could
    -- lock the outbox and its ancestors themselves.
    IF NOT coalesce(has_table_privilege(caller, outbox, 'SELECT')
        AND has_table_privilege(caller, to_regclass('walpost.slot_state'), 'UPDATE'), false)
        AND EXISTS (SELECT FROM pg_class WHERE (oid = outbox OR oid = ANY (family) AND oid <> ALL (tables))
            AND NOT (has_table_privilege(caller, oid, 'UPDATE, DELETE, TRUNCATE') OR pg_has_role(caller, relowner, 'USAGE'))) THEN
        -- The role can read the table, but lacks the privilege that identifies Walpost's role.
        IF has_table_privilege(caller, outbox, 'SELECT') THEN
            RAISE EXCEPTION 'permission denied for table walpost.slot_state' USING ERRCODE = 'insufficient_privilege',
                HINT = format('GRANT USAGE ON SCHEMA walpost TO %1$I; GRANT SELECT, INSERT, UPDATE ON walpost.slot_state TO %1$I', caller);
        END IF;
        RAISE EXCEPTION 'permission denied for table %', table_name USING ERRCODE = 'insufficient_privilege';
    END IF;
    SELECT n.* INTO foreign_schema FROM pg_namespace n
        WHERE oid IN (SELECT relnamespace FROM pg_class WHERE oid = ANY (family))
        AND CASE WHEN nspowner = to_regrole('pg_database_owner')
            THEN (SELECT datdba FROM pg_database WHERE datname = current_database()) ELSE nspowner END <> ALL (trusted)
        LIMIT 1;
    is_exposed := foreign_schema.oid IS NOT NULL
        -- The owner of a partitioned table can add indexes to its partitions, even to those that
        -- belong to other roles.
        OR EXISTS (SELECT FROM pg_class WHERE relowner <> ALL (trusted) AND oid = ANY (family))
        OR EXISTS (SELECT FROM pg_class, aclexplode(relacl) WHERE oid = ANY (family)
            AND privilege_type IN ('TRIGGER', 'REFERENCES') AND grantee <> ALL (trusted))
        OR EXISTS (SELECT FROM pg_attribute, aclexplode(attacl) WHERE attrelid = ANY (family)
            AND privilege_type = 'REFERENCES' AND grantee <> ALL (trusted));
    -- The queries above find neither an owner nor privileges of a table that was dropped after its
    -- name was looked up, so they would report it as trusted. A table that still exists was included
    -- in all of them.
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = outbox AND n.oid = schema_oid AND n.nspname = schema_name AND c.relname = table_name) THEN
        RAISE EXCEPTION 'table %.% was replaced by another one while it was being examined', quote_ident(schema_name),
            quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
    END IF;
    -- If only trusted roles can change the table, it need not be locked.
    IF is_exposed THEN
        IF definer_is_superuser THEN
            -- Renaming a schema does not lock its tables, but updates this row.
            PERFORM FROM pg_namespace WHERE oid = schema_oid AND nspname = schema_name FOR KEY SHARE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'schema % was renamed while table %.% was being examined', quote_ident(schema_name),
                    quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_in_use',
                        HINT = 'Run the same command again.';
            END IF;
            -- LOCK TABLE looks the name up again while it waits. If the name then refers to a view, it
            -- locks every table in the view's query with the privileges of this function's owner.
            -- Renaming or dropping a table conflicts with this lock; ALTER TABLE and TRUNCATE do not.
            PERFORM FROM pg_class WHERE oid = outbox AND relname = table_name AND relnamespace = schema_oid AND relkind = kind
                FOR KEY SHARE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'table %.% was replaced by another one while it was being examined', quote_ident(schema_name),
                    quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
            END IF;
        ELSIF foreign_schema.oid IS NOT NULL THEN
            RETURN regexp_replace(format('schema %I belongs to role %I, which could replace this table with another one; to prevent '
                'that, run as a superuser: DROP FUNCTION walpost.lock_and_examine(text, text, text); then sql/guard.sql',
                foreign_schema.nspname, pg_get_userbyid(foreign_schema.nspowner)), unprintable, '?', 'g');
        END IF;
        BEGIN
            EXECUTE format('LOCK TABLE %I.%I IN SHARE UPDATE EXCLUSIVE MODE', schema_name, table_name);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE EXCEPTION 'role % owns function walpost.lock_and_examine but may not lock table %.%', quote_ident(current_user),
                quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_not_in_prerequisite_state',
                    -- ALTER FUNCTION ... OWNER TO is not suggested, because the present owner
                    -- determines what the function does with the privileges of the next owner.
                    HINT = regexp_replace(format('As a superuser: DROP FUNCTION walpost.lock_and_examine(text, text, text); then '
                        'sql/guard.sql. Or: GRANT %I TO %I', pg_get_userbyid(table_owner), current_user), unprintable, '?', 'g');
        END;
        -- LOCK TABLE lists all the tables first. While it waits for one table, another table can be
        -- attached to a table that is not locked yet. LOCK TABLE also omits partitions that are
        -- being detached. The ancestors are locked, too, because one of them can be attached to
        -- another table without a lock on a table that is being detached from it.
        FOR attempt IN 1..10 LOOP
            WITH RECURSIVE tree (oid) AS (
                SELECT outbox UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
            ) SELECT array_agg(oid) INTO tables FROM tree;
            WITH RECURSIVE ancestors (oid) AS (
                SELECT unnest(tables) UNION SELECT inhparent FROM pg_inherits JOIN ancestors ON inhrelid = ancestors.oid
            ) SELECT array_agg(oid) INTO family FROM ancestors;
            locked := ARRAY(SELECT relation FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'relation' AND granted
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                AND mode = 'ShareUpdateExclusiveLock');
            EXIT WHEN family <@ locked OR outbox <> ALL (locked);
            FOR missing IN SELECT c.oid, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE c.oid = ANY (family) AND c.oid <> ALL (locked)
            LOOP
                IF definer_is_superuser THEN
                    PERFORM FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = missing.oid
                        AND n.nspname = missing.nspname AND c.relname = missing.relname AND c.relkind IN ('r', 'p', 'f')
                        FOR KEY SHARE;
                    CONTINUE WHEN NOT FOUND;
                END IF;
                BEGIN
                    EXECUTE format('LOCK TABLE ONLY %I.%I IN SHARE UPDATE EXCLUSIVE MODE', missing.nspname, missing.relname);
                EXCEPTION WHEN undefined_table OR invalid_schema_name THEN
                    -- The table was dropped or renamed. The next attempt uses its present name.
                    NULL;
                WHEN insufficient_privilege THEN
                    RETURN regexp_replace(format('table %I.%I can be changed by other roles, but role %I, which owns function '
                        'walpost.lock_and_examine, may not lock it; run as a superuser: DROP FUNCTION '
                        'walpost.lock_and_examine(text, text, text); then sql/guard.sql',
                        missing.nspname, missing.relname, current_user), unprintable, '?', 'g');
                END;
            END LOOP;
        END LOOP;
        -- The name may have referred to another table until it was locked. Up to PostgreSQL 15, a
        -- rule can turn an empty table into a view.
        IF kind IS DISTINCT FROM (SELECT relkind FROM pg_class WHERE oid = outbox) OR outbox <> ALL (locked) THEN
            RAISE EXCEPTION 'table %.% was replaced by another one while it was being examined', quote_ident(schema_name),
                quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
        ELSIF NOT family <@ locked THEN
            RAISE EXCEPTION 'tables were attached to table %.%, or it was attached to another table, while it was being examined',
                quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
        END IF;
        -- Partitions in other schemas must keep their names, too.
        IF definer_is_superuser THEN
            PERFORM FROM pg_namespace WHERE oid IN (SELECT relnamespace FROM pg_class WHERE oid = ANY (tables)) FOR KEY SHARE;
        END IF;
    END IF;

    -- PostgreSQL's own objects are pinned and have no entries in pg_depend.
    WITH RECURSIVE ordering (attnum) AS (
        SELECT attnum FROM pg_attribute WHERE attrelid = outbox AND attnum > 0 AND NOT attisdropped
            AND (attname = 'created_at' OR EXISTS (SELECT FROM pg_index
                WHERE indrelid = outbox AND indisprimary AND attnum = ANY (indkey)))
    ), compared (attname, is_ordering, type, is_part) AS (
        SELECT attname, attnum IN (SELECT attnum FROM ordering), atttypid, false FROM pg_attribute
            WHERE attrelid = outbox AND attnum > 0 AND NOT attisdropped
            AND (statement IN ('COMPARE', 'CONDITION') OR attnum IN (SELECT attnum FROM ordering))
        UNION SELECT attname, is_ordering, next.type, compared.is_part OR next.is_part
            FROM compared JOIN pg_type t ON t.oid = compared.type CROSS JOIN LATERAL (
                SELECT typbasetype, false
                UNION SELECT typelem, true
                UNION SELECT rngsubtype, true FROM pg_range WHERE rngtypid = t.oid
                UNION SELECT rngtypid, true FROM pg_range WHERE rngmultitypid = t.oid
                UNION SELECT atttypid, true FROM pg_attribute WHERE attrelid = t.typrelid AND attnum > 0 AND NOT attisdropped
            ) AS next (type, is_part) WHERE next.type <> 0
    ), operators (attname, type, schema, owner) AS (
        -- The operators that Catalog::order_columns names, and the functions that they call.
        SELECT attname, t.oid, object.schema, object.owner FROM compared JOIN pg_type t ON t.oid = type
            JOIN pg_opclass c ON c.opcintype = t.oid AND c.opcdefault JOIN pg_am ON pg_am.oid = c.opcmethod AND amname = 'btree'
            CROSS JOIN LATERAL (
                SELECT t.typnamespace, t.typowner
                UNION ALL SELECT NULL, c.opcowner
                UNION ALL SELECT NULL, proowner FROM pg_amproc p JOIN pg_proc f ON f.oid = p.amproc WHERE amprocfamily = c.opcfamily
                UNION ALL SELECT o.oprnamespace, o.oprowner FROM pg_amop p JOIN pg_operator o ON o.oid = p.amopopr
                    WHERE amopfamily = c.opcfamily AND amoplefttype = t.oid AND amoprighttype = t.oid
                UNION ALL SELECT NULL, proowner FROM pg_amop p JOIN pg_operator o ON o.oid = p.amopopr
                    JOIN pg_proc f ON f.oid = o.oprcode WHERE amopfamily = c.opcfamily
            ) AS object (schema, owner)
            WHERE is_ordering AND NOT is_part AND t.typnamespace <> 'pg_catalog'::regnamespace AND statement NOT IN ('DELETE', 'ALTER')
    ), checks (class, object, expressions, type) AS (
        -- The CHECK constraints of the types that a literal is parsed as. If a column's type is itself
        -- a domain, the column is compared as the domain's base type.
        SELECT DISTINCT 'pg_constraint'::regclass, c.oid, conbin::text, type FROM compared JOIN pg_type t ON t.oid = type
            JOIN pg_constraint c ON contypid = type WHERE is_part OR statement = 'CONDITION'
    ), attached (class, object, expressions, is_strict) AS (
        -- The planner evaluates the partition keys of all ancestors of a partition, up to the root.
        SELECT 'pg_class'::regclass, c.oid, CASE WHEN relkind = 'p' THEN concat(partexprs::text) END, is_exposed
            FROM pg_class c LEFT JOIN pg_partitioned_table ON partrelid = c.oid WHERE c.oid = ANY (family)
        UNION ALL SELECT 'pg_class'::regclass, indexrelid, nullif(concat(indexprs::text, indpred::text), ''), is_exposed
            FROM pg_index WHERE indrelid = ANY (tables)
        UNION ALL SELECT 'pg_constraint'::regclass, oid, conbin::text, is_exposed FROM pg_constraint WHERE conrelid = ANY (tables)
        UNION ALL SELECT 'pg_statistic_ext'::regclass, oid, stxexprs::text, is_exposed FROM pg_statistic_ext
            WHERE stxrelid = ANY (tables)
        UNION ALL SELECT 'pg_attrdef'::regclass, d.oid, adbin::text, is_exposed FROM pg_attrdef d
            JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
            WHERE adrelid = ANY (tables) AND attgenerated <> ''
        UNION ALL SELECT class, object, expressions, true FROM checks
    ), used (class, object, used_class, used_object) AS (
        SELECT DISTINCT class, object, refclassid, refobjid FROM attached JOIN pg_depend ON classid = class AND objid = object
            -- The other dependencies are types of columns.
            AND (class <> 'pg_class'::regclass OR objsubid = 0)
            WHERE deptype IN ('n', 'a')
            AND (class, object, refclassid, refobjid) NOT IN (SELECT class, object, 'pg_type'::regclass, type FROM checks)
        -- The type in JSON_VALUE(... RETURNING ...) and the like has no entry in pg_depend. Pinned
        -- types have lower OIDs.
        UNION SELECT class, object, 'pg_type'::regclass, ids[1]::oid
            FROM attached CROSS JOIN regexp_matches(expressions, ':typid (\d+)', 'g') AS m (ids) WHERE ids[1]::oid >= 12000
    ), called (class, object, function, owner) AS (
        SELECT class, object, p.oid, p.proowner FROM used
            JOIN pg_proc p ON used_class = 'pg_proc'::regclass AND p.oid = used_object
        UNION SELECT class, object, o.oprcode, p.proowner FROM used
            JOIN pg_operator o ON used_class = 'pg_operator'::regclass AND o.oid = used_object
            JOIN pg_proc p ON p.oid = o.oprcode
    ), called_by_types (attname, type, part, function) AS MATERIALIZED (
        -- A type can contain code of a role that owned it earlier. Without MATERIALIZED, the
        -- planner may evaluate this query for each function of a role that is not trusted.
        SELECT attname, type, part, function FROM (SELECT DISTINCT attname, type FROM compared) AS types CROSS JOIN LATERAL (
            SELECT format('cast from %s to %s', format_type(castsource, NULL), format_type(casttarget, NULL)), castfunc
                -- Casts to types of roles that are not trusted are not considered.
                FROM pg_cast JOIN pg_type target ON target.oid = casttarget
                WHERE castsource = type AND target.typowner = ANY (trusted)
            UNION ALL SELECT 'range type', f.oid FROM pg_range, unnest(ARRAY[rngcanonical, rngsubdiff]) AS f (oid) WHERE rngtypid = type
            UNION ALL SELECT format('operator class %I', opcname), amproc FROM pg_opclass c
                JOIN pg_amproc ON amprocfamily = opcfamily AND amproclefttype = type
                WHERE opcintype = type OR c.oid IN (SELECT rngsubopc FROM pg_range WHERE rngtypid = type)
            UNION ALL SELECT format('operator class %I', opcname), oprcode FROM pg_opclass
                JOIN pg_amop ON amopfamily = opcfamily AND amoplefttype = type JOIN pg_operator o ON o.oid = amopopr
                WHERE opcintype = type
        ) AS called (part, function)
    ), of_others (class, object, text) AS (
        SELECT class, object, format('calls function %s of role %I', function::regprocedure, pg_get_userbyid(owner))
            FROM called WHERE owner <> ALL (trusted)
        -- The planner also calls the functions of an operator's negator and commutator, which its owner chooses.
        UNION ALL SELECT class, object, format('uses operator %s of role %I', o.oid::regoperator, pg_get_userbyid(oprowner))
            FROM used JOIN pg_operator o ON used_class = 'pg_operator'::regclass AND o.oid = used_object
            WHERE oprowner <> ALL (trusted)
        -- For example, populate_record() of hstore evaluates the CHECK of a domain in the type of
        -- its argument. Base types, which only superusers can create, and enumerations have no such
        -- code.
        UNION ALL SELECT class, object, format('uses type %s', format_type(t.oid, NULL))
            FROM used JOIN attached USING (class, object) JOIN pg_type t ON used_class = 'pg_type'::regclass AND t.oid = used_object
            LEFT JOIN pg_type e ON e.oid = t.typelem
            WHERE NOT is_strict AND coalesce(e.typtype, t.typtype) NOT IN ('b', 'e')
        -- satisfies_hash_partition evaluates the partition key of a table that is given by its OID,
        -- which is not in pg_depend.
        UNION ALL SELECT class, object, 'calls function satisfies_hash_partition' FROM attached
            WHERE strpos(expressions, format(':funcid %s ',
                'pg_catalog.satisfies_hash_partition(oid, integer, integer, "any")'::regprocedure::oid)) > 0
        -- JSON_ARRAY and the like call the cast from a type to json, which is not in pg_depend and can
        -- be created at any time. Pinned types have lower OIDs.
        UNION ALL SELECT class, object, format('constructs JSON of type %s, for which a cast to json can be created',
                format_type(ids[1]::oid, NULL))
            FROM attached CROSS JOIN regexp_matches(expressions, ':[a-z_]*type(?:id)? ([0-9]+)', 'g') AS m (ids)
            WHERE strpos(expressions, '{JSONCONSTRUCTOREXPR ') > 0 AND ids[1]::oid >= 12000
        -- Some of PostgreSQL's own functions run SQL that is given as text, for example ts_rewrite().
        -- None of these functions is immutable. Expressions of indexes and partition keys call immutable functions
        -- only, and other constraints are not evaluated.
        UNION ALL SELECT class, object, format('calls function %s, which is not immutable', p.oid::regprocedure)
            FROM attached CROSS JOIN regexp_matches(expressions, ':(?:funcid|opfuncid) (\d+)', 'g') AS m (ids)
            JOIN pg_proc p ON p.oid = ids[1]::oid WHERE provolatile <> 'i'
            AND (class = 'pg_statistic_ext'::regclass OR (class, object) IN (SELECT class, object FROM checks))
    )
    SELECT string_agg(DISTINCT text, '; ') INTO calls FROM (
        SELECT format('%s %s', pg_describe_object(class, object, 0), text) FROM of_others
        UNION ALL SELECT format('%s uses %s, which is not part of PostgreSQL itself', pg_describe_object(class, object, 0),
                pg_describe_object(used_class, used_object, 0))
            FROM used JOIN attached USING (class, object)
            WHERE is_strict AND expressions IS NOT NULL AND (class, object) NOT IN (SELECT class, object FROM of_others)
            AND used_class NOT IN ('pg_class'::regclass, 'pg_namespace'::regclass, 'pg_constraint'::regclass, 'pg_am'::regclass)
            -- The following objects can't run code.
            AND NOT (used_class = 'pg_type'::regclass
                AND EXISTS (SELECT FROM pg_type e WHERE e.typtype = 'e' AND used_object IN (e.oid, e.typarray)))
            AND NOT (used_class = 'pg_collation'::regclass
                AND EXISTS (SELECT FROM pg_collation WHERE oid = used_object AND collnamespace = 'pg_catalog'::regnamespace))
            AND NOT (used_class = 'pg_ts_config'::regclass
                AND EXISTS (SELECT FROM pg_ts_config WHERE oid = used_object AND cfgnamespace = 'pg_catalog'::regnamespace))
        -- Rules and triggers are rejected regardless of their owner: a former owner can have left
        -- code in the condition of a trigger, as text that a function runs as SQL.
        -- This includes rules for other statements, because their actions run with the privileges
        -- of the table's owner.
        UNION ALL SELECT format('%s runs with the privileges of the owner', pg_describe_object('pg_rewrite'::regclass, oid, 0))
            FROM pg_rewrite WHERE ev_class = ANY (tables) AND statement = 'DELETE'
        UNION ALL SELECT format('%s would run with each DELETE', pg_describe_object('pg_trigger'::regclass, oid, 0)) FROM pg_trigger
            WHERE tgrelid = ANY (tables) AND statement = 'DELETE' AND (tgtype & 8) <> 0 -- TRIGGER_TYPE_DELETE
            -- Triggers of foreign keys are rejected below.
            AND NOT (tgisinternal AND tgqual IS NULL
                AND EXISTS (SELECT FROM pg_constraint WHERE oid = tgconstraint AND contype = 'f'))
        -- The queries of a foreign key find the other table, types and operators by name, and run as
        -- the owner of that table.
        UNION ALL SELECT format('foreign key %I connects it to %s', conname,
                CASE WHEN confrelid = ANY (tables) AND conrelid = ANY (tables) THEN 'itself'
                    ELSE format('table %s', (CASE WHEN confrelid = ANY (tables) THEN conrelid ELSE confrelid END)::regclass) END)
            FROM pg_constraint WHERE contype = 'f' AND (confrelid = ANY (tables) AND statement IN ('DELETE', 'ALTER')
                OR conrelid = ANY (tables) AND statement = 'ALTER')
        UNION ALL SELECT format('column %I has type %s, whose %s calls function %s of role %I', attname, format_type(type, NULL), part,
                p.oid::regprocedure, pg_get_userbyid(proowner))
            FROM called_by_types JOIN pg_proc p ON p.oid = function WHERE proowner <> ALL (trusted)
        -- A cast can be added without a lock on the table, and it is used for an operator that has
        -- no exact match for the type.
        UNION ALL SELECT CASE WHEN typtype = 'd' THEN format('column %I has type %s of role %I, which can add checks to it', attname,
                    format_type(type, NULL), pg_get_userbyid(typowner))
                ELSE format('column %I has type %s, to which role %I can add casts', attname, format_type(type, NULL),
                    pg_get_userbyid(typowner)) END
            FROM compared JOIN pg_type t ON t.oid = type
            -- Casts from a domain are ignored, and a literal is parsed as the domain's base type.
            WHERE typowner <> ALL (trusted) AND (typtype <> 'd' OR is_part OR statement = 'CONDITION')
        UNION ALL SELECT format('column %I of type %s is compared with operators that role %I can replace; if they belong to an '
                'extension, move it to a schema of a superuser with ALTER EXTENSION ... SET SCHEMA', attname, format_type(type, NULL),
                pg_get_userbyid(changer))
            FROM operators LEFT JOIN pg_namespace n ON n.oid = schema CROSS JOIN LATERAL (SELECT owner
                UNION SELECT CASE WHEN nspowner = to_regrole('pg_database_owner')
                    THEN (SELECT datdba FROM pg_database WHERE datname = current_database()) ELSE nspowner END) AS changers (changer)
            WHERE changer <> ALL (trusted)
        UNION ALL SELECT format('%s is a foreign table', oid::regclass) FROM pg_class
            WHERE oid = ANY (tables) AND relkind = 'f'
        -- The operators for ordering and comparing rows are looked up by this type.
        UNION ALL SELECT format('column %I of the primary key has type %s of role %I', attname, format_type(atttypid, atttypmod),
                pg_get_userbyid(typowner))
            FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey) JOIN pg_type t ON t.oid = atttypid
            WHERE indrelid = outbox AND indisprimary AND typowner <> ALL (trusted)
    ) AS list (text);
    RETURN regexp_replace(coalesce(calls, ''), unprintable, '?', 'g');
END
$walpost$;

-- The function itself checks the privileges of its caller.
GRANT EXECUTE ON FUNCTION walpost.lock_and_examine(text, text, text) TO PUBLIC;
COMMENT ON FUNCTION walpost.lock_and_examine(text, text, text)
    IS 'Locks a table and lists the code of other roles that a statement about it would run';

-- Another role may have created an object that did not exist when it was first examined.
\set examine 'owners present'
\ir examine.sql
COMMIT;
-- Restores the variable for the files that the same psql runs next.
\set table :table_of_session
