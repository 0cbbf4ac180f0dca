//! A pipeline's definition changes while older rows are being copied.

use super::*;
use crate::snapshot::{TABLE, expect_all, fixture_with_older_rows, settle, start_and_copy_some};
use crate::support::event::{Event, EventWriter};
use crate::support::postgres::{MAJOR, Server, StopMode};

/// Number of rows, large enough that the copy is still running when the definition changes.
const ROWS: usize = 20_000;

/// Settings with a window so small that the copy takes several seconds.
const SLOW_SETTINGS: &str = "window_records = 20\n";

const ONE_TABLE: &str = "table = 'public.outbox'\n";
const SEVERAL_TABLES: &str = "tables = ['public.outbox', 'tenant_*.outbox']\n";

in_both_modes! {
    adding_tables_during_a_snapshot_neither_loses_nor_repeats_events
    halts_if_settings_change_to_several_tables_during_a_snapshot
    halts_if_settings_change_to_several_tables_before_a_snapshot
}

fn mode(fixture: &Fixture) -> &'static str {
    match fixture.is_exactly_once() {
        true => "delivery = 'exactly-once'\n",
        false => "",
    }
}

/// Starts a process and waits until it is copying a table. Also returns a function that generates
/// the text of the process's configuration file with other settings.
fn process_during_copy<'s>(fixture: &'s Fixture) -> (Process, impl Fn(&str) -> String + 's) {
    let text = |more: &str| head() + &pipeline(fixture, &format!("{}{more}", mode(fixture)));
    let folder = reaper::folder("config");
    replace(
        &folder.join("walpost.toml"),
        &text(&format!("{SLOW_SETTINGS}{ONE_TABLE}")),
    );
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(folder.join("walpost.toml"))
        .start();
    walpost.wait_for_log("copying");
    fixture.wait_for_records(100);
    (Process { folder, walpost }, text)
}

fn adding_tables_during_a_snapshot_neither_loses_nor_repeats_events(exactly_once: bool) {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, ROWS, exactly_once);
    let (mut process, text) = process_during_copy(&fixture);
    replace(&process.file(), &text(SEVERAL_TABLES));
    process.walpost.wait_for_log(
        "will restart with the new definition when the copy of older rows is complete",
    );
    assert!(
        fixture.records().len() < ROWS,
        "the copy must be in progress"
    );
    fixture.insert(&aggregate, "newer");
    process.walpost.wait_for_logs("streaming", 2);
    fixture.insert(&aggregate, "newest");
    settle(&fixture, process.walpost);
    expect_all(&fixture, ROWS + 2, true);
}

/// If Walpost didn't halt, the next run would start streaming at the consistent point, and the
/// remaining older rows would never be delivered.
fn halts_if_settings_change_to_several_tables_during_a_snapshot(exactly_once: bool) {
    let (mut fixture, aggregate) = fixture_with_older_rows(TABLE, ROWS, exactly_once);
    fixture.kill(start_and_copy_some(&fixture));
    let copied = fixture.records().len();
    assert!(copied < ROWS, "the copy must be in progress");
    fixture.use_settings(SEVERAL_TABLES);
    let expected = [
        "the copy of the older rows of table public.outbox is not complete",
        "set table = \"public.outbox\" again",
    ];
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    let to = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    let refused = fixture.skip(&to).arg("--yes").finish().expect_code(3);
    refused.expect_mentions(&["not all rows that are older than slot"]);
    fixture.use_settings(ONE_TABLE);
    let mut walpost = fixture.start();
    walpost.wait_for_log("snapshot delivered");
    settle(&fixture, walpost);
    fixture.use_settings(SEVERAL_TABLES);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newer");
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, exactly_once);
}

