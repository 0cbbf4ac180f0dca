//! A test's own database, topics and pipeline on a server and a broker.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::checker::{self, Committed, Death, Delivered, Resends, Summary};
use super::event::{Event, Outbox, Writer};
use super::kafka::Broker;
use super::load::{Load, Profile};
use super::oracle::Oracle;
use super::postgres::{MAJOR, Server};
use super::proxy::Proxy;
use super::reaper;
use super::records::Record;
use super::secrets::PAYLOAD_MARK;
use super::session::Session;
use super::wait::{PATIENCE, poll_until, wait_until};
use super::walpost::{Invocation, Walpost};

/// Everything one test works with. The database and its slots go when dropped.
pub(crate) struct Scene<'a> {
    pub(crate) server: &'a Server,
    pub(crate) broker: &'a Broker,
    /// Name of the database and of the pipeline.
    pub(crate) name: String,
    /// A superuser session in the database.
    pub(crate) db: Session,
    /// Writes to the outbox that the oracle watches.
    events: Writer,
    oracle: Oracle,
    topics: Mutex<Vec<String>>,
    /// Those whose number of partitions was changed.
    moved: Mutex<HashSet<String>>,
    exactly_once: bool,
    /// Events that a failover has lost: they may have been delivered.
    taken_back: HashSet<String>,
}

impl Scene<'static> {
    /// On the shared servers, with the outbox table, publication and slot that `walpost init`
    /// makes.
    pub(crate) fn new() -> Self {
        Self::of(Outbox::Table)
    }

    /// As [`Scene::new`], with the kind of outbox.
    pub(crate) fn of(outbox: Outbox) -> Self {
        Self::of_on(outbox, Server::shared(MAJOR), Broker::shared())
    }

    /// On the shared servers, with an empty database.
    pub(crate) fn bare() -> Self {
        Self::bare_on(Server::shared(MAJOR), Broker::shared())
    }

    /// On the shared servers, with a table of the test's own, for which `walpost init` has made the
    /// rest.
    pub(crate) fn with_table(create: &str) -> Self {
        let scene = Self::bare();
        scene.db.run(create);
        scene.init().finish().expect_code(0);
        scene
    }
}

impl<'a> Scene<'a> {
    /// As [`Scene::new`], on other servers.
    pub(crate) fn on(server: &'a Server, broker: &'a Broker) -> Self {
        Self::of_on(Outbox::Table, server, broker)
    }

    /// As [`Scene::of`], on other servers.
    pub(crate) fn of_on(outbox: Outbox, server: &'a Server, broker: &'a Broker) -> Self {
        let scene = Self::bare_of(outbox, server, broker, "");
        scene.init().finish().expect_code(0);
        scene
    }

    /// As [`Scene::bare`], on other servers.
    pub(crate) fn bare_on(server: &'a Server, broker: &'a Broker) -> Self {
        Self::bare_of(Outbox::Table, server, broker, "")
    }

    /// As [`Scene::bare`], with the kind of outbox, on other servers; `options` are those of CREATE
    /// DATABASE.
    pub(crate) fn bare_of(
        outbox: Outbox,
        server: &'a Server,
        broker: &'a Broker,
        options: &str,
    ) -> Self {
        let name = unique_name();
        server.session("postgres").run(&format!(
            "CREATE DATABASE {name} TEMPLATE template0 {options}"
        ));
        let db = server.session(&name);
        let oracle = Oracle::new(&db, &format!("oracle_{name}"));
        let events = match outbox {
            Outbox::Table => Writer::Table("public.outbox".to_owned()),
            Outbox::Messages => Writer::Messages(format!("walpost_{name}")),
        };
        Self {
            server,
            broker,
            name,
            db,
            events,
            oracle,
            topics: Mutex::default(),
            moved: Mutex::default(),
            exactly_once: false,
            taken_back: HashSet::new(),
        }
    }

    /// Has Walpost deliver exactly once from here on, after a first checkpoint was set.
    pub(crate) fn exactly_once(mut self) -> Self {
        self.exactly_once = true;
        self.checkpoint("adopt")
            .arg("--yes")
            .finish()
            .expect_code(0);
        self.broker.wait_for_ends("walpost-checkpoints");
        self
    }

