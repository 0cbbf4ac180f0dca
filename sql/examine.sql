-- Rejects existing objects through which another role could run code with the privileges of
-- Walpost's role, or of the role that runs these files. The other SQL files include this file,
-- which changes nothing itself. Walpost also runs this file before it accesses walpost.journal or
-- reads the outbox table.
--
--   psql -v schema=public -v table=outbox -v publication=walpost_outbox -v examine='owners journal' -f sql/examine.sql
--
-- The code in a function, a trigger or a view runs with the privileges of the role that calls the
-- function, writes to the table or reads the view. Therefore, an existing object is used only if it
-- is owned by a superuser, by the current role, or by a role that can act as the current role.
-- After SET ROLE, the object's owner must also be able to act as the role that logged in. The
-- publication, and the functions in the outbox table's schema, may also be owned by the owner of
-- that table; since PostgreSQL 15, `walpost run` is stricter about the owner of a publication.
-- The variable `examine` selects the checks:
--   owners      the owners of the schema walpost, of Walpost's functions, and of the functions that
--               the default of the outbox's id and its trigger call; the owner of the publication,
--               and whether its row filters call only functions of PostgreSQL itself
--   journal     the owner of walpost.journal, and whether the table contains only the objects and
--               columns that journal.sql creates
--   slot_state, table_state, outbox_row
--               the same for these tables, and whether another role may add a trigger to them
--   read        whether a SELECT from the outbox table, or the creation of a partition, would run
--               code of other roles. The result is stored in the setting walpost.code_of_others
--               and is valid until the transaction ends: see guard.sql
--   compare     the same for a SELECT with a condition composed by Walpost
--   condition   the same for a SELECT with a condition written by the operator
--   write       the same for DELETE
--   alter       the same for attaching and detaching a partition
--   present     whether the schema walpost and the tables named by the other words exist
--
-- Unless `examine` contains `present`, a missing object is not an error, because the other SQL
-- files create missing objects. However, any role that may create schemas could create such an
-- object first. Therefore, the setting walpost.examined lists the objects that were found and
-- accepted, and only these objects may be used.
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
\if :{?examine}
\else
\set examine 'owners journal'
\endif
\if :{?keep_prepared}
\else
\set keep_prepared off
\endif

\ir session.sql

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.publication = :'publication';
SET walpost.examine = :'examine';
SET walpost.keep_prepared = :'keep_prepared';

