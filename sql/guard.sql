-- Creates walpost.lock_and_examine, which Walpost calls to lock and examine a table before a
-- statement uses it.
--
--   psql -f sql/guard.sql
--
-- The owner of a table can add an index, a constraint or statistics that call a function, and the
-- planner may evaluate that function as the role that reads the table. Searching the catalogs for
-- such objects helps only if, between the search and the statement, no such object can be added and
-- the table can't be renamed. Walpost's role has only SELECT, which does not allow it to lock the
-- table, so this function locks the table on its behalf.
--
--   SELECT walpost.lock_and_examine('public', 'outbox', 'SELECT');
--
-- Until the transaction ends, no other session can change the definition of the table or of the
-- tables that inherit from it, or rename the table's schema. Rows can still be read and written,
-- but VACUUM, CREATE INDEX and ALTER TABLE wait. The function fails if the table does not exist. If
-- the table exists, the function returns a list of the objects that would run other roles' code as
-- the caller. The list is empty if there are no such objects. The third argument is the kind of
-- statement: SELECT or DELETE, whose conditions may use only created_at and the primary key;
-- COMPARE, a SELECT that compares any column with a literal; CONDITION, a SELECT with a condition
-- written by the operator; or ALTER, which attaches or detaches a partition.
--
-- If a column is compared, its type must belong to a trusted role, and so must the types of which
-- its type is composed. If an untrusted role owned such a type, parsing a literal could evaluate
-- the CHECK of a domain inside an array or a composite type, and PostgreSQL would use casts that
-- the type's owner has added. Except in CONDITION, a column whose type is a domain over a built-in
-- type is compared as the built-in type. Operators of an extension are looked up by name, so the
-- schema that contains them must also belong to a trusted role.
--
-- If an untrusted role can change the table, its expressions may use only PostgreSQL's own objects.
-- Even a function that is owned by a superuser can be made to run another role's code: for example,
-- hstore's populate_record() evaluates the CHECK of a domain.
--
-- When an object's owner changes, the object still calls the same functions. Therefore, it is not
-- sufficient to check an object's owner: the functions that the object calls are checked too,
-- including the functions in a type's casts and checks. For DELETE, every rule and every DELETE
-- trigger is rejected, because even a trigger's condition can contain code, in the form of text
-- that ts_rewrite() runs as SQL. The internal queries of a foreign key run as the owner of the
-- table that they query, which is the other table of the foreign key. They look up that table,
-- types and operators by name. Therefore, foreign keys that refer to the table are rejected for
-- DELETE and ALTER, and the table's own foreign keys are rejected for ALTER.
--
-- Run by: a superuser, because only a superuser can prevent another role from renaming a schema
-- that the role owns. If another role runs this file, the function rejects tables in schemas that
-- belong to untrusted roles. Safe to run again: the function is replaced. `walpost init` runs the
-- same SQL.
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
-- Disables JIT compilation, which would take seconds for the query below. The query itself runs in
-- milliseconds.
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on SET row_security = off SET jit = off
AS $walpost$
DECLARE
    caller name := CASE current_setting('role') WHEN 'none' THEN session_user ELSE current_setting('role') END;
    -- The privilege that is needed to act as another role. Since PostgreSQL 16, membership is not
    -- sufficient: it may grant none of the role's privileges, or grant the privileges but not the
    -- use of attributes such as REPLICATION.
    act_as text := CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END;
    -- Characters to replace in error messages: control characters, and characters that change the
    -- direction of text. psql prints messages unchanged, so a name that contains such characters
    -- could make a message look like a different one.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
    -- The trusted roles: those that can act as the caller and as the roles to which RESET ROLE and
    -- RESET SESSION AUTHORIZATION return, or can grant themselves the right to do so. Up to
    -- PostgreSQL 15, a role with CREATEROLE can make itself a member of any role that is not a
    -- superuser. Since PostgreSQL 16, a role can inherit the privileges of another role, and
    -- thus replace that role's functions, without being able to act as that role. Therefore, a
    -- role is trusted only if no untrusted role inherits its privileges in this way.
    trusted oid[] := ARRAY(WITH ours AS (
            SELECT oid, rolsuper FROM pg_roles WHERE rolname IN (caller, session_user)
                OR oid = (SELECT usesysid FROM pg_stat_activity WHERE pid = pg_backend_pid())
        ), able AS MATERIALIZED (
            SELECT other.oid FROM pg_roles AS other CROSS JOIN ours
                GROUP BY other.oid HAVING bool_and(pg_has_role(other.oid, ours.oid, act_as)
                OR EXISTS (SELECT FROM pg_auth_members AS m
                    WHERE m.roleid = ours.oid AND m.admin_option AND pg_has_role(other.oid, m.member, 'USAGE')
                        -- Only a superuser can grant membership in a superuser's role.
                        AND NOT ours.rolsuper)
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
    -- A schema that contains the table, a partition or an ancestor, and that an untrusted role can
    -- rename. NULL if there is no such schema.
    foreign_schema pg_namespace;
    tables oid[];
    -- The tables that this session has locked.
    locked oid[];
    missing record;
    -- The outbox, the tables that inherit from it, and the ancestors of all of these tables. A
    -- table's ancestors are the tables of which it is a partition or from which it inherits.
    family oid[];
    -- Whether an untrusted role can change any table in `family`.
    is_exposed boolean;
    -- The types of nodes that stored expressions can contain (primnodes.h of PostgreSQL 14 to 18).
    -- Some were renamed in PostgreSQL 16.
    known_nodes CONSTANT text[] := '{ARRAY,ARRAYCOERCEEXPR,ARRAYEXPR,BOOLEANTEST,BOOLEXPR,CASE,CASEEXPR,CASETESTEXPR,CASEWHEN,'
        'COALESCE,COALESCEEXPR,COERCETODOMAIN,COERCETODOMAINVALUE,COERCEVIAIO,COLLATE,COLLATEEXPR,CONST,DISTINCTEXPR,FIELDSELECT,'
        'FUNCEXPR,JSONBEHAVIOR,JSONCONSTRUCTOREXPR,JSONEXPR,JSONFORMAT,JSONISPREDICATE,JSONRETURNING,JSONVALUEEXPR,MINMAX,'
        'MINMAXEXPR,NAMEDARGEXPR,NULLIFEXPR,NULLTEST,OPEXPR,RELABELTYPE,ROW,ROWCOMPARE,ROWCOMPAREEXPR,ROWEXPR,'
        'SCALARARRAYOPEXPR,SQLVALUEFUNCTION,SUBSCRIPTINGREF,VAR,WHEN,XMLEXPR}';
    may_not_lock CONSTANT text := 'role %I owns function walpost.lock_and_examine but may not lock table %I.%I';
    -- ALTER FUNCTION ... OWNER TO is not suggested: the current owner may have changed the
    -- function's body, which would then run with the new owner's privileges.
    lock_hint CONSTANT text := 'As a superuser: DROP FUNCTION walpost.lock_and_examine(text, text, text); then sql/guard.sql. '
        'Or: GRANT %I TO %I';
    calls text;
BEGIN
    -- At isolation level REPEATABLE READ or SERIALIZABLE, the queries below could read an older
    -- state of the catalogs, from before the table was locked.
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
    FOR examination IN 1..2 LOOP
        -- The outbox, its partitions, and other tables that inherit from it.
        WITH RECURSIVE tree (oid) AS (
            SELECT outbox UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
        ) SELECT array_agg(oid) INTO tables FROM tree;
        -- pg_partition_ancestors is not used, because it omits a parent from which a table is being
        -- detached. The planner still evaluates that parent's partition key.
        WITH RECURSIVE ancestors (oid) AS (
            SELECT unnest(tables) UNION SELECT inhparent FROM pg_inherits JOIN ancestors ON inhrelid = ancestors.oid
        ) SELECT array_agg(oid) INTO family FROM ancestors;
        -- The locks acquired below block VACUUM. Therefore, they are acquired only for Walpost's role
        -- and for roles that could lock the outbox and its ancestors themselves.
        IF NOT coalesce(has_table_privilege(caller, outbox, 'SELECT')
            AND has_table_privilege(caller, to_regclass('walpost.slot_state'), 'UPDATE'), false)
            AND EXISTS (SELECT FROM pg_class WHERE (oid = outbox OR oid = ANY (family) AND oid <> ALL (tables))
                AND NOT (has_table_privilege(caller, oid, 'UPDATE, DELETE, TRUNCATE') OR pg_has_role(caller, relowner, 'USAGE'))) THEN
            -- The role can read the table, but lacks the privilege by which Walpost's role is
            -- recognized: UPDATE on walpost.slot_state.
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
        IF examination = 2 AND is_exposed THEN
            RAISE EXCEPTION 'table %.% was handed over to another role while it was being examined', quote_ident(schema_name),
                quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
        END IF;
        -- If an untrusted role can change the table, the table is locked below.
        EXIT WHEN is_exposed OR examination = 2;
        -- Waits for transactions that are changing the table. Such a transaction may hand the table
        -- over to an untrusted role, or may have created a trigger or a foreign key with a
        -- privilege that has since been revoked. While the lock is held, the table's owner can't
        -- change.
        BEGIN
            EXECUTE format('LOCK TABLE %I.%I IN %s MODE', schema_name, table_name,
                CASE statement WHEN 'DELETE' THEN 'ROW EXCLUSIVE' WHEN 'ALTER' THEN 'SHARE UPDATE EXCLUSIVE' ELSE 'ACCESS SHARE' END);
        EXCEPTION WHEN insufficient_privilege THEN
            RAISE EXCEPTION '%', format(may_not_lock, current_user, schema_name, table_name)
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = regexp_replace(
                    format(lock_hint, pg_get_userbyid(table_owner), current_user), unprintable, '?', 'g');
        END;
    END LOOP;
    -- If the table was dropped after its name was looked up, the queries above found neither an
    -- owner nor privileges, so is_exposed would wrongly be false. If the table still exists now, it
    -- existed during all of these queries.
    IF NOT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE c.oid = outbox AND n.oid = schema_oid AND n.nspname = schema_name AND c.relname = table_name) THEN
        RAISE EXCEPTION 'table %.% was replaced by another one while it was being examined', quote_ident(schema_name),
            quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
    END IF;
    IF is_exposed THEN
        IF definer_is_superuser THEN
            -- Locks the schema's row, so that the schema can't be renamed. A lock on a table would
            -- not prevent that.
            PERFORM FROM pg_namespace WHERE oid = schema_oid AND nspname = schema_name FOR KEY SHARE;
            IF NOT FOUND THEN
                RAISE EXCEPTION 'schema % was renamed while table %.% was being examined', quote_ident(schema_name),
                    quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_in_use',
                        HINT = 'Run the same command again.';
            END IF;
            -- Keeps the table from being renamed or dropped while LOCK TABLE below waits, but does
            -- not block TRUNCATE or other forms of ALTER TABLE. LOCK TABLE looks up the name again
            -- after it has waited. If the name then referred to a view, LOCK TABLE would lock every
            -- table in the view's query with the privileges of this function's owner. Up to
            -- PostgreSQL 15, a rule can also turn an empty table into a view, which deletes the
            -- system columns from pg_attribute; the lock on the row of `tableoid` prevents that.
            PERFORM FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tableoid'
                WHERE c.oid = outbox AND c.relname = table_name AND c.relnamespace = schema_oid AND c.relkind = kind
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
            RAISE EXCEPTION '%', format(may_not_lock, current_user, schema_name, table_name)
                USING ERRCODE = 'object_not_in_prerequisite_state', HINT = regexp_replace(
                    format(lock_hint, pg_get_userbyid(table_owner), current_user), unprintable, '?', 'g');
        END;
        -- LOCK TABLE determines the list of partitions before it locks any of them. While it waits
        -- for one table, a partition can be attached to another table that is not locked yet. LOCK
        -- TABLE also omits partitions that are being detached. Ancestors are locked too, because
        -- attaching an ancestor to another table does not lock partitions that are being detached
        -- from the ancestor.
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
                    PERFORM FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                        JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'tableoid' WHERE c.oid = missing.oid
                        AND n.nspname = missing.nspname AND c.relname = missing.relname AND c.relkind IN ('r', 'p', 'f')
                        FOR KEY SHARE;
                    CONTINUE WHEN NOT FOUND;
                END IF;
                BEGIN
                    EXECUTE format('LOCK TABLE ONLY %I.%I IN SHARE UPDATE EXCLUSIVE MODE', missing.nspname, missing.relname);
                EXCEPTION WHEN undefined_table OR invalid_schema_name THEN
                    -- The table was dropped or renamed. If the table still exists, the next attempt
                    -- uses its current name.
                    NULL;
                WHEN insufficient_privilege THEN
                    RETURN regexp_replace(format('table %I.%I can be changed by other roles, but role %I, which owns function '
                        'walpost.lock_and_examine, may not lock it; run as a superuser: DROP FUNCTION '
                        'walpost.lock_and_examine(text, text, text); then sql/guard.sql',
                        missing.nspname, missing.relname, current_user), unprintable, '?', 'g');
                END;
            END LOOP;
        END LOOP;
        -- Until the lock was acquired, the name could have referred to a different table. Up to
        -- PostgreSQL 15, a rule can also turn an empty table into a view.
        IF kind IS DISTINCT FROM (SELECT relkind FROM pg_class WHERE oid = outbox AND relname = table_name
            AND relnamespace = schema_oid) OR outbox <> ALL (locked) THEN
            RAISE EXCEPTION 'table %.% was replaced by another one while it was being examined', quote_ident(schema_name),
                quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
        ELSIF NOT family <@ locked THEN
            RAISE EXCEPTION 'tables were attached to table %.%, or it was attached to another table, while it was being examined',
                quote_ident(schema_name), quote_ident(table_name) USING ERRCODE = 'object_in_use', HINT = 'Run the same command again.';
        END IF;
        -- Keeps the schemas of the partitions from being renamed as well.
        IF definer_is_superuser THEN
            PERFORM FROM pg_namespace WHERE oid IN (SELECT relnamespace FROM pg_class WHERE oid = ANY (tables)) FOR KEY SHARE;
        END IF;
    END IF;

    -- Built-in objects are pinned, so pg_depend does not contain dependencies on them.
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
        -- The operators that Catalog::order_columns uses, and the functions that implement them.
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
        -- Finds the CHECK constraints that are evaluated when a literal is parsed. If a column's
        -- own type is a domain, the literal is parsed as the domain's base type, unless the kind of
        -- statement is CONDITION.
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
            -- Omits the dependencies of individual columns: types, collations and, up to PostgreSQL
            -- 14, the objects that are used by the expressions of generated columns. Up to
            -- PostgreSQL 17, these expressions are evaluated only by INSERT, UPDATE and the
            -- statement that creates the column. Walpost runs none of these statements on the
            -- table.
            AND (class <> 'pg_class'::regclass OR objsubid = 0)
            WHERE deptype IN ('n', 'a')
            AND (class, object, refclassid, refobjid) NOT IN (SELECT class, object, 'pg_type'::regclass, type FROM checks)
        -- pg_depend does not record the type in JSON_VALUE(... RETURNING ...) and similar
        -- expressions. OIDs below 12000 belong to built-in types.
        UNION SELECT class, object, 'pg_type'::regclass, ids[1]::oid
            FROM attached CROSS JOIN regexp_matches(expressions, ':typid (\d+)', 'g') AS m (ids) WHERE ids[1]::oid >= 12000
    ), interpreted (class, object, function) AS (
        -- The functions that are not written in C. The planner replaces calls of those written in SQL with their bodies.
        SELECT DISTINCT class, object, p.oid FROM attached
            CROSS JOIN regexp_matches(expressions, ':(funcid|opfuncid|opno) (\d+)', 'g') AS m (ids)
            LEFT JOIN pg_operator o ON ids[1] = 'opno' AND o.oid = ids[2]::oid
            JOIN pg_proc p ON p.oid = CASE ids[1] WHEN 'opno' THEN o.oprcode::oid ELSE ids[2]::oid END
            JOIN pg_language l ON l.oid = p.prolang WHERE l.lanname NOT IN ('internal', 'c')
    ), mentioned (class, object, type) AS (
        -- The types of all parts of an expression, and the base types of domains. OIDs below 12000 belong to built-in types.
        SELECT class, object, ids[1]::oid FROM attached
            CROSS JOIN regexp_matches(expressions, ':[a-zA-Z_]*typ(?:e(?:[iI]d)?|id) ([0-9]+)', 'g') AS m (ids) WHERE ids[1]::oid >= 12000
        UNION SELECT class, object, typbasetype FROM mentioned JOIN pg_type t ON t.oid = type WHERE typbasetype >= 12000
    ), called (class, object, function, owner) AS (
        SELECT class, object, p.oid, p.proowner FROM used
            JOIN pg_proc p ON used_class = 'pg_proc'::regclass AND p.oid = used_object
        UNION SELECT class, object, o.oprcode, p.proowner FROM used
            JOIN pg_operator o ON used_class = 'pg_operator'::regclass AND o.oid = used_object
            JOIN pg_proc p ON p.oid = o.oprcode
    ), called_by_types (attname, type, part, function) AS MATERIALIZED (
        -- The functions that a type uses may still belong to a role that formerly owned the type.
        -- Without MATERIALIZED, the planner might evaluate this query once for each function that
        -- an untrusted role owns.
        SELECT attname, type, part, function FROM (SELECT DISTINCT attname, type FROM compared) AS types CROSS JOIN LATERAL (
            SELECT format('cast from %s to %s', format_type(castsource, NULL), format_type(casttarget, NULL)), castfunc
                -- Casts to a type that belongs to an untrusted role are ignored.
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
        -- An operator's owner chooses its negator and commutator, whose functions the planner may call as well.
        UNION ALL SELECT class, object, format('uses operator %s of role %I', o.oid::regoperator, pg_get_userbyid(oprowner))
            FROM used JOIN pg_operator o ON used_class = 'pg_operator'::regclass AND o.oid = used_object
            WHERE oprowner <> ALL (trusted)
        -- A function can evaluate the CHECK of a domain that is part of its argument's type, as
        -- hstore's populate_record() does. Enumerations and base types, which only superusers can
        -- create, can't contain domains.
        UNION ALL SELECT class, object, format('uses type %s', format_type(t.oid, NULL))
            FROM used JOIN attached USING (class, object) JOIN pg_type t ON used_class = 'pg_type'::regclass AND t.oid = used_object
            LEFT JOIN pg_type e ON e.oid = t.typelem
            WHERE NOT is_strict AND coalesce(e.typtype, t.typtype) NOT IN ('b', 'e')
        -- satisfies_hash_partition evaluates the partition key of a table that is passed as an OID. pg_depend does not
        -- record this dependency.
        UNION ALL SELECT class, object, 'calls function satisfies_hash_partition' FROM attached
            WHERE strpos(expressions, format(':funcid %s ',
                'pg_catalog.satisfies_hash_partition(oid, integer, integer, "any")'::regprocedure::oid)) > 0
        -- JSON_ARRAY and similar constructors use a type's cast to json. pg_depend does not record the cast, and it can
        -- be created at any time.
        UNION ALL SELECT class, object, format('constructs JSON of type %s, for which a cast to json can be created',
                format_type(type, NULL))
            FROM mentioned JOIN attached USING (class, object) WHERE strpos(expressions, '{JSONCONSTRUCTOREXPR ') > 0
        -- Some of PostgreSQL's own functions are written in SQL and accept any type, such as quote_literal(anyelement) and
        -- the function of the operator || for text and another type. Their bodies cast the argument to text, with a
        -- function that the owner of the argument's type determines. pg_depend does not record the cast, and it can be
        -- created at any time.
        UNION ALL SELECT class, object, format('calls function %s, which can use a cast of type %s that belongs to another role',
                function::regprocedure, format_type(type, NULL))
            FROM interpreted JOIN mentioned USING (class, object) JOIN pg_type t ON t.oid = type
            WHERE typowner <> ALL (trusted) OR EXISTS (SELECT FROM pg_cast JOIN pg_proc p ON p.oid = castfunc
                WHERE castsource = type AND proowner <> ALL (trusted))
        -- To estimate how many rows satisfy the predicate of a partial index, the planner calls functions of range types.
        UNION ALL SELECT class, object, format('uses range type %s, whose functions belong to another role', format_type(t.oid, NULL))
            FROM mentioned JOIN pg_type m ON m.oid = type
            JOIN pg_range ON m.oid IN (rngtypid, rngmultitypid) OR m.typelem IN (rngtypid, rngmultitypid)
            JOIN pg_type t ON t.oid = rngtypid
            WHERE t.typowner <> ALL (trusted) OR EXISTS (SELECT FROM pg_proc
                WHERE oid IN (rngcanonical, rngsubdiff) AND proowner <> ALL (trusted))
        -- The queries above handle all types of expression nodes that exist in PostgreSQL 14 to 18.
        -- A later version may add a type of node that looks up functions in another way.
        UNION ALL SELECT DISTINCT class, object, format('contains an expression of type %s, which Walpost does not know', ids[1])
            FROM attached CROSS JOIN regexp_matches(expressions, '\{([A-Z_]+)', 'g') AS m (ids)
            WHERE is_strict AND ids[1] <> ALL (known_nodes)
        -- Some of PostgreSQL's own functions, such as ts_rewrite(), run text as SQL. None of these
        -- functions is immutable. After functions that are written in SQL have been inlined,
        -- expressions in indexes and partition keys contain only immutable functions, and other
        -- constraints are not evaluated.
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
            -- Enumerations, and PostgreSQL's own collations and text search configurations, can't
            -- run code.
            AND NOT (used_class = 'pg_type'::regclass
                AND EXISTS (SELECT FROM pg_type e WHERE e.typtype = 'e' AND used_object IN (e.oid, e.typarray)))
            AND NOT (used_class = 'pg_collation'::regclass
                AND EXISTS (SELECT FROM pg_collation WHERE oid = used_object AND collnamespace = 'pg_catalog'::regnamespace))
            AND NOT (used_class = 'pg_ts_config'::regclass
                AND EXISTS (SELECT FROM pg_ts_config WHERE oid = used_object AND cfgnamespace = 'pg_catalog'::regnamespace))
        -- Rules and triggers are rejected no matter who owns the table: a former owner may have
        -- left code in a trigger's condition, as text that a function runs as SQL. Rules for
        -- statements other than DELETE are rejected too, because their actions run with the
        -- privileges of the table's owner.
        UNION ALL SELECT format('%s runs with the privileges of the owner', pg_describe_object('pg_rewrite'::regclass, oid, 0))
            FROM pg_rewrite WHERE ev_class = ANY (tables) AND statement = 'DELETE'
        UNION ALL SELECT format('%s would run with each DELETE', pg_describe_object('pg_trigger'::regclass, oid, 0)) FROM pg_trigger
            WHERE tgrelid = ANY (tables) AND statement = 'DELETE' AND (tgtype & 8) <> 0 -- TRIGGER_TYPE_DELETE
            -- Excludes the triggers that implement foreign keys, because foreign keys are rejected
            -- below.
            AND NOT (tgisinternal AND tgqual IS NULL
                AND EXISTS (SELECT FROM pg_constraint WHERE oid = tgconstraint AND contype = 'f'))
        -- A foreign key's internal queries run as the owner of the table that they query, which is
        -- the other table of the foreign key. They look up that table, types and operators by name.
        UNION ALL SELECT format('foreign key %I connects it to %s', conname,
                CASE WHEN confrelid = ANY (tables) AND conrelid = ANY (tables) THEN 'itself'
                    ELSE format('table %s', (CASE WHEN confrelid = ANY (tables) THEN conrelid ELSE confrelid END)::regclass) END)
            FROM pg_constraint WHERE contype = 'f' AND (confrelid = ANY (tables) AND statement IN ('DELETE', 'ALTER')
                OR conrelid = ANY (tables) AND statement = 'ALTER')
        UNION ALL SELECT format('column %I has type %s, whose %s calls function %s of role %I', attname, format_type(type, NULL), part,
                p.oid::regprocedure, pg_get_userbyid(proowner))
            FROM called_by_types JOIN pg_proc p ON p.oid = function WHERE proowner <> ALL (trusted)
        -- A type's owner can add a cast without locking the table. PostgreSQL uses such a cast if
        -- no operator matches the type exactly.
        UNION ALL SELECT CASE WHEN typtype = 'd' THEN format('column %I has type %s of role %I, which can add checks to it', attname,
                    format_type(type, NULL), pg_get_userbyid(typowner))
                ELSE format('column %I has type %s, to which role %I can add casts', attname, format_type(type, NULL),
                    pg_get_userbyid(typowner)) END
            FROM compared JOIN pg_type t ON t.oid = type
            -- PostgreSQL ignores casts from a domain, and parses a literal as the domain's base
            -- type.
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
        -- The type of a primary key column determines which operators order and compare rows.
        UNION ALL SELECT format('column %I of the primary key has type %s of role %I', attname, format_type(atttypid, atttypmod),
                pg_get_userbyid(typowner))
            FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY (indkey) JOIN pg_type t ON t.oid = atttypid
            WHERE indrelid = outbox AND indisprimary AND typowner <> ALL (trusted)
    ) AS list (text);
    RETURN regexp_replace(coalesce(calls, ''), unprintable, '?', 'g');
END
$walpost$;

-- All roles may call the function, because it checks its caller's privileges itself.
GRANT EXECUTE ON FUNCTION walpost.lock_and_examine(text, text, text) TO PUBLIC;
COMMENT ON FUNCTION walpost.lock_and_examine(text, text, text)
    IS 'Locks a table and lists the code of other roles that a statement about it would run';

-- Runs examine.sql again, because another role may have created an object that did not exist when
-- examine.sql ran for the first time.
\set examine 'owners present'
\ir examine.sql
COMMIT;
-- Restores the variable `table` for files that the same psql session runs next.
\set table :table_of_session
