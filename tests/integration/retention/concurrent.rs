//! Retention while writers, `run` and other maintenance processes use the table.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{
    COLUMNS, DEFAULT, LOCK_TIMEOUT, fixture_with_old_partition, insert_old, is, is_gone, maintain,
    maintain_until, maintain_until_delivered,
};
use crate::support::checker::Resends;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::session::Session;
use crate::support::wait::{assert_stays, wait_until};
use crate::support::walpost::{Invocation, config_file};

/// Signals the writers to stop, even if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs the statement repeatedly until `stop` is set, and calls `written` after each run. Returns
/// the duration of the slowest run.
fn write_until(conninfo: &str, statement: &str, stop: &AtomicBool, written: impl Fn()) -> Duration {
    let session = Session::connect(conninfo).unwrap();
    let mut slowest = Duration::ZERO;
    while !stop.load(Ordering::Relaxed) {
        let begin = Instant::now();
        session.run(statement);
        slowest = slowest.max(begin.elapsed());
        written();
        thread::sleep(Duration::from_millis(2));
    }
    slowest
}

#[test]
fn writers_wait_no_longer_than_the_lock_timeout() {
    for default in [DEFAULT, ""] {
        let fixture = fixture_with_old_partition(Server::shared(MAJOR), default);
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start_and_confirm_one(&aggregate, "first");
        maintain_until_delivered(&fixture);
        let statement = fixture.insert_sql(&aggregate, "k");
        let stop = AtomicBool::new(false);
        let (slowest, duration) = thread::scope(|scope| {
            let writers = [(); 2].map(|()| {
                scope.spawn(|| write_until(&fixture.conninfo(), &statement, &stop, || {}))
            });
            let stopped = StopOnDrop(&stop);
            // Hold a writer's lock until Walpost has made all of its attempts to lock the table.
            let holder = fixture.server.session(&fixture.name);
            holder.run(&format!(
                "BEGIN; {}",
                fixture.insert_sql(&aggregate, "held")
            ));
            let mut duration = Duration::ZERO;
            wait_until("a pass that finds the table in use", || {
                let begin = Instant::now();
                let finished = maintain(&fixture, &["--retention", "1s"]);
                duration = begin.elapsed();
                match finished.code {
                    Some(0) => false,
                    _ => {
                        finished
                            .expect_code(1)
                            .expect_mentions(&["in use", "5 attempts to lock it"]);
                        true
                    }
                }
            });
            assert!(is(&fixture, "outbox_old", true));
            holder.run("COMMIT");
            maintain_until(&fixture, "the partition to be dropped", || {
                is_gone(&fixture, "outbox_old")
            });
            drop(stopped);
            let slowest = writers.map(|writer| writer.join().unwrap());
            (slowest.into_iter().max().unwrap(), duration)
        });
        eprintln!("slowest insert {slowest:?} while a pass took {duration:?}");
        // Allow some more time, because only two cores are available and both are busy.
        assert!(
            slowest < LOCK_TIMEOUT + Duration::from_millis(400),
            "{slowest:?}"
        );
        fixture.settle(walpost, &[], Resends::Never);
    }
}

/// While Walpost inspects a table that it is going to drop, writers are not blocked. The inspection
/// may therefore take longer than the lock timeout, for example if the table has many indexes or
/// the server is busy.
#[test]
fn slow_inspection_of_a_table_does_not_count_toward_the_lock_timeout() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let walpost = fixture.start_and_confirm_one(&fixture.aggregate(1), "k");
    let seconds = LOCK_TIMEOUT.as_secs_f64() * 2.0;
    // Slows down the inspection of every table except the outbox itself.
    fixture.db.run(&format!(
        "ALTER FUNCTION walpost.lock_and_examine(text, text, text) RENAME TO lock_and_examine_quickly;
         CREATE FUNCTION walpost.lock_and_examine(text, text, text) RETURNS text LANGUAGE plpgsql AS $$ BEGIN
             IF $2 <> 'outbox' THEN PERFORM pg_catalog.pg_sleep({seconds}); END IF;
             RETURN walpost.lock_and_examine_quickly($1, $2, $3);
         END $$"
    ));
    maintain_until(&fixture, "the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    walpost.terminate().expect_code(0);
}

