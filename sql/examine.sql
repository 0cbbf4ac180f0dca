-- Refuses what is there already and could have another role's code run as whoever runs these files, or as Walpost. The
-- other files run this one; by itself it changes nothing. Walpost runs it before it reads or writes walpost.journal, and
-- before it reads the outbox table.
--
--   psql -v schema=public -v table=outbox -v publication=walpost_outbox -v examine='owners journal' -f sql/examine.sql
--
-- Whoever owns a function, a trigger or a view has it run with the rights of whoever calls it, inserts or selects. So an
-- object that is there already is used only if it is owned by a superuser, by the role that asks or one that is a member
-- of it, or by the outbox table's owner (or a member of that role). What is examined, in the words of `examine`:
--   owners    who owns the schema walpost, the functions of Walpost and the publication
--   journal   who owns walpost.journal, and that it has no more to it than journal.sql gives it
--   slot_state, outbox_row   the same of these tables, and that nobody else may add a trigger to them
--   read      which code of other roles a SELECT from the outbox table, or making a partition of it, can run: it is told in
--             the setting walpost.code_of_others
--   write     the same for DELETE
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

-- For all of the session: a function or an operator in another schema of the path could be called in place of
-- pg_catalog's, and a policy's functions by any query of its table (CVE-2018-1058).
SET search_path = pg_catalog;
SET row_security = off;

SET walpost.schema = :'schema';
SET walpost.table_name = :'table';
SET walpost.publication = :'publication';
SET walpost.examine = :'examine';

DO $walpost$
DECLARE
    what text[] := string_to_array(current_setting('walpost.examine'), ' ');
    in_schema text := current_setting('walpost.schema');
    outbox_name text := current_setting('walpost.table_name');
    outbox oid;
    outbox_owner oid;
    -- Who can act as the current role anyway. Up to PostgreSQL 15, CREATEROLE can make itself a member of any role but a
    -- superuser.
    may_be_us oid[] := (SELECT array_agg(oid) FROM pg_roles WHERE pg_has_role(oid, current_user, 'MEMBER')
        OR rolcreaterole AND current_setting('server_version_num')::int < 160000
            AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user));
    kept name;
    its_oid oid;
    tables oid[];
    found record;
    wrong text;
    made_by text;
