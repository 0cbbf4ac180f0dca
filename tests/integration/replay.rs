//! `replay` sends rows of the table again, without changing them.

use std::collections::HashSet;

use crate::support::fixture::Fixture;
use crate::support::records::Record;
use crate::support::walpost::Finished;
use crate::support::walpost_role::WalpostRole;

pub(crate) mod already_delivered;
mod entries;
mod records;
mod refused;
mod resume;
mod select;

const REPLAY_HEADER: &str = "walpost-replay";

/// Returns the state and row count of every replay in the journal.
fn journal(fixture: &Fixture) -> Vec<[String; 2]> {
    let rows = fixture.db.rows(
        "SELECT detail ->> 'state', detail ->> 'sent' FROM walpost.journal WHERE action = 'replay' ORDER BY id",
    );
    let text = |text: Option<String>| text.unwrap();
    rows.into_iter()
        .map(|row| <[Option<String>; 2]>::try_from(row).unwrap().map(text))
        .collect()
}

/// Returns the distinct replay IDs found in the records' headers.
fn runs(records: &[Record]) -> HashSet<String> {
    let replayed = records.iter().filter(|record| is_replayed(record));
    replayed
        .map(|r| r.header(REPLAY_HEADER).to_owned())
        .collect()
}

fn is_replayed(record: &Record) -> bool {
    record.header_names().contains(&REPLAY_HEADER)
}

/// Runs a replay that writes to standard output, and returns the keys of the records.
fn keys_to_stdout(fixture: &Fixture, arguments: &[&str]) -> Vec<String> {
    let replay = fixture
        .replay(arguments)
        .args(["--yes", "--sink", "stdout"]);
    keys_of(&replay.finish().expect_code(0))
}

fn keys_of(done: &Finished) -> Vec<String> {
    let lines = done.stdout.lines().filter(|line| line.starts_with('{'));
    lines
        .map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            line["key"].as_str().unwrap().to_owned()
        })
        .collect()
}

/// Creates a role that can write to the journal but is not a superuser.
fn walpost_role<'s>(fixture: &'s Fixture<'s>) -> WalpostRole<'s> {
    WalpostRole::new(fixture, format!("{}_clerk", fixture.name))
}