    /// As [`Scene::exactly_once`], or not.
    pub(crate) fn in_mode(self, exactly_once: bool) -> Self {
        match exactly_once {
            true => self.exactly_once(),
            false => self,
        }
    }

    /// Whether Walpost delivers exactly once.
    pub(crate) fn is_exactly_once(&self) -> bool {
        self.exactly_once
    }

    /// What the mode allows to be repeated after something broke so often.
    pub(crate) fn resends(&self, breaks: usize) -> Resends {
        match self.exactly_once {
            true => Resends::Never,
            false => Resends::AtMost(breaks),
        }
    }

    /// `walpost checkpoint` with one of its words, for this database and broker.
    pub(crate) fn checkpoint(&self, word: &str) -> Invocation {
        self.checkpoint_as(word, &self.conninfo())
    }

    /// As [`Scene::checkpoint`], with the database reached in another way.
    pub(crate) fn checkpoint_as(&self, word: &str, conninfo: &str) -> Invocation {
        Invocation::new(["checkpoint", word, "--pipeline", &self.name])
            .args(["--postgres", conninfo])
            .args(self.outbox_arguments())
            .args(["--kafka", &self.broker.address()])
    }

    /// Has the oracle watch another table than `public.outbox`.
    pub(crate) fn watch(mut self, table: &str) -> Self {
        self.events = Writer::Table(table.to_owned());
        self
    }

    /// Opens the session in the database again, after the server was restarted.
    pub(crate) fn reconnect(&mut self) {
        self.db = self.server.session(&self.name);
    }

    /// Has it go on with another server of the cluster, which has become the primary and lacks some
    /// events.
    pub(crate) fn fail_over(&mut self, to: &'a Server, lost: impl IntoIterator<Item = String>) {
        self.server = to;
        self.taken_back.extend(lost);
        self.reconnect();
    }

    /// Name of the slot and of the publication.
    pub(crate) fn slot(&self) -> String {
        format!("walpost_{}", self.name)
    }

    /// key=value conninfo of the superuser over the unix-domain socket.
    pub(crate) fn conninfo(&self) -> String {
        self.server.conninfo(&self.name)
    }

    /// key=value conninfo of the superuser over TCP, through a proxy to the server.
    pub(crate) fn conninfo_through(&self, proxy: &Proxy) -> String {
        let (port, name) = (proxy.port(), &self.name);
        format!("host=127.0.0.1 port={port} user=postgres dbname={name} sslmode=disable")
    }

    /// Makes the topic of an aggregate type of this test's own, and returns the aggregate type.
    pub(crate) fn aggregate(&self, partitions: i32) -> String {
        let aggregate = format!("{}.{}", self.name, self.topics.lock().unwrap().len());
        self.topic(&format!("outbox.event.{aggregate}"), partitions, &[]);
        aggregate
    }

    /// Adds partitions to the aggregate's topic; its keys may be anywhere from here on.
    pub(crate) fn add_partitions(&self, aggregate: &str, total: usize) {
        let topic = format!("outbox.event.{aggregate}");
        self.broker.add_partitions(&topic, total);
        self.moved.lock().unwrap().insert(topic);
    }

    /// Makes a topic.
    pub(crate) fn topic(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        self.broker.create_topic(name, partitions, settings);
        self.expect_topic(name);
    }

    /// Counts a topic among those of this test.
    pub(crate) fn expect_topic(&self, name: &str) {
        self.topics.lock().unwrap().push(name.to_owned());
    }

    /// The topics of this test.
    pub(crate) fn topics(&self) -> Vec<String> {
        self.topics.lock().unwrap().clone()
    }

    /// `walpost init` for this database, without a role: roles belong to the whole server.
    pub(crate) fn init(&self) -> Invocation {
        self.invoke("init").arg("--no-role")
    }

    /// `walpost check` for this database and broker.
    pub(crate) fn check(&self) -> Invocation {
        self.invoke("check")
            .args(["--kafka", &self.broker.address()])
    }

    /// `walpost verify` for this database and broker.
    pub(crate) fn verify(&self) -> Invocation {
        self.invoke("verify")
            .args(["--kafka", &self.broker.address()])
            .args(self.delivery_arguments())
    }

    /// `walpost run` from this database to this broker.
    pub(crate) fn run(&self) -> Invocation {
        self.run_as(&self.conninfo())
    }