/// Found by a random walk of `./dev soak --shapes` with seed 136745726564781. The slot never sends
/// the rows that the table contained when the slot was created, so only the copy can deliver them.
fn halts_if_settings_change_to_several_tables_before_a_snapshot(exactly_once: bool) {
    let (mut fixture, aggregate) = fixture_with_older_rows(TABLE, 20, exactly_once);
    fixture.use_settings(SEVERAL_TABLES);
    fixture.init().finish().expect_code(0);
    fixture.insert(&aggregate, "newer");
    let expected = [
        "the copy of the older rows of table public.outbox is not complete",
        "set table = \"public.outbox\" again",
    ];
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    fixture.use_settings(ONE_TABLE);
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE walpost.outbox_row",
        fixture.slot()
    ));
    let mut walpost = fixture.start();
    walpost.wait_for_log("snapshot delivered");
    settle(&fixture, walpost);
    fixture.use_settings(SEVERAL_TABLES);
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newest");
    settle(&fixture, walpost);
    expect_all(&fixture, 22, exactly_once);
}

#[test]
fn halts_if_a_reload_changes_the_table_before_its_snapshot_has_started() {
    let (mut fixture, _) = fixture_with_older_rows(TABLE, 20, false);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "CREATE TABLE other (LIKE outbox INCLUDING ALL); ALTER PUBLICATION {slot} DROP TABLE outbox;
         ALTER PUBLICATION {slot} ADD TABLE other"
    ));
    fixture.use_settings("table = \"public.other\"\n");
    let expected = ["the copy of the older rows of table public.outbox is not complete"];
    fixture
        .run()
        .finish()
        .expect_code(3)
        .expect_mentions(&expected);
    fixture.use_settings("table = \"public.other\"\nsnapshot = \"never\"\n");
    let mut walpost = fixture.start();
    walpost.wait_for_log("excludes the remaining rows");
    settle(&fixture, walpost);
    fixture.use_settings("table = \"public.other\"\n");
    settle(&fixture, fixture.start());
}

#[test]
fn changing_settings_during_a_snapshot_repeats_no_event() {
    let (fixture, _) = fixture_with_older_rows(TABLE, ROWS, false);
    let (mut process, text) = process_during_copy(&fixture);
    replace(&process.file(), &text("window_records = 30\n"));
    process.walpost.wait_for_log(
        "will restart with the new definition when the copy of older rows is complete",
    );
    assert!(
        fixture.records().len() < ROWS,
        "the copy must be in progress"
    );
    process.walpost.wait_for_logs("streaming", 2);
    settle(&fixture, process.walpost);
    expect_all(&fixture, ROWS, true);
}

/// Instead of waiting for the copy to finish, an operator can apply the change immediately.
#[test]
fn restart_command_does_not_wait_for_the_snapshot_to_finish() {
    let (fixture, _) = fixture_with_older_rows(TABLE, ROWS, false);
    let (mut process, text) = process_during_copy(&fixture);
    replace(&process.file(), &text("window_records = 1000\n"));
    process.walpost.wait_for_log("walpost pipeline restart");
    process
        .pipeline_command(&["restart", &fixture.name])
        .expect_code(0);
    assert!(
        fixture.records().len() < ROWS,
        "the copy must be in progress"
    );
    process.walpost.wait_for_log("was not completed");
    process.walpost.wait_for_log("snapshot delivered");
    settle(&fixture, process.walpost);
    expect_all(&fixture, ROWS, false);
}

#[test]
fn renaming_a_pipeline_during_a_snapshot_loses_no_event() {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, ROWS, false);
    fixture.kill(start_and_copy_some(&fixture));
    let mut walpost = renamed(&fixture).start();
    walpost.wait_for_log("was not completed");
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "newer");
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, false);
}

/// Found by a random walk of `./dev soak --shapes` with seed 16225804307676. The server had already
/// sent events to the interrupted run, and `init` must detect that a copy had started.
#[test]
fn init_for_a_renamed_pipeline_does_not_end_its_snapshot() {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, ROWS, false);
    let walpost = start_and_copy_some(&fixture);
    fixture.insert(&aggregate, "newer");
    wait_until("the server to have sent the event", || {
        let slot = fixture.slot();
        fixture.db.is_true(&format!(
            "SELECT total_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = '{slot}'"
        ))
    });
    fixture.kill(walpost);
    let init = run_under_another_name(&fixture, "init").arg("--no-role");
    init.finish().expect_code(0);
    let mut walpost = renamed(&fixture).start();
    walpost.wait_for_log("was not completed");
    walpost.wait_for_log("streaming");
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, false);
}

