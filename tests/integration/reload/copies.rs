//! A definition that changes while older rows are being copied.

use super::*;
use crate::snapshot::{TABLE, expect_all, filled, settle, start_and_copy_some};
use crate::support::event::{Event, Writer};
use crate::support::postgres::{MAJOR, Server, Stop};

/// Enough rows that the copy is still running when the definition changes.
const ROWS: usize = 20_000;

/// With this window the copy takes seconds.
const SLOW: &str = "window_records = 20\n";

const ONE: &str = "table = 'public.outbox'\n";
const SEVERAL: &str = "tables = ['public.outbox', 'tenant_*.outbox']\n";

in_both_modes! {
    table_that_becomes_one_of_several_amid_its_copy_loses_and_repeats_nothing
    copy_of_a_table_that_the_definition_no_longer_has_halts_until_it_is_completed
    table_that_becomes_one_of_several_before_its_copy_has_begun_halts_until_it_is_copied
}

fn mode(fixture: &Fixture) -> &'static str {
    match fixture.is_exactly_once() {
        true => "delivery = 'exactly-once'\n",
        false => "",
    }
}

/// Starts a process that is copying a table; also returns a function for the text of its file with
/// other settings.
fn process_amid_copy<'s>(fixture: &'s Fixture) -> (Process, impl Fn(&str) -> String + 's) {
    let text = |more: &str| head() + &pipeline(fixture, &format!("{}{more}", mode(fixture)));
    let folder = reaper::folder("config");
    replace(&folder.join("walpost.toml"), &text(&format!("{SLOW}{ONE}")));
    let mut walpost = Invocation::new(["run", "--config"])
        .arg(folder.join("walpost.toml"))
        .start();
    walpost.wait_for_log("copying");
    fixture.wait_for_records(100);
    (Process { folder, walpost }, text)
}

fn table_that_becomes_one_of_several_amid_its_copy_loses_and_repeats_nothing(exactly_once: bool) {
    let (fixture, aggregate) = filled(TABLE, ROWS, exactly_once);
    let (mut process, text) = process_amid_copy(&fixture);
    replace(&process.file(), &text(SEVERAL));
    process
        .walpost
        .wait_for_log("restarts with the new definition when the copy of older rows is complete");
    assert!(
        fixture.records().len() < ROWS,
        "the copy has to be under way"
    );
    fixture.insert(&aggregate, "newer");
    process.walpost.wait_for_logs("streaming", 2);
    fixture.insert(&aggregate, "newest");
    settle(&fixture, process.walpost);
    expect_all(&fixture, ROWS + 2, true);
}

/// Without this halt, the next start would stream from the consistent point on, and the rest of the
/// copy would never be delivered.
fn copy_of_a_table_that_the_definition_no_longer_has_halts_until_it_is_completed(
    exactly_once: bool,
) {
    let (mut fixture, aggregate) = filled(TABLE, ROWS, exactly_once);
    fixture.kill(start_and_copy_some(&fixture));
    let copied = fixture.records().len();
    assert!(copied < ROWS, "the copy has to be under way");
    fixture.use_settings(SEVERAL);
    let says = [
        "the copy of the older rows of table public.outbox is not complete",
        "set table = \"public.outbox\" again",
    ];
    fixture.run().finish().expect_code(3).expect_mentions(&says);
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&says);
    let to = fixture
        .db
        .value("SELECT pg_current_wal_flush_lsn()")
        .unwrap();
    let refused = fixture.skip(&to).arg("--yes").finish().expect_code(3);
    refused.expect_mentions(&["not all rows that are older than slot"]);
    fixture.use_settings(ONE);
    let mut walpost = fixture.start();
    walpost.wait_for_log("snapshot delivered");
    settle(&fixture, walpost);
    fixture.use_settings(SEVERAL);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newer");
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, exactly_once);
}