    /// `walpost run` from this database, reached in another way, to this broker.
    pub(crate) fn run_as(&self, conninfo: &str) -> Invocation {
        self.invoke_as("run", conninfo)
            .args(["--kafka", &self.broker.address()])
            .args(self.delivery_arguments())
    }

    /// `walpost skip` to a place in WAL.
    pub(crate) fn skip(&self, to: &str) -> Invocation {
        self.invoke("skip")
            .args(["--kafka", &self.broker.address()])
            .args(self.delivery_arguments())
            .arg(format!("--to={to}"))
    }

    /// `walpost replay` from this database to this broker.
    pub(crate) fn replay(&self, arguments: &[&str]) -> Invocation {
        self.invoke("replay")
            .args(["--kafka", &self.broker.address()])
            .args(arguments)
    }

    fn delivery_arguments(&self) -> &'static [&'static str] {
        if self.exactly_once {
            &["--exactly-once"]
        } else {
            &[]
        }
    }

    /// A subcommand with the database and the pipeline's name.
    pub(crate) fn invoke(&self, subcommand: &str) -> Invocation {
        self.invoke_as(subcommand, &self.conninfo())
    }

    /// A subcommand with the database, reached in another way, and the pipeline's name.
    pub(crate) fn invoke_as(&self, subcommand: &str, conninfo: &str) -> Invocation {
        Invocation::new([subcommand, "--pipeline", &self.name])
            .args(["--postgres", conninfo])
            .args(self.outbox_arguments())
    }

    fn outbox_arguments(&self) -> &'static [&'static str] {
        match self.events {
            Writer::Table(_) => &[],
            Writer::Messages(_) => &["--outbox", "messages"],
        }
    }

    /// Walpost, already streaming.
    pub(crate) fn start(&self) -> Walpost {
        self.start_with(&[])
    }

    /// Walpost with more arguments, already streaming.
    pub(crate) fn start_with(&self, arguments: &[&str]) -> Walpost {
        let mut walpost = self.run().args(arguments).start();
        walpost.wait_for_log("streaming");
        walpost
    }

    /// Walpost that has delivered and confirmed one event.
    pub(crate) fn start_and_confirm_one(&self, aggregate: &str, key: &str) -> Walpost {
        let walpost = self.start();
        self.insert(aggregate, key);
        self.wait_for_records(1);
        self.wait_until_confirmed();
        walpost
    }

    /// walpost.toml with the pipeline, and more settings of it.
    pub(crate) fn file(&self, settings: &str) -> PathBuf {
        let outbox = match self.events {
            Writer::Table(_) => "table",
            Writer::Messages(_) => "messages",
        };
        let text = format!(
            "[kafka]\n\"bootstrap.servers\" = \"{}\"\n[[pipeline]]\nname = \"{}\"\npostgres = \"{}\"\n\
             outbox = \"{outbox}\"\n{settings}",
            self.broker.address(),
            self.name,
            self.conninfo(),
        );
        let file = reaper::folder("config").join("walpost.toml");
        fs::write(&file, text).unwrap();
        file
    }

    /// Walpost with its settings and more of them in walpost.toml, already streaming.
    pub(crate) fn start_with_file(&self, settings: &str) -> Walpost {
        let file = self.file(settings);
        let mut walpost = Invocation::new(["run", "--config"]).arg(file).start();
        walpost.wait_for_log("streaming");
        walpost
    }

    /// The statements that write to the outbox.
    pub(crate) fn events(&self) -> &Writer {
        &self.events
    }

    /// Commits one event with a payload that must not reach a log.
    pub(crate) fn insert(&self, aggregate: &str, key: &str) {
        self.db.run(&self.insert_sql(aggregate, key));
    }

    /// The statement of [`Scene::insert`], for a session of the test's own.
    pub(crate) fn insert_sql(&self, aggregate: &str, key: &str) -> String {
        let payload = format!("{{\"mark\": \"{PAYLOAD_MARK}\"}}");
        self.events.one(Event::new(aggregate, key, &payload))
    }

    /// Writers on this database, events for the aggregates.
    pub(crate) fn load(&self, aggregates: &[&str]) -> Load {
        self.load_that_rests(aggregates, Duration::from_millis(5))
    }

    /// As [`Scene::load`], with rests of that length between transactions.
    pub(crate) fn load_that_rests(&self, aggregates: &[&str], rest: Duration) -> Load {
        Load::start(&Profile {
            conninfo: self.conninfo(),
            events: self.events.clone(),
            aggregates: aggregates
                .iter()
                .map(|&aggregate| aggregate.to_owned())
                .collect(),
            keys: 50,
            writers: 3,
            rest,
        })
    }

    /// Everything committed so far, in commit order.
    pub(crate) fn history(&self) -> Vec<Committed> {
        self.oracle.history(&self.db, &self.events)
    }

    /// Every record in the topics of this test.
    pub(crate) fn records(&self) -> Vec<Record> {
        self.broker.read(&self.topics())
    }

    /// Waits until the topics hold `count` records, and returns all there are.
    pub(crate) fn wait_for_records(&self, count: usize) -> Vec<Record> {
        let found = poll_until(PATIENCE, || (self.count() >= count).then_some(()));
        let records = self.records();
        assert!(
            found.is_some(),
            "{} records of {count} arrived",
            records.len()
        );
        records
    }

    /// What the pipeline's last checkpoint says is safe to confirm.
    pub(crate) fn safe_lsn(&self) -> u64 {
        let checkpoints = self.checkpoints();
        let last = checkpoints.last().expect("a checkpoint");
        let json: serde_json::Value = serde_json::from_str(last.text()).unwrap();
        parse_lsn(json["safe_lsn"].as_str().unwrap())
    }

    /// Those of the pipeline that are committed.
    pub(crate) fn checkpoints(&self) -> Vec<Record> {
        let mut checkpoints = self.broker.read(&["walpost-checkpoints".to_owned()]);
        checkpoints.retain(|record| record.key() == self.name);
        checkpoints
    }

    /// How many committed records the topics of this test hold.
    fn count(&self) -> usize {
        match self.exactly_once {
            true => self.records().len(),
            false => self.broker.count(&self.topics()),
        }
    }

    /// The slot's confirmed_flush_lsn.
    pub(crate) fn confirmed(&self) -> u64 {
        let lsn = self.db.number(&format!(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = '{}'",
            self.slot()
        ));
        u64::try_from(lsn).unwrap()
    }

    /// Where the server writes its WAL now.
    pub(crate) fn wal_position(&self) -> u64 {
        u64::try_from(
            self.db
                .number("SELECT (pg_current_wal_lsn() - '0/0')::bigint"),
        )
        .unwrap()
    }

    /// Waits until everything committed by now is confirmed.
    pub(crate) fn wait_until_confirmed(&self) {
        let goal = self.wal_position();
        wait_until("the slot to be confirmed", || self.confirmed() >= goal);
    }

    /// Whether a walsender holds the slot.
    pub(crate) fn slot_is_active(&self) -> bool {
        let slot = self.slot();
        self.db.is_true(&format!(
            "SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
        ))
    }

    /// Ends the walsender that holds the slot, and says whether one does.
    pub(crate) fn end_walsender(&self) -> bool {
        self.db.is_true(&format!(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'",
            self.slot()
        ))
    }

    /// Drops the slot, whoever has it.
    pub(crate) fn drop_slot(&self) {
        let drop = format!("SELECT pg_drop_replication_slot('{}')", self.slot());
        wait_until("the slot to go", || {
            self.end_walsender();
            self.db.try_run(&drop).is_ok()
        });
    }

    /// Drops the role that has the name of the scene, with its rights.
    pub(crate) fn drop_role(&self) {
        let role = &self.name;
        let _ = self
            .db
            .try_run(&format!("DROP OWNED BY {role}; DROP ROLE {role}"));
    }

    /// Kills Walpost, and notes what was confirmed and delivered by then.
    pub(crate) fn kill(&self, walpost: Walpost) -> Death {
        walpost.kill();
        self.note_death()
    }

    /// What was confirmed and delivered when a connector, dead by now, died.
    pub(crate) fn note_death(&self) -> Death {
        wait_until("the slot to be free", || !self.slot_is_active());
        let confirmed = self.confirmed();
        Death {
            ends: self.broker.ends(&self.topics()),
            confirmed,
        }
    }

    /// Waits until everything committed is delivered and confirmed, stops Walpost, and judges all
    /// it did.
    pub(crate) fn settle(&self, walpost: Walpost, deaths: &[Death], resends: Resends) -> Summary {
        let history = self.history();
        // Cheaper to ask for than records, and late enough for most of them.
        let goal = self.wal_position();
        poll_until(PATIENCE, || (self.confirmed() >= goal).then_some(()));
        self.wait_for_ids(&history);
        self.wait_until_confirmed();
        walpost.terminate().expect_code(0);
        self.judge(deaths, resends)
    }

    /// Judges what is delivered by now.
    pub(crate) fn judge(&self, deaths: &[Death], resends: Resends) -> Summary {
        let history = self.history();
        let records = self.records();
        let mut delivery: Vec<Delivered> = records.iter().map(Delivered::from).collect();
        delivery.retain(|delivered| !self.taken_back.contains(&delivered.id));
        let moved = self.moved.lock().unwrap();
        for delivered in &mut delivery {
            if moved.contains(&delivered.place.0) {
                delivered.key = None;
            }
        }
        let verdict = checker::check(&history, &delivery, deaths, resends);
        verdict.unwrap_or_else(|violations| panic!("{violations}"))
    }

    /// Waits for the last event of the history; whether the others are there too is for the
    /// checker.
    pub(crate) fn wait_for_ids(&self, history: &[Committed]) {
        let Some(last) = history.last() else { return };
        let enough = poll_until(PATIENCE, || (self.count() >= history.len()).then_some(()));
        let arrived = enough.and_then(|()| {
            poll_until(PATIENCE, || {
                self.records()
                    .iter()
                    .any(|r| r.header("id") == last.id)
                    .then_some(())
            })
        });
        if arrived.is_none() {
            eprintln!("the last event, {}, did not arrive", last.id);
            self.judge(&[], Resends::AtMost(usize::MAX));
        }
    }
}