#[test]
fn completes_an_interrupted_partition_detach_in_a_later_pass() {
    for major in [14, 18] {
        let fixture = fixture_with_old_partition(Server::shared(major), "");
        let aggregate = fixture.aggregate(1);
        let walpost = fixture.start();
        insert_old(&fixture, &aggregate, "old");
        fixture.wait_until_confirmed();
        // Walpost completes a pending detach only if all rows of the partition have been delivered.
        maintain_until_delivered(&fixture);
        let reader = fixture.server.session(&fixture.name);
        reader.run("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM outbox");
        let pending = "SELECT EXISTS (SELECT FROM pg_inherits WHERE inhdetachpending)";
        // Imitate an administrator who starts to detach the partition but cancels the statement.
        fixture.db.run("SET statement_timeout = '1s'");
        let detach = "ALTER TABLE outbox DETACH PARTITION outbox_old CONCURRENTLY";
        fixture
            .db
            .try_run(detach)
            .expect_err("the reader is in the way");
        fixture.db.run("RESET statement_timeout");
        assert!(fixture.db.is_true(pending));
        fixture.insert(&aggregate, "meanwhile");
        reader.run("COMMIT");
        maintain_until(&fixture, "the partition to be dropped", || {
            is_gone(&fixture, "outbox_old")
        });
        fixture.settle(walpost, &[], Resends::Never);
    }
}

in_both_modes! { run_keeps_the_table_size_constant_under_load }

/// Imitates half an hour of load on a table with one partition per minute. To save time, each
/// partition covers only two seconds.
fn run_keeps_the_table_size_constant_under_load(exactly_once: bool) {
    let fixture = Fixture::bare();
    fixture.db.run(&format!(
        "CREATE TABLE outbox ({COLUMNS}) PARTITION BY RANGE (created_at); {DEFAULT}
         DO $$ BEGIN
             EXECUTE format('CREATE TABLE outbox_first PARTITION OF outbox FOR VALUES FROM (%L) TO (%L)',
                 date_trunc('second', now()), date_trunc('second', now()) + interval '2 seconds');
         END $$"
    ));
    fixture.init().finish().expect_code(0);
    let fixture = fixture.in_mode(exactly_once);
    let aggregate = fixture.aggregate(2);
    // Create partitions one minute ahead, because a maintenance pass can be late on a busy machine.
    let ahead = ["--retention", "1s", "--partitions-ahead", "30"];
    maintain(&fixture, &ahead).expect_code(0);
    let mut walpost = fixture.start_with(&ahead);
    const ROWS: usize = 20;
    let statement = fixture.events().insert_many(&aggregate, ROWS, "'{}'");
    let stop = AtomicBool::new(false);
    let written = AtomicUsize::new(0);
    let (mut sizes, mut counts) = (Vec::new(), Vec::new());
    let rows = "SELECT count(*) FROM outbox";
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            write_until(&fixture.conninfo(), &statement, &stop, || {
                written.fetch_add(ROWS, Ordering::Relaxed);
            })
        });
        let stopped = StopOnDrop(&stop);
        // Wait until the first rows are written, and then until they are removed.
        wait_until("the first rows to be written", || {
            fixture.db.number(rows) > 0
        });
        let oldest = fixture
            .db
            .value("SELECT min(created_at) FROM outbox")
            .unwrap();
        let is_gone = format!(
            "SELECT min(created_at) > '{oldest}'::timestamptz + interval '1 second' FROM outbox"
        );
        wait_until("the first rows to be deleted", || {
            fixture.db.is_true(&is_gone)
        });
        let begin = walpost.logged("dropped");
        for more in [1, 3, 5, 7, 9] {
            walpost.wait_for_logs("dropped", begin + more);
            sizes.push(fixture.db.number(
                "SELECT sum(pg_table_size(oid)) FROM pg_class WHERE relname ~ '^outbox' AND relkind = 'r'",
            ));
            counts.push(fixture.db.number(rows));
        }
        wait_until("far more to be written than is there at any time", || {
            counts.push(fixture.db.number(rows));
            let half = i64::try_from(written.load(Ordering::Relaxed) / 2).unwrap();
            counts.iter().all(|count| *count < half)
        });
        drop(stopped);
        eprintln!("slowest insert: {:?}", writer.join().unwrap());
    });
    eprintln!("sizes {sizes:?}, rows {counts:?}");
    let work = fixture.db.rows(
        "SELECT coalesce(sum(n_tup_del), 0), coalesce(sum(n_dead_tup), 0) FROM pg_stat_user_tables
         WHERE relname ~ '^outbox'",
    );
    assert_eq!(work, [[Some("0".to_owned()), Some("0".to_owned())]]);
    // On a busy machine, maintenance passes can be late, so the number of rows varies. Dead rows
    // would increase the size per row.
    let row_bytes = |n: usize| sizes[n] / counts[n].max(1);
    assert!(row_bytes(4) < 2 * row_bytes(0), "{sizes:?}");
    assert_eq!(walpost.logged("maintenance fail"), 0, "{}", walpost.log());
    fixture.settle(walpost, &[], Resends::Never);
    let strays = "SELECT count(*) FROM outbox_default";
    assert_eq!(fixture.db.number(strays), 0, "created in time");
}

