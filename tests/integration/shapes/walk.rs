//! The state of a random walk, and the choice of its next step.

use std::collections::{HashMap, HashSet};
use std::env;
use std::path::PathBuf;

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJORS, Server};
use crate::support::walpost::{Finished, Invocation, Walpost, config_file};

use super::definition::{OTHER_TOPIC_PREFIX, PipelineDefinition};
use super::events::{BackgroundWriter, OpenTransaction, WrittenEvent};
use super::evidence::Evidence;
use super::server::{OlderCopy, Servers};

/// The outbox tables that a random walk uses, each in its own schema.
pub(super) const TABLES: [&str; 3] = ["tenant_1.outbox", "tenant_2.outbox", "tenant_3.outbox"];

/// A statement that limits how long a step waits for locks held by the walk's own open
/// transactions.
pub(super) const LOCK_TIMEOUT: &str = "SET lock_timeout = '300ms'";

/// Groups of steps that can be omitted from a walk; see [`super`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum StepGroup {
    Slot,
    Publication,
    Definition,
    Topic,
    Access,
    Server,
}

impl StepGroup {
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
    pub(super) rng: fastrand::Rng,
    pub(super) aggregate: String,
    pub(super) definition: PipelineDefinition,
    pub(super) walpost: Option<(Walpost, PathBuf)>,
    pub(super) open: Vec<OpenTransaction>,
    pub(super) background: BackgroundWriter,
    /// Tables that `walpost init` has accepted.
    pub(super) tables: Vec<&'static str>,
    /// Committed events, by id.
    pub(super) written: HashMap<String, WrittenEvent>,
    /// Events that were discarded when an older copy of the server was restored.
    pub(super) void: HashSet<String>,
    /// How often each event was delivered, by id. Excludes replayed records. Records in a topic are
    /// added by `count_records`, when the topic is deleted or the walk ends.
    pub(super) times: HashMap<String, u32>,
    /// Number of times that LSNs have started over, either on another server or because an older
    /// copy was restored.
    pub(super) era: u32,
    pub(super) evidence: Vec<Evidence>,
    /// Events that may be repeated even in exactly-once mode, for example because they were written
    /// before a checkpoint was adopted.
    pub(super) repeatable: HashSet<String>,
    pub(super) copy: Option<OlderCopy>,
    /// Statements that undo the changes made by [`super::access`].
    pub(super) undo: Vec<String>,
    pub(super) count: u64,
    /// The server's time when the random walk started.
    started_at: String,
    groups: Vec<StepGroup>,
    /// Every step with its result. Printed if the walk fails.
    step_log: Vec<String>,
    /// The log of the last process that exited. Cleared when the remedy in the log is followed.
    pub(super) last_log: String,
    /// Whether the operator skipped events, or accepted the position of a slot that may have passed
    /// undelivered events.
    pub(super) has_given_up: bool,
    /// Whether a process ever stopped delivering without logging a reason.
    pub(super) has_stalled: bool,
}

impl<'s> Walk<'s> {
    pub(super) fn start(servers: &'s Servers, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let major = *rng.choice(&MAJORS).expect("a version");
        let definition = PipelineDefinition::draw(&mut rng);
        let groups = groups(&mut rng);
        let server = servers.add(Server::private(major, ""));
        let fixture = Fixture::bare_on_servers(server, Broker::shared());
        let aggregate = fixture.aggregate(1);
        fixture.topic(&format!("{OTHER_TOPIC_PREFIX}{aggregate}"), 1, &[]);
        fixture.db.run(LOCK_TIMEOUT);
        let started_at = fixture.db.value("SELECT now()").expect("a time");
        let background = BackgroundWriter::start(&fixture, &aggregate, seed);
        let mut walk = Self {
            fixture,
            servers,
            rng,
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
            started_at,
            groups,
            step_log: Vec::new(),
            last_log: String::new(),
            has_given_up: false,
            has_stalled: false,
        };
        walk.prepare();
        walk
    }

