//! `replay`: rows of the table are sent again, as they were sent at first.

use std::collections::HashSet;

use crate::support::records::Record;
use crate::support::scene::Scene;
use crate::support::session::Session;
use crate::support::walpost::{Finished, Invocation};

mod entries;
mod records;
mod refused;
mod resume;
mod select;

const HEADER: &str = "walpost-replay";

/// What the journal says of replays: state and rows.
fn journal(scene: &Scene) -> Vec<[String; 2]> {
    let rows = scene.db.rows(
        "SELECT detail ->> 'state', detail ->> 'sent' FROM walpost.journal WHERE action = 'replay' ORDER BY id",
    );
    let text = |text: Option<String>| text.unwrap();
    rows.into_iter()
        .map(|row| <[Option<String>; 2]>::try_from(row).unwrap().map(text))
        .collect()
}

/// The ids of runs, of those records that have one.
fn runs(records: &[Record]) -> HashSet<String> {
    let replayed = records.iter().filter(|record| is_replayed(record));
    replayed.map(|r| r.header(HEADER).to_owned()).collect()
}

fn is_replayed(record: &Record) -> bool {
    record.header_names().contains(&HEADER)
}

/// Runs it, and returns the keys of what it sends to standard output.
fn keys_to_stdout(scene: &Scene, arguments: &[&str]) -> Vec<String> {
    let replay = scene.replay(arguments).args(["--yes", "--sink", "stdout"]);
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

/// A role of `walpost init`, which may add to the journal and is no superuser.
struct Clerk<'s> {
    scene: &'s Scene<'static>,
    role: String,
}

impl<'s> Clerk<'s> {
    fn of(scene: &'s Scene<'static>) -> Self {
        let role = format!("{}_clerk", scene.name);
        let init = scene.invoke("init").args(["--role", &role]);
        init.finish().expect_code(0);
        Self { scene, role }
    }

    fn conninfo(&self) -> String {
        let user = format!("user={}", self.role);
        self.scene.conninfo().replace("user=postgres", &user)
    }

    fn replay(&self, arguments: &[&str]) -> Invocation {
        self.scene
            .invoke_as("replay", &self.conninfo())
            .args(["--kafka", &self.scene.broker.address()])
            .args(arguments)
    }

    /// Adds an entry about a replay to the journal.
    fn writes(&self, detail: &serde_json::Value) {
        let session = Session::connect(&self.conninfo()).unwrap();
        session.run(&entry(self.scene, detail));
    }
}

impl Drop for Clerk<'_> {
    fn drop(&mut self) {
        let role = &self.role;
        let drop = format!("DROP OWNED BY \"{role}\"; DROP ROLE \"{role}\"");
        let _ = self.scene.db.try_run(&drop);
    }
}

/// The statement that adds an entry about a replay to the journal.
fn entry(scene: &Scene, detail: &serde_json::Value) -> String {
    let (name, slot) = (&scene.name, scene.slot());
    let detail = detail.to_string().replace('\'', "''");
    format!(
        "INSERT INTO walpost.journal (pipeline, slot, action, detail) VALUES ('{name}', '{slot}', 'replay', '{detail}')"
    )
}