/// Found by a walk of `./dev soak --shapes` with seed 136745726564781. The slot's stream contains
/// none of the rows that the table had when the slot was created.
fn table_that_becomes_one_of_several_before_its_copy_has_begun_halts_until_it_is_copied(
    exactly_once: bool,
) {
    let (mut fixture, aggregate) = filled(TABLE, 20, exactly_once);
    fixture.use_settings(SEVERAL);
    fixture.init().finish().expect_code(0);
    fixture.insert(&aggregate, "newer");
    let says = [
        "the copy of the older rows of table public.outbox is not complete",
        "set table = \"public.outbox\" again",
    ];
    fixture
        .check()
        .finish()
        .expect_code(3)
        .expect_mentions(&says);
    fixture.run().finish().expect_code(3).expect_mentions(&says);
    fixture.use_settings(ONE);
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE walpost.outbox_row",
        fixture.slot()
    ));
    let mut walpost = fixture.start();
    walpost.wait_for_log("snapshot delivered");
    settle(&fixture, walpost);
    fixture.use_settings(SEVERAL);
    fixture.init().finish().expect_code(0);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "newest");
    settle(&fixture, walpost);
    expect_all(&fixture, 22, exactly_once);
}

#[test]
fn table_whose_copy_has_not_begun_halts_a_definition_that_names_another_one() {
    let (mut fixture, _) = filled(TABLE, 20, false);
    let slot = fixture.slot();
    fixture.db.run(&format!(
        "CREATE TABLE other (LIKE outbox INCLUDING ALL); ALTER PUBLICATION {slot} DROP TABLE outbox;
         ALTER PUBLICATION {slot} ADD TABLE other"
    ));
    fixture.use_settings("table = \"public.other\"\n");
    let says = ["the copy of the older rows of table public.outbox is not complete"];
    fixture.run().finish().expect_code(3).expect_mentions(&says);
    fixture.use_settings("table = \"public.other\"\nsnapshot = \"never\"\n");
    let mut walpost = fixture.start();
    walpost.wait_for_log("leaves out the rest");
    settle(&fixture, walpost);
    fixture.use_settings("table = \"public.other\"\n");
    settle(&fixture, fixture.start());
}

#[test]
fn settings_that_change_amid_a_copy_repeat_nothing() {
    let (fixture, _) = filled(TABLE, ROWS, false);
    let (mut process, text) = process_amid_copy(&fixture);
    replace(&process.file(), &text("window_records = 30\n"));
    process
        .walpost
        .wait_for_log("restarts with the new definition when the copy of older rows is complete");
    assert!(
        fixture.records().len() < ROWS,
        "the copy has to be under way"
    );
    process.walpost.wait_for_logs("streaming", 2);
    settle(&fixture, process.walpost);
    expect_all(&fixture, ROWS, true);
}

/// An operator can apply the change immediately.
#[test]
fn restart_does_not_wait_for_the_copy() {
    let (fixture, _) = filled(TABLE, ROWS, false);
    let (mut process, text) = process_amid_copy(&fixture);
    replace(&process.file(), &text("window_records = 1000\n"));
    process.walpost.wait_for_log("walpost pipeline restart");
    process.ask(&["restart", &fixture.name]).expect_code(0);
    assert!(
        fixture.records().len() < ROWS,
        "the copy has to be under way"
    );
    process.walpost.wait_for_log("was not completed");
    process.walpost.wait_for_log("snapshot delivered");
    settle(&fixture, process.walpost);
    expect_all(&fixture, ROWS, false);
}

#[test]
fn copy_under_another_name_of_the_pipeline_loses_nothing() {
    let (fixture, aggregate) = filled(TABLE, ROWS, false);
    fixture.kill(start_and_copy_some(&fixture));
    let mut walpost = renamed(&fixture).start();
    walpost.wait_for_log("was not completed");
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "newer");
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, false);
}