impl Drop for Scene<'_> {
    fn drop(&mut self) {
        let Ok(session) = Session::connect(&self.server.conninfo("postgres")) else {
            return;
        };
        let name = &self.name;
        for what in [
            "pg_terminate_backend(active_pid)",
            "pg_drop_replication_slot(slot_name)",
        ] {
            poll_until(Duration::from_secs(5), || {
                let slots = format!("FROM pg_replication_slots WHERE database = '{name}'");
                session.try_run(&format!("SELECT {what} {slots}")).ok()
            });
        }
        let _ = session.try_run(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"));
    }
}

impl From<&Record> for Delivered {
    fn from(record: &Record) -> Self {
        Self {
            id: record.header("id").to_owned(),
            place: record.place(),
            offset: record.offset,
            key: record.key.clone(),
            position: parse_position(record.header("walpost-position")),
        }
    }
}

/// Reads `0/16B3748`.
pub(crate) fn parse_lsn(text: &str) -> u64 {
    let (high, low) = text.split_once('/').expect("an LSN");
    let half = |digits| u64::from_str_radix(digits, 16).expect("an LSN");
    half(high) << 32 | half(low)
}

/// Reads `00000000/016B3748:0000000002`.
pub(crate) fn parse_position(text: &str) -> (u64, u32) {
    let parse = || {
        let (lsn, index) = text.split_once(':')?;
        let (high, low) = lsn.split_once('/')?;
        if high.len() != 8 || low.len() != 8 || index.len() != 10 {
            return None;
        }
        let high = u64::from_str_radix(high, 16).ok()?;
        let low = u64::from_str_radix(low, 16).ok()?;
        Some((high << 32 | low, index.parse().ok()?))
    };
    parse().unwrap_or_else(|| panic!("not a position: {text}"))
}

/// The test's name, shortened, with a number: good for a database, a slot and a topic.
pub(crate) fn unique_name() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let thread = std::thread::current();
    let path = thread.name().unwrap_or("main");
    let (_, test) = path.split_once("::").unwrap_or(("", path));
    let short: String = test
        .replace("::", "_")
        .chars()
        .filter(|c| c.is_ascii_lowercase() || *c == '_' || c.is_ascii_digit())
        .take(32)
        .collect();
    format!("t{number}_{}", short.trim_end_matches('_'))
}