    /// Creates the objects that the definition needs. If it has a single table, the table may
    /// contain rows before the slot is created.
    fn prepare(&mut self) {
        if self.definition.is_single() && self.rng.bool() {
            self.create_manually(TABLES[0]);
            self.tables.push(TABLES[0]);
            self.insert_many();
            self.insert_many();
        }
        self.init(&[]);
        self.add_table(TABLES[0]);
        if !self.definition.is_single() {
            self.add_table(TABLES[1]);
        }
        if self.definition.is_single() && self.tables == [TABLES[0]] && self.rng.u32(..3) == 0 {
            self.toggle_tables_during_copy();
        }
        if self.definition.exactly_once && self.rng.bool() {
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

    pub(super) fn has(&self, group: StepGroup) -> bool {
        self.groups.contains(&group)
    }

    pub(super) fn step(&mut self) {
        self.collect_background();
        match self.rng.u32(..60) {
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
            30..=32 if self.has(StepGroup::Slot) => self.change_slot(),
            33 => self.add_child(),
            34 => self.add_column(),
            35 => self.maintain(),
            36 => self.rename(),
            37..=38 => self.toggle_background(),
            39 => self.detach_partition(),
            40..=43 if self.has(StepGroup::Publication) => self.change_publication(),
            44..=47 if self.has(StepGroup::Definition) => self.change_definition(),
            48..=50 if self.has(StepGroup::Topic) => self.change_topic(),
            51..=54 if self.has(StepGroup::Access) => self.change_access(),
            55..=57 if self.has(StepGroup::Server) => self.change_server(),
            _ => self.insert(),
        }
    }

    pub(super) fn log_step(&mut self, step: impl Into<String>) {
        self.step_log.push(step.into());
    }

    pub(super) fn step_log(&self) -> String {
        self.step_log.join("\n")
    }

    /// Returns the time at which the random walk started, for `walpost replay --from`.
    pub(super) fn started_at(&self) -> &str {
        &self.started_at
    }

    /// Runs a statement as the superuser, and returns whether it succeeded. It may fail because an
    /// object is missing or locked.
    pub(super) fn sql(&mut self, sql: &str) -> bool {
        let outcome = self.fixture.db.try_run(sql);
        let text = match &outcome {
            Ok(()) => "done".to_owned(),
            Err(error) => error
                .as_db_error()
                .map_or_else(|| error.to_string(), |error| error.message().to_owned()),
        };
        self.log_step(format!("{sql}: {text}"));
        if outcome.is_err() {
            let _ = self.fixture.db.try_run("ROLLBACK");
        }
        outcome.is_ok()
    }

    /// Writes a configuration file that contains the current definition.
    pub(super) fn file(&self) -> PathBuf {
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\npostgres = \"{}\"\n{}",
            self.fixture.kafka(),
            self.fixture.conninfo_as("walpost"),
            self.definition.settings(&self.fixture.name),
        );
        config_file(text)
    }

    /// Runs a command with a configuration file, and records the events that the command reports as
    /// possibly missing.
    pub(super) fn command(&mut self, words: &[&str], arguments: &[&str]) -> Finished {
        let invocation = Invocation::new(words).arg("--config").arg(self.file());
        let invocation = invocation.args(arguments);
        let finished = invocation.env("WALPOST_LOCK_TIMEOUT", "2s").finish();
        self.log_step(format!(
            "walpost {words:?} {arguments:?}: exit code {:?}\n{}{}",
            finished.code, finished.stdout, finished.stderr
        ));
        self.collect_evidence(&format!("{}\n{}", finished.stdout, finished.stderr));
        finished
    }

    /// Like [`Walk::command`], but connects as a superuser.
    pub(super) fn superuser_command(&mut self, words: &[&str], arguments: &[&str]) -> Finished {
        let conninfo = self.fixture.conninfo();
        let mut all = vec!["--postgres", &conninfo];
        all.extend(arguments);
        self.command(words, &all)
    }

    /// Chooses a table at random among the tables that the definition includes and `init` has
    /// accepted.
    pub(super) fn table(&mut self) -> Option<&'static str> {
        let covered: Vec<_> = self
            .tables
            .iter()
            .filter(|&&table| !self.definition.is_single() || table == TABLES[0])
            .collect();
        self.rng.choice(covered).copied()
    }

    pub(super) fn any_table(&mut self) -> &'static str {
        self.rng.choice(&TABLES).expect("a table")
    }
}

/// Chooses which groups of steps a random walk uses. With fewer groups, a walk repeats each kind of
/// step more often.
fn groups(rng: &mut fastrand::Rng) -> Vec<StepGroup> {
    let without = env::var("WALPOST_SHAPES_WITHOUT").unwrap_or_default();
    let all = [
        StepGroup::Slot,
        StepGroup::Publication,
        StepGroup::Definition,
        StepGroup::Topic,
        StepGroup::Access,
        StepGroup::Server,
    ];
    let drawn = all.into_iter().filter(|_| rng.u32(..5) < 2);
    drawn
        .filter(|group| !without.split(',').any(|name| name == group.name()))
        .collect()
}