/// Found by a walk of `./dev soak --shapes` with seed 16225804307676. The server has sent events to
/// the start that was interrupted, so `init` has to know that their copy was begun.
#[test]
fn init_under_another_name_of_the_pipeline_does_not_end_its_copy() {
    let (fixture, aggregate) = filled(TABLE, ROWS, false);
    let walpost = start_and_copy_some(&fixture);
    fixture.insert(&aggregate, "newer");
    wait_until("the server to have sent the event", || {
        let slot = fixture.slot();
        fixture.db.is_true(&format!(
            "SELECT total_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = '{slot}'"
        ))
    });
    fixture.kill(walpost);
    let init = under_another_name(&fixture, "init").arg("--no-role");
    init.finish().expect_code(0);
    let mut walpost = renamed(&fixture).start();
    walpost.wait_for_log("was not completed");
    walpost.wait_for_log("streaming");
    settle(&fixture, walpost);
    expect_all(&fixture, ROWS + 1, false);
}

/// Runs the pipeline under another name, with its existing slot and publication.
fn renamed(fixture: &Fixture) -> Invocation {
    under_another_name(fixture, "run").args(["--kafka", fixture.kafka()])
}

fn under_another_name(fixture: &Fixture, command: &str) -> Invocation {
    let slot = fixture.slot();
    Invocation::new([command, "--postgres", &fixture.conninfo()])
        .args(["--pipeline", &format!("{}_renamed", fixture.name)])
        .args(["--slot", &slot, "--publication", &slot])
}

/// A crash discards the server's statistics, and the journal only has entries under the other name.
#[test]
fn renamed_pipeline_delivers_nothing_again_after_the_server_has_crashed() {
    let server = Server::private(MAJOR, "");
    let mut fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    fixture
        .start_and_confirm_one(&aggregate, "k")
        .terminate()
        .expect_code(0);
    // As left by a version that recorded nothing for an empty table.
    fixture.db.run("TRUNCATE walpost.journal");
    server.stop(Stop::Immediate);
    server.start();
    fixture.reconnect();
    let walpost = renamed(&fixture).start_streaming();
    fixture.insert(&aggregate, "newer");
    fixture.wait_until_confirmed();
    // The crash also reset what the slot had confirmed, so the stream may send the first event
    // again, but the table is not copied.
    assert_eq!(walpost.logged("snapshot started"), 0, "{}", walpost.log());
    walpost.terminate().expect_code(0);
    expect_all(&fixture, 2, false);
}

/// The journal records the events that the earlier slot had not delivered, which include the rest
/// of the copy.
#[test]
fn slot_re_created_during_a_copy_has_the_rows_replayed() {
    let (fixture, aggregate) = filled(TABLE, ROWS, false);
    fixture.kill(start_and_copy_some(&fixture));
    assert!(
        fixture.records().len() < ROWS,
        "the copy has to be under way"
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

/// Another table replaces the only one: its existing rows are not delivered, and that is logged.
#[test]
fn table_that_takes_the_place_of_another_is_delivered_from_then_on_with_a_warning() {
    let (mut fixture, aggregate) = filled(TABLE, 10, false);
    settle(&fixture, fixture.start());
    let publication = fixture.slot();
    fixture
        .db
        .run("CREATE TABLE other (LIKE outbox INCLUDING ALL)");
    let writer = Writer::Table("public.other".to_owned());
    let insert = |key: &str| writer.insert_one(Event::new(&aggregate, key, "{}"));
    fixture.db.run(&insert("older"));
    let set = format!("ALTER PUBLICATION {publication} SET TABLE other");
    fixture.db.run(&set);
    fixture.use_settings("table = 'public.other'\n");
    let mut walpost = fixture.run().start();
    let line = walpost.wait_for_log("delivered table public.outbox before");
    assert!(line.contains("walpost replay"), "{line}");
    walpost.wait_for_log("streaming");
    fixture.db.run(&insert("newer"));
    fixture.wait_for_records(11);
    walpost.terminate().expect_code(0);
    let mut walpost = fixture.start();
    walpost.wait_for_log("streaming");
    assert_eq!(walpost.logged("delivered table public.outbox before"), 0);
    walpost.terminate().expect_code(0);
}
