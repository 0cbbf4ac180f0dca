//! The shape of things changes at random while events are written: `./dev soak --shapes`.
//!
//! A walk draws its steps from a seed. Tables, publications and slots are created, changed, dropped and swapped, settings are
//! replaced, and Walpost is started, stopped and killed in between. At the end, every committed event has to be delivered, or be named
//! by something that an operator reads: a halt, the journal, or a finding of `check`. With exactly-once, none is delivered twice.

use std::collections::HashMap;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::support::checker::Committed;
use crate::support::event::{Event, Writer};
use crate::support::kafka::Broker;
use crate::support::load::seed;
use crate::support::postgres::{MAJORS, Server};
use crate::support::process::try_signal;
use crate::support::scene::Scene;
use crate::support::session::Session;
use crate::support::wait::poll_until;
use crate::support::walpost::{Finished, Invocation, Walpost};

/// Tables of the walk, each in a schema of its own.
const TABLES: [&str; 3] = ["tenant_1.outbox", "tenant_2.outbox", "tenant_3.outbox"];

/// Settings with all tables, and with the first one alone.
const SEVERAL: &str = "tables = [\"tenant_*.outbox\"]\n";
const SINGLE: &str = "table = \"tenant_1.outbox\"\n";

/// How long Walpost may take to deliver what is left, or to halt, after the last step.
const RECOVERY: Duration = Duration::from_secs(90);

/// How long a step waits for a lock that an open transaction of the walk has.
const LOCK_TIMEOUT: &str = "SET lock_timeout = '300ms'";

#[test]
#[ignore = "lasts as long as it is told: ./dev soak --shapes --minutes N"]
fn walk() {
    let minutes = env::var("WALPOST_SOAK_MINUTES").map_or(10, |text| text.parse().unwrap());
    let until = Instant::now() + Duration::from_secs(60 * minutes);
    let first = seed();
    let (mut walks, mut events, mut named) = (0, 0, 0);
    while Instant::now() < until {
        let verdict = walk_once(first.wrapping_add(walks), 60);
        walks += 1;
        events += verdict.committed;
        named += verdict.named;
    }
    eprintln!(
        "{walks} walks: {events} events were committed; {named} of them were not delivered, and are named"
    );
}

#[test]
fn short_walks_lose_nothing_silently() {
    for seed in [1, 2] {
        walk_once(seed, 25);
    }
}

/// What became of the events of a walk.
struct Verdict {
    committed: u64,
    /// Not delivered, and named by something that an operator reads.
    named: u64,
}

fn walk_once(seed: u64, steps: usize) -> Verdict {
    let mut dice = fastrand::Rng::with_seed(seed);
    let major = *dice.choice(&MAJORS).expect("a version");
    let exactly_once = dice.bool();
    let server = Server::private(major, "");
    let mut walk = Walk::start(&server, exactly_once, dice);
    eprintln!("walk {seed}: PostgreSQL {major}, exactly-once: {exactly_once}");
    for _ in 0..steps {
        walk.step();
    }
    walk.judge(seed)
}

/// An event of which the walk wants to know what became.
struct Written {
    table: &'static str,
}

/// A transaction that is committed or rolled back by a later step.
struct Open {
    session: Session,
    events: Vec<(String, Written)>,
}

struct Walk<'s> {
    scene: Scene<'s>,
    dice: fastrand::Rng,
    aggregate: String,
    settings: &'static str,
    walpost: Option<(Walpost, PathBuf)>,
    open: Vec<Open>,
    /// Tables that `walpost init` has accepted and that exist.
    tables: Vec<&'static str>,
    /// Committed events by their ids.
    written: HashMap<String, Written>,
    /// Each step with its outcome, for a reader of a failure.
    diary: Vec<String>,
    /// What every Walpost of the walk has logged.
    logs: String,
    count: u64,
}

impl<'s> Walk<'s> {
    fn start(server: &'s Server, exactly_once: bool, dice: fastrand::Rng) -> Self {
        let mut scene = Scene::bare_on(server, Broker::shared()).in_mode(exactly_once);
        scene.write_to(Writer::Tables {
            like: "tenant%".to_owned(),
            tables: TABLES.map(str::to_owned).to_vec(),
        });
        scene.use_settings(SEVERAL);
        let aggregate = scene.aggregate(1);
        scene.db.run(LOCK_TIMEOUT);
        let mut walk = Self {
            scene,
            dice,
            aggregate,
            settings: SEVERAL,
            walpost: None,
            open: Vec::new(),
            tables: Vec::new(),
            written: HashMap::new(),
            diary: Vec::new(),
            logs: String::new(),
            count: 0,
        };
        walk.init(&[]);
        walk.add_table(TABLES[0]);
        walk.add_table(TABLES[1]);
        walk
    }