BEGIN
    SELECT c.oid, c.relowner INTO outbox, outbox_owner FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = in_schema AND c.relname = outbox_name;

    FOR found IN
        SELECT object, owner, hint FROM (
            SELECT 'schema walpost', nspowner, 'ALTER SCHEMA walpost OWNER TO ...' FROM pg_namespace
                WHERE nspname = 'walpost' AND what && '{owners,journal,slot_state,outbox_row}'
            UNION ALL SELECT 'table walpost.' || relname, relowner, format('ALTER TABLE walpost.%s OWNER TO ...', relname)
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                WHERE n.nspname = 'walpost' AND relname IN ('journal', 'slot_state', 'outbox_row') AND relname = ANY (what)
            UNION ALL SELECT format('the right %s on table walpost.%s', privilege_type, relname), grantee,
                    format('REVOKE %s ON walpost.%s FROM %s', privilege_type, relname,
                        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
                FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, aclexplode(relacl)
                WHERE n.nspname = 'walpost' AND relname IN ('slot_state', 'outbox_row') AND relname = ANY (what)
                AND privilege_type IN ('TRIGGER', 'REFERENCES') AND grantee <> relowner
            UNION ALL SELECT format('function %s', p.oid::regprocedure), p.proowner,
                    format('DROP FUNCTION %s', p.oid::regprocedure)
                FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE what && '{owners}' AND (
                    n.nspname = 'walpost' AND p.proname IN ('publish', 'publish_bytes', 'add_outbox') OR n.nspname = in_schema
                    AND p.pronargs = 0 AND p.proname IN ('walpost_uuidv7', 'walpost_no_update'))
            UNION ALL SELECT format('publication %I', pubname), pubowner,
                    format('ALTER PUBLICATION %I OWNER TO ...', pubname)
                FROM pg_publication WHERE pubname = current_setting('walpost.publication') AND what && '{owners}'
            -- Who may create in the schema can put an object in the place of ours.
            UNION ALL SELECT 'the right to create in schema walpost', grantee, format('REVOKE CREATE ON SCHEMA walpost FROM %s',
                    CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END)
                FROM pg_namespace, aclexplode(nspacl) WHERE nspname = 'walpost' AND privilege_type = 'CREATE'
                AND what && '{owners,journal,slot_state,outbox_row}'
        ) AS objects (object, owner, hint)
    LOOP
        -- What serves several outboxes is not for the owner of one to make.
        CONTINUE WHEN found.owner = ANY (may_be_us) OR found.owner <> 0
            AND found.object !~ 'walpost\.(add_outbox\(|outbox_row$)'
            AND coalesce(pg_has_role(found.owner, outbox_owner, 'MEMBER'), false);
        RAISE EXCEPTION '% belongs to %, expected a superuser, or role %', found.object,
            CASE found.owner WHEN 0 THEN 'PUBLIC' ELSE 'role ' || quote_ident(pg_get_userbyid(found.owner)) END,
            concat_ws(' or ', quote_ident(current_user),
                nullif(quote_ident(pg_get_userbyid(outbox_owner)), quote_ident(current_user)))
            USING ERRCODE = 'invalid_object_definition', DETAIL = 'Its owner could have code run as whoever uses it. '
                'It was not used, and nothing was changed.',
                HINT = 'Have a superuser see what it is and who made it, and then: ' || found.hint;
    END LOOP;

    FOR kept, its_oid IN SELECT relname, c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = 'walpost' AND relname IN ('journal', 'slot_state', 'outbox_row') AND relname = ANY (what)
    LOOP
        SELECT string_agg(list.wrong, ', ') INTO wrong FROM (
            SELECT format('relkind %s', relkind) FROM pg_class WHERE oid = its_oid
                AND (relkind <> 'r' OR relpersistence <> 'p')
            UNION ALL SELECT format('trigger %I', tgname) FROM pg_trigger WHERE tgrelid = its_oid
            UNION ALL SELECT format('rule %I', rulename) FROM pg_rewrite WHERE ev_class = its_oid
            UNION ALL SELECT format('policy %I', polname) FROM pg_policy WHERE polrelid = its_oid
            UNION ALL SELECT format('statistics %I', stxname) FROM pg_statistic_ext WHERE stxrelid = its_oid
            UNION ALL SELECT format('inheriting table %s', inhrelid::regclass) FROM pg_inherits WHERE inhparent = its_oid
            UNION ALL SELECT format('index %s', indexrelid::regclass) FROM pg_index
                WHERE indrelid = its_oid AND (indexprs IS NOT NULL OR indpred IS NOT NULL)
            UNION ALL SELECT format('constraint %I', conname) FROM pg_constraint
                WHERE conrelid = its_oid AND contype NOT IN ('p', 'n')
                AND NOT (kept = 'journal' AND contype = 'c' AND pg_get_constraintdef(oid)
                    ~ '^CHECK \(\(action = ANY \(ARRAY\[(''[a-z ]+''::text(, )?)+\]\)\)\)$')
            UNION ALL SELECT format('column %I %s%s', attname, format_type(atttypid, atttypmod),
                    coalesce(' DEFAULT ' || pg_get_expr(adbin, adrelid), ''))
                FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
                WHERE attrelid = its_oid AND attnum > 0 AND NOT attisdropped AND NOT coalesce(CASE kept || '.' || attname
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
                    ELSE atttypid = 'text'::regtype AND adbin IS NULL END, false)
        ) AS list (wrong);
        IF wrong IS NOT NULL THEN
            made_by := CASE kept WHEN 'outbox_row' THEN 'tables.sql' ELSE 'journal.sql' END;
            RAISE EXCEPTION 'table walpost.% has what sql/% does not give it: %', kept, made_by, wrong
                USING ERRCODE = 'invalid_object_definition', DETAIL = 'It could have code run as whoever uses the table. '
                    'It was not used, and nothing was changed.',
                    HINT = format('Have a superuser see what it is, and drop it. Or: ALTER TABLE walpost.%s RENAME TO ...; '
                        'then make another one: walpost init, or sql/%s', kept, made_by);
        END IF;
    END LOOP;

    IF what && '{read,write}' THEN
        -- With partitions, indexes and whatever else inherits.
        WITH RECURSIVE tree (oid) AS (
            SELECT outbox WHERE outbox IS NOT NULL UNION SELECT inhrelid FROM pg_inherits JOIN tree ON inhparent = tree.oid
        ) SELECT array_agg(oid) INTO tables FROM tree;
        -- What PostgreSQL brings along itself is pinned, and not in pg_depend.
        WITH attached (class, object) AS (
            SELECT 'pg_class'::regclass, unnest(tables)
            UNION ALL SELECT 'pg_class'::regclass, indexrelid FROM pg_index WHERE indrelid = ANY (tables)
            UNION ALL SELECT 'pg_constraint'::regclass, oid FROM pg_constraint WHERE conrelid = ANY (tables)
            UNION ALL SELECT 'pg_statistic_ext'::regclass, oid FROM pg_statistic_ext WHERE stxrelid = ANY (tables)
            UNION ALL SELECT 'pg_rewrite'::regclass, oid FROM pg_rewrite WHERE ev_class = ANY (tables) AND what && '{write}'
            UNION ALL SELECT 'pg_attrdef'::regclass, d.oid FROM pg_attrdef d
                JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
                WHERE adrelid = ANY (tables) AND attgenerated <> ''
            UNION ALL SELECT 'pg_trigger'::regclass, oid FROM pg_trigger
                WHERE tgrelid = ANY (tables) AND what && '{write}' AND (tgtype & 8) <> 0 -- TRIGGER_TYPE_DELETE
        ), called (class, object, function, owner) AS (
            SELECT class, object, p.oid, p.proowner FROM attached JOIN pg_depend ON classid = class AND objid = object
                JOIN pg_proc p ON refclassid = 'pg_proc'::regclass AND p.oid = refobjid
            UNION SELECT class, object, o.oprcode, p.proowner FROM attached
                JOIN pg_depend ON classid = class AND objid = object
                JOIN pg_operator o ON refclassid = 'pg_operator'::regclass AND o.oid = refobjid
                JOIN pg_proc p ON p.oid = o.oprcode
            -- A cast to text, which some columns are read with.
            UNION SELECT 'pg_class'::regclass, attrelid, p.oid, p.proowner FROM pg_attribute
                JOIN pg_cast ON castsource = atttypid JOIN pg_proc p ON p.oid = castfunc
                WHERE attrelid = ANY (tables) AND attnum > 0 AND NOT attisdropped
        )
        SELECT string_agg(DISTINCT text, '; ') INTO wrong FROM (
            SELECT format('%s calls function %s of role %I', pg_describe_object(class, object, 0), function::regprocedure,
                pg_get_userbyid(owner)) FROM called WHERE owner <> ALL (may_be_us)
            UNION ALL SELECT format('%s is a foreign table', oid::regclass) FROM pg_class
                WHERE oid = ANY (tables) AND relkind = 'f'
        ) AS list (text);
        PERFORM set_config('walpost.code_of_others', coalesce(wrong, ''), false);
    END IF;
END
$walpost$;