DO $walpost$
DECLARE
    what text[] := string_to_array(current_setting('walpost.examine'), ' ');
    uses_table boolean := what && '{read,compare,condition,write,alter}';
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
    own_tables CONSTANT name[] := '{journal,slot_state,table_state,outbox_row}';
    -- Characters to replace in error messages: control characters, and characters that change the
    -- direction of text. psql prints messages unchanged, so a name that contains such characters
    -- could make a message look like a different one.
    unprintable CONSTANT text := E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]';
    -- The privilege that is needed to act as another role. Since PostgreSQL 16, membership is not
    -- sufficient: it may grant none of the role's privileges, or grant the privileges but not the
    -- use of attributes such as REPLICATION.
    act_as text := CASE WHEN current_setting('server_version_num')::int < 160000 THEN 'MEMBER' ELSE 'SET' END;
    -- The trusted roles: those that can act as the current role and as the roles to which RESET
    -- ROLE and RESET SESSION AUTHORIZATION return, or can grant themselves the right to do so. Up
    -- to PostgreSQL 15, a role with CREATEROLE can make itself a member of any role that is not a
    -- superuser. Since PostgreSQL 16, a role can inherit the privileges of another role, and
    -- thus replace that role's functions, without being able to act as that role. Therefore, a
    -- role is trusted only if no untrusted role inherits its privileges in this way.
    -- This query and the following two are prepared below. In this query, $1 is the value of
    -- act_as.
    find_trusted_roles CONSTANT text := $query$(text) AS
        SELECT ARRAY(WITH ours AS (
            SELECT oid, rolsuper FROM pg_roles WHERE rolname IN (current_user, session_user)
                OR oid = (SELECT usesysid FROM pg_stat_activity WHERE pid = pg_backend_pid())
        ), able AS MATERIALIZED (
            SELECT other.oid FROM pg_roles AS other CROSS JOIN ours
                GROUP BY other.oid HAVING bool_and(pg_has_role(other.oid, ours.oid, $1)
                OR EXISTS (SELECT FROM pg_auth_members AS m
                    WHERE m.roleid = ours.oid AND m.admin_option AND pg_has_role(other.oid, m.member, 'USAGE')
                        -- Only a superuser can grant membership in a superuser's role.
                        AND NOT ours.rolsuper)
                OR other.rolcreaterole AND $1 = 'MEMBER' AND NOT ours.rolsuper)
        )
        SELECT oid FROM able WHERE oid IN (SELECT oid FROM ours) OR NOT EXISTS (
            SELECT FROM pg_auth_members AS m WHERE m.member NOT IN (SELECT oid FROM able)
                AND pg_has_role(m.member, able.oid, 'USAGE') AND NOT pg_has_role(m.member, able.oid, $1)))$query$;
    -- $1 is the list of checks, $2 and $3 are the schema and name of the outbox, and $4 is
    -- own_tables.
    find_objects CONSTANT text := $query$(text[], text, text, name[]) AS
        WITH outbox AS (SELECT c.oid, c.relowner, c.oid::regclass AS name
            FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $2 AND c.relname = $3
        ) SELECT object, owner, serves_outbox, hint, name, (SELECT relowner FROM outbox) AS outbox_owner FROM (
            SELECT 'schema walpost', nspowner, false, 'ALTER SCHEMA walpost RENAME TO walpost_old', nspname FROM pg_namespace
                WHERE nspname = 'walpost' AND $1 <> '{}'
            UNION ALL SELECT 'table walpost.' || relname, relowner, false, format('ALTER TABLE walpost.%1$s RENAME TO %1$s_old', relname),
                    relname
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = 'walpost' AND relname = ANY ($4) AND relname = ANY ($1)
            UNION ALL SELECT format('the privilege %s on table walpost.%s', privilege_type, relname), grantee, false,
                    format('REVOKE %s ON walpost.%s FROM %s', privilege_type, relname,
                        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END), NULL
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(relacl)
                WHERE n.nspname = 'walpost' AND relname = ANY ($4) AND relname = ANY ($1)
                AND privilege_type IN ('TRIGGER', 'REFERENCES') AND grantee <> relowner
            UNION ALL SELECT format('the privilege %s on column %I of table walpost.%s', privilege_type, attname, relname), grantee, false,
                    format('REVOKE %s (%I) ON walpost.%s FROM %s', privilege_type, attname, relname,
                        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END), NULL
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid, aclexplode(attacl)
                WHERE n.nspname = 'walpost' AND relname = ANY ($4) AND relname = ANY ($1)
                AND privilege_type = 'REFERENCES' AND grantee <> relowner
            -- Objects in the schema walpost are used for every outbox in the database, so they must
            -- not belong to a role that is trusted only because it owns one outbox.
            UNION ALL SELECT format('function %s', p.oid::regprocedure), p.proowner, n.nspname <> 'walpost',
                    format('DROP FUNCTION %s', p.oid::regprocedure),
                    CASE WHEN p.proname <> 'lock_and_examine' OR p.proargtypes = '25 25 25'::oidvector THEN p.proname END
                FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE ($1 && '{read,compare,condition,write,alter}' OR $1 && '{owners}')
                AND (n.nspname = 'walpost' AND p.proname IN ('publish', 'publish_bytes', 'max_event_bytes', 'add_outbox', 'lock_and_examine')
                    -- Since PostgreSQL 18, the built-in function uuidv7() is used instead of walpost_uuidv7().
                    OR n.nspname = $2 AND p.pronargs = 0 AND $1 && '{owners}' AND (p.proname = 'walpost_no_update'
                        OR p.proname = 'walpost_uuidv7' AND to_regprocedure('pg_catalog.uuidv7()') IS NULL))
            -- Looks up each function through the column default or trigger that calls it, because
            -- the function may have been renamed.
            UNION ALL SELECT format('function %s, which the default of %s.id calls,', p.oid::regprocedure, outbox.name), p.proowner, true,
                    format('ALTER TABLE %s ALTER id SET DEFAULT ...; DROP FUNCTION %s', outbox.name, p.oid::regprocedure), NULL
                FROM outbox JOIN pg_attribute a ON a.attrelid = outbox.oid AND a.attname = 'id'
                JOIN pg_attrdef d ON d.adrelid = outbox.oid AND d.adnum = a.attnum
                JOIN pg_depend ON classid = 'pg_attrdef'::regclass AND objid = d.oid AND refclassid = 'pg_proc'::regclass
                JOIN pg_proc p ON p.oid = refobjid
                WHERE $1 && '{owners}' AND EXISTS (SELECT FROM pg_constraint WHERE conrelid = outbox.oid AND conname = 'walpost_event_size')
            UNION ALL SELECT format('function %s, which trigger walpost_no_update on %s calls,', p.oid::regprocedure, outbox.name),
                    p.proowner, true, format('DROP TRIGGER walpost_no_update ON %s; DROP FUNCTION %s', outbox.name, p.oid::regprocedure),
                    NULL
                FROM outbox JOIN pg_trigger ON tgrelid = outbox.oid AND tgname = 'walpost_no_update'
                JOIN pg_proc p ON p.oid = tgfoid WHERE $1 && '{owners}'
            UNION ALL SELECT format('publication %I', pubname), pubowner, true,
                    format('ALTER PUBLICATION %I OWNER TO ...', pubname), NULL
                FROM pg_publication WHERE pubname = current_setting('walpost.publication') AND $1 && '{owners}'
            -- A role that may create objects in the schema can replace Walpost's objects.
            UNION ALL SELECT 'the privilege to create objects in schema walpost', grantee, false,
                    format('REVOKE CREATE ON SCHEMA walpost FROM %s',
                        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END), NULL
                FROM pg_namespace, aclexplode(nspacl) WHERE nspname = 'walpost' AND privilege_type = 'CREATE'
                AND $1 <> '{}'
        ) AS objects (object, owner, serves_outbox, hint, name)$query$;
    -- In this query, $1 is a list of tables in the schema walpost.
    find_additions CONSTANT text := $query$(name[]) AS
        SELECT c.relname, string_agg(list.wrong, ', ') FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace CROSS JOIN LATERAL (
            SELECT format('relkind %s', c.relkind) WHERE c.relkind <> 'r' OR c.relpersistence <> 'p'
            UNION ALL SELECT format('trigger %I', tgname) FROM pg_trigger WHERE tgrelid = c.oid
            UNION ALL SELECT format('rule %I', rulename) FROM pg_rewrite WHERE ev_class = c.oid
            UNION ALL SELECT format('policy %I', polname) FROM pg_policy WHERE polrelid = c.oid
            UNION ALL SELECT format('statistics %I', stxname) FROM pg_statistic_ext WHERE stxrelid = c.oid
            UNION ALL SELECT format('inheriting table %s', inhrelid::regclass) FROM pg_inherits WHERE inhparent = c.oid
            -- A role that is allowed to write to a parent table can write to this table through the
            -- parent.
            UNION ALL SELECT format('parent %s', inhparent::regclass) FROM pg_inherits WHERE inhrelid = c.oid
            UNION ALL SELECT format('type %s', format_type(c.reloftype, NULL)) WHERE c.reloftype <> 0
            UNION ALL SELECT format('index %s', indexrelid::regclass) FROM pg_index
                WHERE indrelid = c.oid AND (indexprs IS NOT NULL OR indpred IS NOT NULL)
            UNION ALL SELECT format('constraint %I', conname) FROM pg_constraint
                WHERE conrelid = c.oid AND contype NOT IN ('p', 'n')
                AND NOT (c.relname = 'journal' AND contype = 'c' AND pg_get_constraintdef(oid)
                    ~ '^CHECK \(\(action = ANY \(ARRAY\[(''[a-z ]+''::text(, )?)+\]\)\)\)$')
            UNION ALL SELECT format('column %I %s%s', attname, format_type(atttypid, atttypmod),
                    coalesce(' DEFAULT ' || pg_get_expr(adbin, adrelid), ''))
                FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
                WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped AND NOT coalesce(CASE c.relname || '.' || attname
                    WHEN 'journal.id' THEN atttypid = 'bigint'::regtype AND attidentity = 'a' AND adbin IS NULL
                    WHEN 'journal.at' THEN atttypid = 'timestamptz'::regtype AND pg_get_expr(adbin, adrelid) = 'now()'
                    WHEN 'journal.by_role' THEN atttypid = 'text'::regtype AND pg_get_expr(adbin, adrelid) = 'SESSION_USER'
                    WHEN 'journal.detail' THEN atttypid = 'jsonb'::regtype AND pg_get_expr(adbin, adrelid) = '''{}''::jsonb'
                    WHEN 'journal.from_lsn' THEN atttypid = 'pg_lsn'::regtype AND adbin IS NULL
                    WHEN 'journal.to_lsn' THEN atttypid = 'pg_lsn'::regtype AND adbin IS NULL
                    WHEN 'outbox_row.id' THEN atttypid = 'bigint'::regtype AND attidentity = 'a' AND adbin IS NULL
                    WHEN 'outbox_row.relation' THEN atttypid = 'oid'::regtype AND adbin IS NULL
                    WHEN 'slot_state.database_oid' THEN atttypid = 'oid'::regtype AND adbin IS NULL
                    WHEN 'slot_state.version' THEN atttypid = 'integer'::regtype AND adbin IS NULL
                    WHEN 'slot_state.timeline' THEN atttypid = 'integer'::regtype AND adbin IS NULL
                    WHEN 'slot_state.created_lsn' THEN atttypid = 'pg_lsn'::regtype AND adbin IS NULL
                    WHEN 'slot_state.confirmed_lsn' THEN atttypid = 'pg_lsn'::regtype AND adbin IS NULL
                    WHEN 'slot_state.begun' THEN atttypid = 'boolean'::regtype AND adbin IS NULL
                    WHEN 'slot_state.at' THEN atttypid = 'timestamptz'::regtype AND adbin IS NULL
                    WHEN 'table_state.database_oid' THEN atttypid = 'oid'::regtype AND adbin IS NULL
                    WHEN 'table_state.relation' THEN atttypid = 'oid'::regtype AND adbin IS NULL
                    WHEN 'table_state.version' THEN atttypid = 'integer'::regtype AND adbin IS NULL
                    WHEN 'table_state.is_out' THEN atttypid = 'boolean'::regtype AND adbin IS NULL
                    WHEN 'table_state.seen_lsn' THEN atttypid = 'pg_lsn'::regtype AND adbin IS NULL
                    WHEN 'table_state.out_lsn' THEN atttypid = 'pg_lsn'::regtype AND adbin IS NULL
                    WHEN 'table_state.at' THEN atttypid = 'timestamptz'::regtype AND adbin IS NULL
                    ELSE atttypid = 'text'::regtype AND adbin IS NULL END, false)
        ) AS list (wrong) WHERE n.nspname = 'walpost' AND c.relname = ANY ($1) GROUP BY c.relname$query$;
    may_be_us oid[];
    -- The names of Walpost's existing objects that belong to a trusted role.
    examined name[] := '{}';
    code_of_others text;
    query text;
    plan_mode CONSTANT text := current_setting('plan_cache_mode');
    kept name;
    found record;
    wrong text;
    made_by text;
BEGIN
    -- Planning the three queries above takes several milliseconds, and this file runs before each
    -- access to one of Walpost's tables. Therefore, the queries are prepared, and Walpost keeps the
    -- prepared statements in its own connections. In other sessions, the queries are always
    -- prepared again, because a function of another role could have prepared different queries
    -- under the same names. The text of each prepared statement is also compared, in case such a
    -- function has run in one of Walpost's own sessions.
    IF current_setting('walpost.keep_prepared') <> 'on' OR (SELECT count(*) FROM pg_prepared_statements
        WHERE statement = CASE name WHEN 'walpost_trusted_roles' THEN 'PREPARE walpost_trusted_roles ' || find_trusted_roles
            WHEN 'walpost_objects' THEN 'PREPARE walpost_objects ' || find_objects
            WHEN 'walpost_additions' THEN 'PREPARE walpost_additions ' || find_additions END) < 3
    THEN
        FOR kept, query IN VALUES ('walpost_trusted_roles'::name, find_trusted_roles), ('walpost_objects', find_objects),
            ('walpost_additions', find_additions)
        LOOP
            IF EXISTS (SELECT FROM pg_prepared_statements WHERE name = kept) THEN
                EXECUTE format('DEALLOCATE %I', kept);
            END IF;
            EXECUTE format('PREPARE %I ', kept) || query;
        END LOOP;
    END IF;
    PERFORM set_config('plan_cache_mode', 'force_generic_plan', true);
    EXECUTE format('EXECUTE walpost_trusted_roles (%L)', act_as) INTO may_be_us;
    -- All objects are looked up in a single query. With several queries, another role could create
    -- a missing object between two of the queries. If the query finds the schema walpost, and the
    -- schema's owner is trusted, no other role can rename the schema or create objects in it
    -- afterwards.
    FOR found IN EXECUTE format('EXECUTE walpost_objects (%L, %L, %L, %L)', what, in_schema, outbox_name, own_tables) LOOP
        -- An object that is used only for this outbox may also belong to a role that can act as the
        -- outbox's owner.
        IF found.owner = ANY (may_be_us) OR found.owner <> 0 AND found.serves_outbox
            AND coalesce(pg_has_role(found.owner, found.outbox_owner, act_as), false) THEN
            -- Removes null elements: with a null in the array, the conditions with `<> ALL` below
            -- would never be true.
            examined := array_remove(examined || found.name, NULL);
            CONTINUE;
        END IF;
        RAISE EXCEPTION '% belongs to %, expected a superuser, or role %', regexp_replace(found.object, unprintable, '?', 'g'),
            CASE found.owner WHEN 0 THEN 'PUBLIC'
                ELSE 'role ' || regexp_replace(quote_ident(pg_get_userbyid(found.owner)), unprintable, '?', 'g') END,
            concat_ws(' or ', quote_ident(session_user), CASE WHEN found.serves_outbox THEN
                regexp_replace(nullif(quote_ident(pg_get_userbyid(found.outbox_owner)), quote_ident(session_user)),
                    unprintable, '?', 'g') END)
            USING ERRCODE = 'invalid_object_definition', DETAIL = 'Its owner could run code as any role that uses it. '
                'It was not used, and nothing was changed.',
                HINT = regexp_replace(format('Have a superuser check what it is and who created it, and then run: %s. Or, if its owner may have '
                    'all privileges of role %I: GRANT %2$I TO %s', found.hint, session_user,
                    CASE found.owner WHEN 0 THEN '...' ELSE quote_ident(pg_get_userbyid(found.owner)) END), unprintable, '?', 'g');
    END LOOP;
    PERFORM set_config('walpost.examined', array_to_string(examined, ' '), false);
    IF 'present' = ANY (what) THEN
        FOR kept IN SELECT name FROM unnest(own_tables) AS name WHERE name = ANY (what) AND name <> ALL (examined) LOOP
            RAISE EXCEPTION 'table walpost.% does not exist', kept USING ERRCODE = 'undefined_table',
                HINT = format('Create it: walpost init --config FILE; or run sql/%s of Walpost in this database',
                    CASE kept WHEN 'outbox_row' THEN 'tables.sql' ELSE 'journal.sql' END);
        END LOOP;
        IF 'walpost' <> ALL (examined) THEN
            RAISE EXCEPTION 'schema walpost does not exist' USING ERRCODE = 'invalid_schema_name',
                HINT = 'If it was renamed temporarily, run the same command again.';
        END IF;
    END IF;

    -- The server evaluates row filters as the role that reads the slot. PostgreSQL itself rejects
    -- functions that are not built in, but some built-in functions are unsafe too:
    -- satisfies_hash_partition calls the functions in a partition key, and functions written in SQL
    -- may need a snapshot, without which decoding crashes. PostgreSQL 14 has no row filters.
    IF 'owners' = ANY (what) THEN
        FOR found IN SELECT b.pubname, r.prrelid::regclass AS name, coalesce(p.oid, called.oid)::regprocedure AS function
            FROM pg_publication b JOIN pg_publication_rel r ON r.prpubid = b.oid
            CROSS JOIN LATERAL (SELECT kind, number::oid FROM regexp_matches(to_jsonb(r) ->> 'prqual',
                ' :(funcid|opfuncid|opno) (\d+)', 'g') AS m, unnest(m[1:1], m[2:2]) AS part (kind, number)) AS named (kind, number)
            LEFT JOIN pg_operator o ON named.kind = 'opno' AND o.oid = number
            CROSS JOIN LATERAL (SELECT CASE kind WHEN 'opno' THEN coalesce(o.oprcode::oid, number) ELSE number END) AS called (oid)
            LEFT JOIN pg_proc p ON p.oid = called.oid
            -- OIDs below 12000 belong to built-in objects, which can't be dropped.
            WHERE b.pubname = current_setting('walpost.publication') AND called.oid <> 0 AND (number >= 12000 OR p.oid IS NULL
                OR p.provolatile <> 'i' OR p.prolang <> (SELECT oid FROM pg_language WHERE lanname = 'internal')
                OR p.oid = 'pg_catalog.satisfies_hash_partition(oid, integer, integer, "any")'::regprocedure)
            LIMIT 1
        LOOP
            RAISE EXCEPTION 'publication % has a row filter on table % that calls %, which is not safe to evaluate as another role',
                quote_ident(found.pubname), regexp_replace(found.name::text, unprintable, '?', 'g'), found.function
                USING ERRCODE = 'invalid_object_definition', DETAIL = 'It could run code as the role that reads the slot, or crash '
                    'the server. Only immutable functions of PostgreSQL that are written in C are allowed, except satisfies_hash_partition.',
                    HINT = regexp_replace(format('ALTER PUBLICATION %I DROP TABLE ONLY %s; then add the table again without that condition.',
                        found.pubname, found.name), unprintable, '?', 'g');
        END LOOP;
    END IF;

    FOR kept, wrong IN EXECUTE format('EXECUTE walpost_additions (%L)',
        ARRAY(SELECT unnest(own_tables) INTERSECT SELECT unnest(what::name[]) INTERSECT SELECT unnest(examined))) LOOP
        made_by := CASE kept WHEN 'outbox_row' THEN 'tables.sql' ELSE 'journal.sql' END;
        RAISE EXCEPTION 'table walpost.% has objects or columns that sql/% does not create: %', kept, made_by,
            regexp_replace(wrong, unprintable, '?', 'g')
            USING ERRCODE = 'invalid_object_definition', DETAIL = 'They could run code as any role that uses the table. '
                'The table was not used, and nothing was changed.',
                HINT = format('Have a superuser check what they are, and drop them. Or: ALTER TABLE walpost.%1$s RENAME TO %1$s_old; '
                    'then create it: walpost init --config FILE; or run sql/%2$s of Walpost in this database', kept, made_by);
    END LOOP;

    IF uses_table AND outbox_name <> '' THEN
        IF 'lock_and_examine' <> ALL (examined) THEN
            RAISE EXCEPTION 'function walpost.lock_and_examine does not exist, and table %.% cannot be used without it',
                quote_ident(in_schema), quote_ident(outbox_name) USING ERRCODE = 'undefined_function',
                    HINT = 'Create it as a superuser: walpost init --config FILE; or run sql/guard.sql of Walpost in this database';
        END IF;
        code_of_others := walpost.lock_and_examine(in_schema, outbox_name,
            CASE WHEN 'write' = ANY (what) THEN 'DELETE' WHEN 'alter' = ANY (what) THEN 'ALTER'
                WHEN 'compare' = ANY (what) THEN 'COMPARE' WHEN 'condition' = ANY (what) THEN 'CONDITION' ELSE 'SELECT' END);
        -- An older version of lock_and_examine returns NULL if the table does not exist.
        IF code_of_others IS NULL THEN
            RAISE EXCEPTION 'table %.% does not exist', quote_ident(in_schema), quote_ident(outbox_name)
                USING ERRCODE = 'undefined_table', HINT = 'If it was renamed temporarily, run the same command again.';
        END IF;
        PERFORM set_config('walpost.code_of_others', code_of_others, false);
    END IF;
    PERFORM set_config('plan_cache_mode', plan_mode, true);
END
$walpost$;