    fn step(&mut self) {
        match self.dice.u32(..40) {
            0..=9 => self.insert(),
            10..=11 => self.begin(),
            12..=14 => self.end(),
            15..=19 => self.run(),
            20..=22 => self.settle(),
            23 => self.stop(),
            24 => self.kill(),
            25 => {
                self.init(&[]);
            }
            26 => {
                let table = *self.dice.choice(&TABLES).expect("a table");
                self.add_table(table);
            }
            27 => self.drop_from_publication(),
            28..=29 => self.add_to_publication(),
            30 => self.swap_table(),
            31 => self.drop_slot(),
            32 => self.make_slot(),
            33 => self.move_slot(),
            34 => self.add_child(),
            35 => self.add_column(),
            36..=37 => self.change_settings(),
            38 => self.maintain(),
            _ => self.rename(),
        }
    }

    fn note(&mut self, step: impl Into<String>) {
        let step = step.into();
        self.diary.push(step);
    }

    /// Runs a statement as the superuser, and says whether it succeeded: a lock can be taken, or an object be there or not.
    fn sql(&mut self, sql: &str) -> bool {
        let outcome = self.scene.db.try_run(sql);
        let text = match &outcome {
            Ok(()) => "done".to_owned(),
            Err(error) => error
                .as_db_error()
                .map_or_else(|| error.to_string(), |error| error.message().to_owned()),
        };
        self.note(format!("{sql}: {text}"));
        outcome.is_ok()
    }

    fn command(&mut self, what: &str, invocation: Invocation) -> Finished {
        let finished = invocation.env("WALPOST_LOCK_TIMEOUT", "2s").finish();
        self.note(format!(
            "walpost {what}: exit code {:?}\n{}{}",
            finished.code, finished.stdout, finished.stderr
        ));
        finished
    }

