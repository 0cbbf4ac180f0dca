//! The state of a walk, and the choice of its next step.

use std::collections::{HashMap, HashSet};
use std::env;
use std::path::PathBuf;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::walpost::{Finished, Invocation, Walpost, config_file};

use super::definition::{Definition, OTHER_TOPIC};
use super::events::{Background, Open, Written};
use super::evidence::Evidence;
use super::server::{OlderCopy, Servers};

/// Tables of the walk, each in its own schema.
pub(super) const TABLES: [&str; 3] = ["tenant_1.outbox", "tenant_2.outbox", "tenant_3.outbox"];

/// The time for which a step waits for a lock that an open transaction of the walk holds.
pub(super) const LOCK_TIMEOUT: &str = "SET lock_timeout = '300ms'";

/// Groups of steps that [`super`] can leave out.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Group {
    Slot,
    Publication,
    Definition,
    Topic,
    Access,
    Server,
}

impl Group {
    const fn name(self) -> &'static str {
        match self {
            Self::Slot => "slot",
            Self::Publication => "publication",
            Self::Definition => "definition",
            Self::Topic => "topic",
            Self::Access => "access",
            Self::Server => "server",
        }
    }
}

pub(super) struct Walk<'s> {
    pub(super) fixture: Fixture<'s>,
    pub(super) servers: &'s Servers,
    pub(super) dice: fastrand::Rng,
    pub(super) aggregate: String,
    pub(super) definition: Definition,
    pub(super) walpost: Option<(Walpost, PathBuf)>,
    pub(super) open: Vec<Open>,
    pub(super) background: Background,
    /// Tables that `walpost init` has accepted.
    pub(super) tables: Vec<&'static str>,
    /// Committed events by their ids.
    pub(super) written: HashMap<String, Written>,
    /// Events of a history that was discarded by restoring an older copy of the server.
    pub(super) void: HashSet<String>,
    /// The number of records without `walpost-replay` for each id, in topics that have since been
    /// deleted.
    pub(super) times: HashMap<String, u32>,
    /// Incremented when LSNs start over: on another server, or when an older copy is restored.
    pub(super) era: u32,
    pub(super) evidence: Vec<Evidence>,
    /// Events that may be repeated even in exactly-once mode: those written before a checkpoint was
    /// adopted.
    pub(super) repeatable: HashSet<String>,
    pub(super) copy: Option<OlderCopy>,
    /// Statements that undo the changes of [`super::access`].
    pub(super) undo: Vec<String>,
    pub(super) count: u64,
    /// The time when the walk began, as printed by the server.
    began: String,
    groups: Vec<Group>,
    /// Each step with its outcome, printed if the walk fails.
    diary: Vec<String>,
    /// The log of the last process that exited, until its remedy was followed.
    pub(super) last_log: String,
    /// Whether events were skipped, or a slot was accepted that may lack events.
    pub(super) has_given_up: bool,
    /// Whether a process neither delivered nor reported why.
    pub(super) has_stalled: bool,
}

impl<'s> Walk<'s> {
    pub(super) fn start(servers: &'s Servers, seed: u64) -> Self {
        let mut dice = fastrand::Rng::with_seed(seed);
        let major = *dice.choice(&MAJORS).expect("a version");
        let definition = Definition::draw(&mut dice);
        let groups = groups(&mut dice);
        let server = servers.add(Server::private(major, ""));
        let fixture = Fixture::bare_on_servers(server, Broker::shared());
        let aggregate = fixture.aggregate(1);
        fixture.topic(&format!("{OTHER_TOPIC}{aggregate}"), 1, &[]);
        fixture.db.run(LOCK_TIMEOUT);
        let began = fixture.db.value("SELECT now()").expect("a time");
        let background = Background::start(&fixture, &aggregate, seed);
        let mut walk = Self {
            fixture,
            servers,
            dice,
            aggregate,
            definition,
            walpost: None,
            open: Vec::new(),
            background,
            tables: Vec::new(),
            written: HashMap::new(),
            void: HashSet::new(),
            times: HashMap::new(),
            era: 0,
            evidence: Vec::new(),
            repeatable: HashSet::new(),
            copy: None,
            undo: Vec::new(),
            count: 0,
            began,
            groups,
            diary: Vec::new(),
            last_log: String::new(),
            has_given_up: false,
            has_stalled: false,
        };
        walk.prepare();
        walk
    }

    /// Creates what the definition needs. A single table may have rows before the slot exists.
    fn prepare(&mut self) {
        if self.definition.is_single() && self.dice.bool() {
            self.create_by_hand(TABLES[0]);
            self.tables.push(TABLES[0]);
            self.insert_many();
            self.insert_many();
        }
        self.init(&[]);
        self.add_table(TABLES[0]);
        if !self.definition.is_single() {
            self.add_table(TABLES[1]);
        }
        if self.definition.is_single() && self.tables == [TABLES[0]] && self.dice.u32(..3) == 0 {
            self.toggle_tables_during_copy();
        }
        if self.definition.exactly_once && self.dice.bool() {
            self.adopt();
            self.repeatable.clear();
            self.has_given_up = false;
        }
    }