#[test]
fn only_one_process_maintains_a_table_at_a_time() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let other = fixture.server.session(&fixture.name);
    other.rows(
        "SELECT pg_advisory_lock(x'77616c70'::int, 'outbox'::regclass::oid::int8::bit(32)::int)",
    );
    let finished = maintain(&fixture, &["--retention", "1s"]).expect_code(1);
    finished.expect_mentions(&["another Walpost process is maintaining"]);
    // While another process holds the maintenance lock, `run` skips maintenance without logging
    // anything.
    let walpost = fixture.start_with(&["--retention", "1s"]);
    assert_stays("quiet", Duration::from_secs(2), || {
        walpost.logged("maintenance") == 0
    });
    walpost.terminate().expect_code(0);
}

/// The arguments, in SQL, of the advisory lock functions that acquire the maintenance lock.
const LOCK_KEY: &str = "x'77616c70'::int, 'outbox'::regclass::oid::int8::bit(32)::int";

/// Returns the SQL statement that follows the text `introduction` in a message.
fn printed_statement<'t>(text: &'t str, introduction: &str) -> &'t str {
    let (_, statement) = text
        .split_once(introduction)
        .unwrap_or_else(|| panic!("no {introduction:?} in {text}"));
    statement.lines().next().unwrap().trim_end_matches('.')
}

/// Every role that can connect can acquire any advisory lock.
#[test]
fn names_the_role_that_holds_the_maintenance_lock() {
    thread::scope(|scope| {
        for major in [14, 15, 18] {
            scope.spawn(move || names_a_role_that_holds_the_lock(major));
        }
    });
}