    /// A table that the settings cover and that `init` has accepted.
    fn table(&mut self) -> Option<&'static str> {
        let covered: Vec<_> = self
            .tables
            .iter()
            .filter(|&&table| self.settings == SEVERAL || table == TABLES[0])
            .collect();
        self.dice.choice(covered).copied()
    }

    /// Statements that write events to a table, with their ids.
    fn events(&mut self, table: &'static str) -> (String, Vec<(String, Written)>) {
        let writer = Writer::Table(table.to_owned());
        let mut sql = String::new();
        let mut events = Vec::new();
        for _ in 0..self.dice.u32(1..4) {
            self.count += 1;
            let id = format!("00000000-0000-4000-8000-{:012}", self.count);
            sql.push_str(&writer.one(Event {
                id: Some(&id),
                ..Event::new(&self.aggregate, "k", "{}")
            }));
            events.push((id, Written { table }));
        }
        (sql, events)
    }

    fn insert(&mut self) {
        let Some(table) = self.table() else { return };
        let (sql, events) = self.events(table);
        if self.sql(&format!("BEGIN; {sql} COMMIT")) {
            self.written.extend(events);
        } else {
            let _ = self.scene.db.try_run("ROLLBACK");
        }
    }

    fn begin(&mut self) {
        let Some(table) = self.table() else { return };
        let (sql, events) = self.events(table);
        let session = self.scene.server.session(&self.scene.name);
        session.run(LOCK_TIMEOUT);
        let opened = session.try_run(&format!("BEGIN; {sql}")).is_ok();
        self.note(format!("another session: BEGIN; {sql}: {opened}"));
        if opened {
            self.open.push(Open { session, events });
        }
    }

    fn end(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let index = self.dice.usize(..self.open.len());
        let Open { session, events } = self.open.remove(index);
        let commits = self.dice.u32(..4) > 0;
        let end = if commits { "COMMIT" } else { "ROLLBACK" };
        let ended = session.try_run(end).is_ok();
        let ids: Vec<_> = events.iter().map(|(id, _)| id.as_str()).collect();
        let text = format!("another session: {end} of {ids:?}: {ended}");
        self.diary.push(text);
        if commits && ended {
            self.written.extend(events);
        }
    }

    fn run(&mut self) {
        self.look_after();
        if self.walpost.is_some() {
            return;
        }
        let file = self.scene.file(self.settings);
        let mode = self.scene.is_exactly_once().then_some("--exactly-once");
        let init: &[&str] = match self.dice.u32(..4) {
            0 => &["--init"],
            _ => &[],
        };
        let run = Invocation::new(["run", "--config"]).arg(&file);
        let walpost = run
            .args(mode)
            .args(init)
            .env("WALPOST_LOCK_TIMEOUT", "2s")
            .start();
        self.note(format!("walpost run {init:?}"));
        self.walpost = Some((walpost, file));
    }

    /// Keeps the log of a Walpost that has ended by itself.
    fn look_after(&mut self) {
        if let Some((walpost, _)) = &mut self.walpost
            && !walpost.is_running()
            && let Some((walpost, _)) = self.walpost.take()
        {
            self.ended("it ended by itself", &walpost.finish());
        }
    }

    fn ended(&mut self, how: &str, finished: &Finished) {
        self.note(format!(
            "walpost run: {how}: {:?}\n{}",
            finished.code, finished.stderr
        ));
        self.logs.push_str(&finished.stderr);
    }

    fn stop(&mut self) {
        self.look_after();
        if let Some((walpost, _)) = self.walpost.take() {
            self.ended("stopped", &walpost.terminate());
        }
    }

    fn kill(&mut self) {
        self.look_after();
        if let Some((walpost, _)) = self.walpost.take() {
            self.ended("killed", &walpost.kill());
        }
    }

    /// Gives Walpost some time to confirm what is committed.
    fn settle(&mut self) {
        let is_there = self.has_confirmed(Duration::from_secs(4));
        self.note(format!("waited for Walpost: confirmed: {is_there}"));
    }

    fn has_confirmed(&mut self, within: Duration) -> bool {
        let slot = self.scene.slot();
        let goal = self.scene.wal_position();
        let sql = format!(
            "SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{slot}' AND confirmed_flush_lsn - '0/0' >= {goal})"
        );
        poll_until(within, || {
            self.look_after();
            (self.walpost.is_none() || self.scene.db.is_true(&sql)).then_some(())
        });
        self.scene.db.is_true(&sql)
    }

    fn init(&mut self, arguments: &[&str]) -> bool {
        let init = self.scene.init().args(arguments);
        self.command(&format!("init {arguments:?}"), init).code == Some(0)
    }

    /// Makes the table if it is missing, and has `walpost init` publish it.
    fn add_table(&mut self, table: &'static str) {
        if self.settings == SINGLE {
            return;
        }
        let (schema, _) = table.split_once('.').expect("a schema");
        self.sql(&format!("CREATE SCHEMA IF NOT EXISTS {schema}"));
        if self.init(&["--table", table]) && !self.tables.contains(&table) {
            self.tables.push(table);
        }
    }

    fn alter_publication(&mut self, word: &str) {
        let publication = self.scene.slot();
        let table = *self.dice.choice(&TABLES).expect("a table");
        self.sql(&format!(
            "ALTER PUBLICATION {publication} {word} TABLE {table}"
        ));
    }

    fn drop_from_publication(&mut self) {
        self.alter_publication("DROP");
    }

    fn add_to_publication(&mut self) {
        self.alter_publication("ADD");
    }

    /// Puts a new table with the same name in the place of one, as a migration does, and publishes it again or not.
    fn swap_table(&mut self) {
        let table = *self.dice.choice(&TABLES).expect("a table");
        let publication = self.scene.slot();
        let publish = match self.dice.bool() {
            true => format!("ALTER PUBLICATION {publication} ADD TABLE {table};"),
            false => String::new(),
        };
        let Some((schema, name)) = table.split_once('.') else {
            return;
        };
        self.sql(&format!(
            "BEGIN; ALTER TABLE {table} RENAME TO old_{0}; CREATE TABLE {schema}.{name} (LIKE {schema}.old_{0} INCLUDING ALL);
             {publish} COMMIT",
            self.count
        ));
        let _ = self.scene.db.try_run("ROLLBACK");
    }

    fn drop_slot(&mut self) {
        let slot = self.scene.slot();
        if self.dice.bool() {
            self.scene.end_walsender();
        }
        self.sql(&format!("SELECT pg_drop_replication_slot('{slot}')"));
    }

    /// Open transactions would have to end first.
    fn make_slot(&mut self) {
        if self.open.is_empty() {
            let slot = self.scene.slot();
            self.sql(&format!(
                "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
            ));
        }
    }

    fn move_slot(&mut self) {
        let slot = self.scene.slot();
        self.sql(&format!(
            "SELECT pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
        ));
    }

    /// A table that inherits: SELECT from its parent has its rows.
    fn add_child(&mut self) {
        let Some(table) = self.table() else { return };
        let number = self.count;
        let child = format!("{table}_child_{number}");
        let (sql, events) = self.events(table);
        let sql = sql.replace(table, &child);
        let made = self.sql(&format!("CREATE TABLE {child} () INHERITS ({table})"));
        if made && self.sql(&sql) {
            self.written.extend(events);
        }
    }

    fn add_column(&mut self) {
        let table = *self.dice.choice(&TABLES).expect("a table");
        let number = self.count;
        self.sql(&format!(
            "ALTER TABLE {table} ADD note_{number} text DEFAULT 'n'"
        ));
    }

    /// From one table to several and back, in the running process or before the next start.
    fn change_settings(&mut self) {
        self.settings = match self.settings {
            SEVERAL => SINGLE,
            _ => SEVERAL,
        };
        self.scene.use_settings(self.settings);
        self.look_after();
        if let Some((walpost, file)) = &mut self.walpost {
            // A process that has just started does not know the signal.
            poll_until(RECOVERY, || {
                (!walpost.log().is_empty() || !walpost.is_running()).then_some(())
            });
            fs::copy(self.scene.file(self.settings), file).expect("the file");
            try_signal(walpost.process_id(), "HUP");
        }
        self.note(format!("settings: {}", self.settings.trim_end()));
    }

    fn maintain(&mut self) {
        let maintain = self.scene.invoke("maintain");
        let maintain = maintain.args(["--retention=1s", "--delete-rows"]);
        self.command("maintain", maintain);
    }

    fn rename(&mut self) {
        let table = *self.dice.choice(&TABLES).expect("a table");
        let (schema, name) = table.split_once('.').expect("a schema");
        let new = format!("renamed_{}", self.count);
        if self.sql(&format!("ALTER TABLE {table} RENAME TO {new}")) {
            self.insert();
            self.sql(&format!("ALTER TABLE {schema}.{new} RENAME TO {name}"));
        }
    }

    /// Does what an operator does at the end of a day, and compares.
    fn judge(mut self, seed: u64) -> Verdict {
        while !self.open.is_empty() {
            self.end();
        }
        self.settings = SEVERAL;
        self.scene.use_settings(SEVERAL);
        self.stop();
        self.init(&[]);
        self.run();
        let all_is_confirmed = self.has_confirmed(RECOVERY);
        let check = self.scene.check();
        let check = self.command("check", check);
        self.stop();
        let records = self.scene.records();
        let mut times: HashMap<&str, u32> = HashMap::new();
        for record in &records {
            let is_replay = record.header_names().contains(&"walpost-replay");
            *times.entry(record.header("id")).or_default() += u32::from(!is_replay);
        }
        let history = self.scene.history();
        let mut wrong = Vec::new();
        let mut named = 0;
        for event in &history {
            let Some(written) = self.written.get(&event.id) else {
                continue;
            };
            match times.get(event.id.as_str()) {
                None if self.is_named(event, written, all_is_confirmed, &check) => named += 1,
                None => wrong.push(format!(
                    "event {} of {} at {:X} is lost, and nothing names it",
                    event.id, written.table, event.end
                )),
                Some(&times) if times > 1 && self.scene.is_exactly_once() => wrong.push(format!(
                    "event {} of {} at {:X} was delivered {times} times",
                    event.id, written.table, event.end
                )),
                Some(_) => {}
            }
        }
        assert!(
            wrong.is_empty(),
            "WALPOST_TEST_SEED={seed}\n{}\n{}",
            self.diary.join("\n"),
            wrong.join("\n")
        );
        Verdict {
            committed: self.written.len() as u64,
            named,
        }
    }

    /// Whether something says that the event is missing: the reason of a halt, an entry of the journal, or a finding of `check`.
    fn is_named(
        &self,
        event: &Committed,
        written: &Written,
        all_is_confirmed: bool,
        check: &Finished,
    ) -> bool {
        if !all_is_confirmed && event.end > self.confirmed_at_most() {
            return true;
        }
        let journal = self.scene.db.is_true(&format!(
            "SELECT EXISTS (SELECT FROM walpost.journal WHERE action IN ('drop slot', 'skip', 'set aside')
                 AND coalesce(from_lsn - '0/0', 0) <= {0} AND coalesce(to_lsn - '0/0', {0}) >= {0})",
            event.end
        ));
        let mut findings = check.stdout.lines().filter(|line| !line.starts_with("ok"));
        journal || findings.any(|line| line.contains(written.table))
    }

    /// What the slot has confirmed; nothing if it is missing.
    fn confirmed_at_most(&self) -> u64 {
        let slot = self.scene.slot();
        let confirmed = self.scene.db.value(&format!(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = '{slot}'"
        ));
        confirmed.map_or(0, |lsn| lsn.parse().expect("a number"))
    }
}