/// Returns a command that runs the pipeline under a different name, with its existing slot and
/// publication.
fn renamed(fixture: &Fixture) -> Invocation {
    run_under_another_name(fixture, "run").args(["--kafka", fixture.kafka()])
}

fn run_under_another_name(fixture: &Fixture, command: &str) -> Invocation {
    let slot = fixture.slot();
    Invocation::new([command, "--postgres", &fixture.conninfo()])
        .args(["--pipeline", &format!("{}_renamed", fixture.name)])
        .args(["--slot", &slot, "--publication", &slot])
}

/// A crash discards the server's statistics, and the journal has entries only under the old name,
/// so neither shows that the slot was read before.
#[test]
fn renamed_pipeline_redelivers_nothing_after_a_server_crash() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    fixture
        .start_and_confirm_one(&aggregate, "k")
        .terminate()
        .expect_code(0);
    // Imitate a version of Walpost that recorded nothing for an empty table.
    fixture.db.run("TRUNCATE walpost.journal");
    server.stop(StopMode::Immediate);
    server.start();
    fixture.reconnect();
    let walpost = renamed(&fixture).start_streaming();
    fixture.insert(&aggregate, "newer");
    fixture.wait_until_confirmed();
    // The crash also moved the slot's confirmed position back, so the first event may be resent,
    // but the table must not be copied.
    assert_eq!(walpost.logged("snapshot started"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
    expect_all(&fixture, 2, false);
}

/// The journal records which events the dropped slot had not delivered. These events include the
/// older rows that had not been copied yet.
#[test]
fn replays_rows_left_uncopied_when_the_slot_is_recreated_during_a_snapshot() {
    let (fixture, aggregate) = fixture_with_older_rows(TABLE, ROWS, false);
    fixture.kill(start_and_copy_some(&fixture));
    assert!(
        fixture.records().len() < ROWS,
        "the copy must be in progress"
    );
    fixture.drop_slot();
    let init = fixture.init().finish().expect_code(0);
    init.expect_mentions(&["may be missing", "walpost replay --dropped-slots"]);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newer");
    let replay = fixture.replay(&["--dropped-slots", "--yes"]);
    replay.finish().expect_code(0);
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, false);
}

/// Another table replaces the only table of a pipeline: existing rows of the new table are not
/// delivered, and Walpost logs a warning.
#[test]
fn delivers_new_rows_of_a_replacement_table_and_logs_a_warning() {
    let (mut fixture, aggregate) = fixture_with_older_rows(TABLE, 10, false);
    settle(&fixture, fixture.start());
    let publication = fixture.slot();
    fixture
        .db
        .run("CREATE TABLE other (LIKE outbox INCLUDING ALL)");
    let writer = EventWriter::Table("public.other".to_owned());
    let insert = |key: &str| writer.insert_one(Event::new(&aggregate, key, "{}"));
    fixture.db.run(&insert("older"));
    let set = format!("ALTER PUBLICATION {publication} SET TABLE other");
    fixture.db.run(&set);
    fixture.use_settings("table = 'public.other'\n");
    let mut walpost = fixture.run().start();
    let line = walpost.wait_for_log("previously used for table public.outbox");
    assert!(line.contains("walpost replay"), "{line}");
    walpost.wait_for_log("streaming");
    fixture.db.run(&insert("newer"));
    fixture.wait_for_records(11);
    walpost.terminate().expect_code(0);
    let mut walpost = fixture.start();
    walpost.wait_for_log("streaming");
    assert_eq!(walpost.logged("previously used for table public.outbox"), 0);
    walpost.terminate().expect_code(0);
}