fn names_a_role_that_holds_the_lock(major: u32) {
    let fixture = fixture_with_old_partition(Server::shared(major), DEFAULT);
    let role = format!("{}_m", fixture.name);
    fixture.db.run(&format!("CREATE ROLE {role} LOGIN"));
    let holder = fixture.server.session_as(&role, &fixture.name);
    holder.rows(&format!("SELECT pg_advisory_lock({LOCK_KEY})"));
    let pid = holder.number("SELECT pg_backend_pid()");
    let mut walpost = fixture.start_with(&["--retention", "1s"]);
    let who = format!("PID {pid} (application_name \"\", role {role:?}) holds the advisory lock");
    let remedy = format!("SELECT pg_catalog.pg_terminate_backend({pid})");
    let refused = maintain(&fixture, &["--retention", "1s", "--delete-rows"]).expect_code(3);
    let refused =
        refused.expect_mentions(&["table public.outbox is not maintained", &who, &remedy]);
    let logged = walpost.wait_for_log("maintenance failed");
    assert!(
        logged.contains(&who) && logged.contains(&remedy),
        "{logged}"
    );
    assert!(is(&fixture, "outbox_old", true));

    let output = format!("{}{}", refused.stdout, refused.stderr);
    let printed = printed_statement(&output, "Release the lock: ");
    assert!(printed.starts_with(&remedy), "{printed}");
    fixture.db.run(&remedy);
    wait_until("the partition to be dropped", || {
        is_gone(&fixture, "outbox_old")
    });
    walpost.terminate().expect_code(0);
    fixture.db.drop_role(&role);
}

/// A prepared transaction keeps its locks without a session, so `pg_stat_activity` does not list
/// it.
#[test]
fn names_the_prepared_transaction_that_holds_the_maintenance_lock() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let (role, name) = (format!("{}_m", fixture.name), format!("{}'s", fixture.name));
    let quoted = name.replace('\'', "''");
    fixture.db.run(&format!("CREATE ROLE {role} LOGIN"));
    let holder = fixture.server.session_as(&role, &fixture.name);
    holder.run(&format!(
        "BEGIN; SELECT pg_advisory_xact_lock({LOCK_KEY}); PREPARE TRANSACTION '{quoted}'"
    ));
    let finished = maintain(&fixture, &["--retention", "1s"]);
    let remedy = format!("ROLLBACK PREPARED '{quoted}'");
    fixture.db.run(&remedy);
    finished.expect_code(3).expect_mentions(&[
        &format!("prepared transaction {name:?} (role {role:?}) holds the advisory lock"),
        &remedy,
    ]);
    maintain(&fixture, &["--retention", "1s"]).expect_code(0);
    drop(holder);
    fixture.db.drop_role(&role);
}

/// If two sessions hold the maintenance lock in shared mode, Walpost names one of them. Walpost
/// must not fail because the catalog query returns several rows, or because a session's role has
/// been dropped.
#[test]
fn names_one_holder_of_a_shared_maintenance_lock() {
    let fixture = Fixture::on_servers(Server::shared(MAJOR), Broker::shared());
    let role = format!("{}_m", fixture.name);
    fixture.db.run(&format!("CREATE ROLE {role} LOGIN"));
    let holders = [(); 2].map(|()| {
        let holder = fixture.server.session_as(&role, &fixture.name);
        holder.rows(&format!("SELECT pg_advisory_lock_shared({LOCK_KEY})"));
        holder
    });
    fixture.db.run(&format!("DROP ROLE {role}"));
    let pids = holders
        .each_ref()
        .map(|holder| holder.number("SELECT pg_backend_pid()"));
    let finished = maintain(&fixture, &["--retention", "1s", "--delete-rows"]).expect_code(3);
    let lowest = pids.into_iter().min().unwrap();
    finished.expect_mentions(&[&format!("pg_catalog.pg_terminate_backend({lowest})")]);
}

#[test]
fn retention_configured_in_the_file_works_in_exactly_once_mode() {
    let fixture = fixture_with_old_partition(Server::shared(MAJOR), DEFAULT);
    let text = format!(
        "[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\ndelivery = \"exactly-once\"\nretention = \"1h\"\npartitions_ahead = 3\n",
        fixture.name,
        fixture.conninfo()
    );
    let file = config_file(text);
    let command = |words: &[&str]| Invocation::new(words).arg("--config").arg(&file).finish();
    let finished = command(&["maintain", "--dry-run"]).expect_code(0);
    assert_eq!(
        finished.stdout.matches("would create").count(),
        3,
        "{finished:?}"
    );
    // `init` connects only to the database, so the delivery mode has no effect on it.
    command(&["init", "--no-role"]).expect_code(0);
}