    pub(super) fn describe(&self) -> String {
        let groups: Vec<_> = self.groups.iter().map(|group| group.name()).collect();
        format!(
            "PostgreSQL {}, {}, with steps of {groups:?}",
            self.fixture.server.major, self.definition
        )
    }

    pub(super) fn has(&self, group: Group) -> bool {
        self.groups.contains(&group)
    }

    pub(super) fn step(&mut self) {
        self.collect_background();
        match self.dice.u32(..60) {
            0..=9 => self.insert(),
            10..=11 => self.begin(),
            12..=14 => self.end(),
            15..=20 => self.run(),
            21..=24 => self.settle(),
            25 => self.stop(),
            26 => self.kill(),
            27 => self.init_or_follow_remedy(),
            28 => self.add_any_table(),
            29 => self.insert_many(),
            30..=32 if self.has(Group::Slot) => self.change_slot(),
            33 => self.add_child(),
            34 => self.add_column(),
            35 => self.maintain(),
            36 => self.rename(),
            37..=38 => self.toggle_background(),
            39 => self.detach_partition(),
            40..=43 if self.has(Group::Publication) => self.change_publication(),
            44..=47 if self.has(Group::Definition) => self.change_definition(),
            48..=50 if self.has(Group::Topic) => self.change_topic(),
            51..=54 if self.has(Group::Access) => self.change_access(),
            55..=57 if self.has(Group::Server) => self.change_server(),
            _ => self.insert(),
        }
    }

    pub(super) fn note(&mut self, step: impl Into<String>) {
        self.diary.push(step.into());
    }

    pub(super) fn diary(&self) -> String {
        self.diary.join("\n")
    }

    /// Returns when the walk began, for `walpost replay --from`.
    pub(super) fn began(&self) -> &str {
        &self.began
    }

    /// Runs a statement as the superuser. Returns whether it succeeded: an object may be missing or
    /// locked.
    pub(super) fn sql(&mut self, sql: &str) -> bool {
        let outcome = self.fixture.db.try_run(sql);
        let text = match &outcome {
            Ok(()) => "done".to_owned(),
            Err(error) => error
                .as_db_error()
                .map_or_else(|| error.to_string(), |error| error.message().to_owned()),
        };
        self.note(format!("{sql}: {text}"));
        if outcome.is_err() {
            let _ = self.fixture.db.try_run("ROLLBACK");
        }
        outcome.is_ok()
    }

    /// Writes the configuration file for the current definition.
    pub(super) fn file(&self) -> PathBuf {
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\npostgres = \"{}\"\n{}",
            self.fixture.kafka(),
            self.fixture.conninfo_as("walpost"),
            self.definition.settings(&self.fixture.name),
        );
        config_file(text)
    }

    /// Runs a command with the configuration file, and records the events that it reports as
    /// possibly missing.
    pub(super) fn command(&mut self, words: &[&str], arguments: &[&str]) -> Finished {
        let invocation = Invocation::new(words).arg("--config").arg(self.file());
        let invocation = invocation.args(arguments);
        let finished = invocation.env("WALPOST_LOCK_TIMEOUT", "2s").finish();
        self.note(format!(
            "walpost {words:?} {arguments:?}: exit code {:?}\n{}{}",
            finished.code, finished.stdout, finished.stderr
        ));
        self.collect_evidence(&format!("{}\n{}", finished.stdout, finished.stderr));
        finished
    }

    /// As [`Walk::command`], connected as a superuser.
    pub(super) fn administer(&mut self, words: &[&str], arguments: &[&str]) -> Finished {
        let conninfo = self.fixture.conninfo();
        let mut all = vec!["--postgres", &conninfo];
        all.extend(arguments);
        self.command(words, &all)
    }

    /// Returns a table that the definition covers and that `init` has accepted.
    pub(super) fn table(&mut self) -> Option<&'static str> {
        let covered: Vec<_> = self
            .tables
            .iter()
            .filter(|&&table| !self.definition.is_single() || table == TABLES[0])
            .collect();
        self.dice.choice(covered).copied()
    }

    pub(super) fn any_table(&mut self) -> &'static str {
        self.dice.choice(&TABLES).expect("a table")
    }
}

/// Chooses the groups of steps of a walk. With fewer groups at a time, a walk gets further.
fn groups(dice: &mut fastrand::Rng) -> Vec<Group> {
    let without = env::var("WALPOST_SHAPES_WITHOUT").unwrap_or_default();
    let all = [
        Group::Slot,
        Group::Publication,
        Group::Definition,
        Group::Topic,
        Group::Access,
        Group::Server,
    ];
    let drawn = all.into_iter().filter(|_| dice.u32(..5) < 2);
    drawn
        .filter(|group| !without.split(',').any(|name| name == group.name()))
        .collect()
}
