-- Fails if the slot can't be created on this server or would not be usable. Changes nothing.
--
--   psql -v slot=walpost_outbox -f sql/prerequisites.sql
--
-- Run by: the role that will run slot.sql. slot.sql also runs this file, and `walpost init` runs it
-- before it changes anything. A slot can't be created in a transaction that has written, so the
-- slot is created last. If only that last step failed, the table, role and publication would
-- already exist. An existing slot of that name is examined.
\set ON_ERROR_STOP on
\if :{?slot}
\else
\set slot walpost_outbox
\endif

-- Sets search_path to pg_catalog, pg_temp for the rest of the session.
\ir session.sql

SET walpost.slot = :'slot';

DO $walpost$
DECLARE
    name text := current_setting('walpost.slot');
    slots_max int := current_setting('max_replication_slots');
    senders_max int := current_setting('max_wal_senders');
    found pg_replication_slots;
BEGIN
    SELECT * INTO found FROM pg_replication_slots WHERE slot_name = name;
    IF found IS NULL THEN
        IF pg_is_in_recovery() THEN
            RAISE EXCEPTION 'this server is a standby in recovery, and slot % must be created on the primary', name
                USING HINT = 'Connect to the primary. With several hosts in the connection string: target_session_attrs=read-write';
        END IF;
        -- Since PostgreSQL 19, wal_level = replica is sufficient, because creating the first
        -- logical slot raises effective_wal_level.
        IF current_setting('wal_level') <> 'logical' AND (current_setting('wal_level') = 'minimal'
            OR current_setting('effective_wal_level', true) IS NULL) THEN
            RAISE EXCEPTION 'wal_level is %, but a logical slot requires wal_level = logical', current_setting('wal_level')
                USING HINT = CASE
                    WHEN current_setting('rds.logical_replication', true) IS NOT NULL THEN 'This is Amazon RDS or Aurora: set '
                        'rds.logical_replication = 1 in the parameter group, of the cluster for Aurora; then reboot, and run '
                        'this again.'
                    WHEN current_setting('cloudsql.logical_decoding', true) IS NOT NULL THEN 'This is Cloud SQL: set the flag '
                        'cloudsql.logical_decoding = on, which restarts the instance; then run this again.'
                    WHEN current_setting('alloydb.logical_decoding', true) IS NOT NULL THEN 'This is AlloyDB: set the flag '
                        'alloydb.logical_decoding = on, which restarts the instance; then run this again.'
                    WHEN current_setting('azure.extensions', true) IS NOT NULL THEN 'This is Azure Database: set the server '
                        'parameter wal_level = logical; then restart the server, and run this again.'
                    ELSE 'ALTER SYSTEM SET wal_level = logical; then restart the server, and run this again.' END;
        END IF;
        IF (SELECT count(*) FROM pg_replication_slots) >= slots_max THEN
            RAISE EXCEPTION 'all replication slots are in use, but slot % needs one', name
                USING ERRCODE = 'configuration_limit_exceeded', HINT = format('List them, and drop those that are not needed: SELECT slot_name, active '
                    'FROM pg_catalog.pg_replication_slots. Or: ALTER SYSTEM SET max_replication_slots = %s; then '
                    'restart the server.', slots_max + 10);
        END IF;
        IF (SELECT count(*) FROM pg_stat_replication) >= senders_max THEN
            RAISE EXCEPTION 'all WAL senders are in use, but reading slot % requires one', name
                USING ERRCODE = 'too_many_connections', HINT = format('List their sessions: SELECT * FROM pg_catalog.pg_stat_replication. '
                    'Or: ALTER SYSTEM SET max_wal_senders = %s; then restart the server.', senders_max + 10);
        END IF;
        -- Tests whether the role may use slots. The role's attributes do not show this, because on RDS and Aurora the
        -- privilege comes from membership in another role. The call below always fails without moving a slot, because
        -- 0/0 is not a valid position. However, the server checks the privilege first, so the error shows whether the
        -- role has it.
        BEGIN
            PERFORM pg_catalog.pg_replication_slot_advance(name, '0/0');
        EXCEPTION
            WHEN insufficient_privilege THEN
                RAISE EXCEPTION 'role % lacks REPLICATION, so it can''t create slot %', quote_ident(current_user), name
                    USING ERRCODE = 'insufficient_privilege', HINT = format(CASE
                        WHEN EXISTS (SELECT FROM pg_roles WHERE rolname = 'rds_replication') THEN 'GRANT rds_replication TO %I;'
                        ELSE 'ALTER ROLE %I REPLICATION;' END, current_user);
            WHEN OTHERS THEN NULL;
        END;
        RETURN;
    END IF;

    IF found.slot_type <> 'logical' THEN
        RAISE EXCEPTION 'slot % exists and is a physical slot', name
            USING HINT = 'Choose another name for the slot.';
    END IF;
    IF found.plugin <> 'pgoutput' THEN
        RAISE EXCEPTION 'slot % exists with plugin %, expected pgoutput', name, found.plugin
            USING HINT = 'Choose another name for the slot.';
    END IF;
    IF found.database <> current_database() THEN
        RAISE EXCEPTION 'slot % exists in database %, expected %', name,
            regexp_replace(quote_ident(found.database),
                E'[\\u0001-\\u001f\\u007f-\\u009f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]', '?', 'g'),
            quote_ident(current_database())
            USING HINT = 'Choose another name, because slot names are unique within a server: walpost init --slot NAME --config FILE; or '
                'set the variable slot of sql/slot.sql';
    END IF;
    IF found.wal_status = 'lost' THEN
        RAISE EXCEPTION 'slot % exists and is lost: the server removed WAL that the slot still needed', name
            USING HINT = format('Events after %s were not delivered. Drop the slot: SELECT pg_catalog.pg_drop_replication_slot(%L); then run this '
                'again, and replay the rows that were written since then (docs/replay.md)', found.confirmed_flush_lsn, name);
    END IF;
END
$walpost$;
