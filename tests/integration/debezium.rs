//! Debezium on Kafka Connect and Walpost deliver from the same table. Walpost uses the
//! configuration that `walpost import debezium` generates. Run with `./dev debezium`.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::kafka::connect::Connect;
use crate::support::postgres::binaries;
use crate::support::reaper;
use crate::support::records::Record;
use crate::support::secrets::{self, SECRET};
use crate::support::session::Session;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost};

const PARTITIONS: i32 = 3;
const WRITERS: usize = 3;
/// Number of transactions that are committed while both connectors run, and after each step of the
/// switch-over.
const CONCURRENT_TRANSACTIONS: usize = 300;
const TRANSACTIONS_PER_STEP: usize = 30;

/// A table as in Debezium's documentation, with columns that users commonly add. The function
/// writes events with many kinds of payloads.
const TABLE: &str = r#"
CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255), type varchar(255) NOT NULL,
    payload jsonb, tenant text, happened timestamp(3) NOT NULL);
CREATE FUNCTION send(count int) RETURNS void LANGUAGE sql AS $$
    INSERT INTO outbox SELECT gen_random_uuid(), (ARRAY['order', 'customer'])[1 + floor(random() * 2)],
        'key ' || floor(random() * 40), (ARRAY['Placed', 'Paid', 'Größe "geändert"'])[1 + floor(random() * 3)],
        (ARRAY['{"orderId": 1, "lines": [{"item": "book", "count": 2}, {"item": "pen", "count": 3}], "paid": true}',
               '{"a": null, "b": {"c": {"d": "e"}}, "f": []}', '{}', '{"price": 12.5, "text": "ü \" \\ \n 🐘"}', '"text"', '12',
               '{"many": [1, 2, 3], "none": [], "deep": [[1], [2, 3]]}', '{"large": 3000000000, "small": -1}', NULL]::jsonb[])
            [1 + floor(random() * 9)],
        (ARRAY['acme', '', NULL])[1 + floor(random() * 3)], date_trunc('milliseconds', clock_timestamp()::timestamp)
    FROM generate_series(1, count)
$$;
CREATE PUBLICATION debezium FOR TABLE outbox WITH (publish = 'insert');
"#;

/// Returns each connector's name and the settings in which it differs from the other connectors.
/// The first connector is typical. The second uses every feature of the event router.
fn variants() -> [(&'static str, Value); 3] {
    let json = "org.apache.kafka.connect.json.JsonConverter";
    [
        ("plain", json!({ "snapshot.mode": "no_data" })),
        (
            "expanded",
            json!({
                "snapshot.mode": "no_data",
                "key.converter": json,
                "value.converter": json,
                "header.converter": json,
                "header.converter.schemas.enable": "false",
                "transforms.outbox.table.expand.json.payload": "true",
                "transforms.outbox.table.field.event.timestamp": "happened",
                "transforms.outbox.table.fields.additional.placement": "type:header:eventType,tenant:envelope",
            }),
        ),
        // The connector that Walpost replaces during the test. It keeps the default snapshot mode,
        // because no rows are older than its slot.
        ("replaced", json!({})),
    ]
}

/// A Debezium connector and the Walpost configuration that replaces it.
struct Migration<'s> {
    fixture: &'s Fixture<'static>,
    connect: &'s Connect,
    name: String,
    /// The directory that contains walpost.toml.
    folder: PathBuf,
}

impl<'s> Migration<'s> {
    /// Imports the connector's configuration.
    fn import(fixture: &'s Fixture<'static>, connect: &'s Connect, name: &str) -> Self {
        let folder = reaper::folder("moved");
        let import = Invocation::new(["import", "debezium"])
            .arg(connect.connector_file(name))
            .arg("--worker")
            .arg(connect.worker_file())
            .arg("--output")
            .arg(folder.join("walpost.toml"));
        // The import leaves only the password to be entered manually.
        let output = import.finish().expect_code(3).stderr;
        let to_do: Vec<_> = output
            .lines()
            .filter(|line| line.starts_with("  TO DO "))
            .collect();
        assert!(
            matches!(&to_do[..], [one] if one.contains("database.password: is a secret")),
            "{output}"
        );
        Self {
            fixture,
            connect,
            name: name.to_owned(),
            folder,
        }
    }

    fn file(&self) -> PathBuf {
        self.folder.join("walpost.toml")
    }

    /// Returns the switch-over commands at the end of the generated configuration file.
    fn commands(&self) -> Vec<String> {
        let text = fs::read_to_string(self.file()).unwrap();
        let (_, steps) = text
            .split_once("# Commands for a switch-over")
            .expect("a switch-over");
        let commands = steps
            .lines()
            .filter_map(|line| line.strip_prefix("#      "));
        commands.map(str::to_owned).collect()
    }

    /// Returns the command that contains `part`. Panics unless there is exactly one such command.
    fn command(&self, part: &str) -> String {
        let mut found = self.commands();
        found.retain(|line| line.contains(part));
        match &found[..] {
            [one] => one.clone(),
            _ => panic!("expected one command with {part}: {:#?}", self.commands()),
        }
    }

    /// Runs a command line exactly as printed, but with the address of the test's Connect worker in
    /// place of the default.
    fn sh(&self, line: &str) -> String {
        let line = line.replace(
            "http://localhost:8083/",
            &format!("http://{}/", self.connect.http().address()),
        );
        let walpost = Path::new(env!("CARGO_BIN_EXE_walpost")).parent().unwrap();
        let psql = binaries(self.fixture.server.major);
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &line])
            .env_clear()
            .env(
                "PATH",
                format!("{}:{}:{path}", walpost.display(), psql.display()),
            )
            .env("HOME", reaper::scratch())
            .env("PGPASSWORD", SECRET)
            .env("WALPOST_HTTP", "off")
            .current_dir(&self.folder)
            .output()
            .unwrap();
        let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
        assert!(output.status.success(), "{line}\n{out}{err}");
        secrets::expect_none(secrets::OutputStream::Output, &out);
        secrets::expect_none(secrets::OutputStream::Error, &err);
        out.trim().to_owned()
    }

    /// Starts Walpost with the command line from the generated configuration file.
    fn run(&self) -> Walpost {
        let line = self.command("walpost run");
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some("walpost"), "{line}");
        Invocation::new(words)
            .folder(&self.folder)
            .env("PGPASSWORD", SECRET)
            .start_streaming()
    }

    /// Returns the topics that `program` writes to, which are different for Debezium and Walpost.
    fn topics(&self, program: &str) -> Vec<String> {
        ["customer", "order"]
            .map(|aggregate| topic(&self.name, program, aggregate))
            .to_vec()
    }
}

fn topic(name: &str, program: &str, aggregate: &str) -> String {
    format!("{name}.{program}.{aggregate}")
}

/// Runs `work` while several sessions write events and sometimes roll back. `work` receives a
/// function that waits for the given number of further transactions.
fn under_load<T>(fixture: &Fixture<'_>, work: impl FnOnce(&dyn Fn(usize)) -> T) -> T {
    struct StopOnDrop<'a>(&'a AtomicBool);
    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    let committed = AtomicUsize::new(0);
    let write = || {
        let session = Session::connect(&fixture.conninfo()).unwrap();
        while !stop.load(Ordering::Relaxed) {
            let count = fastrand::u8(1..=5);
            let commits = fastrand::u8(..10) != 0;
            let end = if commits { "COMMIT" } else { "ROLLBACK" };
            session.run(&format!("BEGIN; SELECT send({count}); {end}"));
            committed.fetch_add(usize::from(commits), Ordering::Relaxed);
            thread::sleep(Duration::from_millis(10));
        }
    };
    thread::scope(|scope| {
        for _ in 0..WRITERS {
            scope.spawn(write);
        }
        // Stops the writers even if `work` panics. Otherwise, the scope would wait for them
        // forever.
        let _stop = StopOnDrop(&stop);
        work(&|transactions| {
            let goal = committed.load(Ordering::Relaxed) + transactions;
            wait_until("the writers to commit", || {
                committed.load(Ordering::Relaxed) >= goal
            });
        })
    })
}

/// Returns the parts of a record that do not depend on which program delivered it. Schema names are
/// unified: Debezium derives the name of an envelope's schema from the first row that it processes,
/// whereas Walpost derives the name from the row itself.
fn in_common(record: &Record) -> Value {
    let text = |bytes: &Option<Vec<u8>>| {
        bytes
            .as_ref()
            .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    };
    let own = ["walpost-position", "__debezium.context.runId"];
    let headers = record
        .headers
        .iter()
        .filter(|(name, _)| !own.contains(&name.as_str()));
    let headers: Vec<_> = headers
        .map(|(name, value)| json!([name, text(value)]))
        .collect();
    let value = text(&record.payload)
        .map(|value| value.replace("outbox.customer.Value", "outbox.order.Value"));
    json!({ "key": text(&record.key), "value": value, "headers": headers })
}

/// A record as returned by [`in_common`], and its timestamp. The timestamp is `None` if it comes
/// from the producer's clock.
type Compared = (Value, Option<i64>);

/// Asserts that Debezium and Walpost wrote the same records to each partition, in the same order.
fn expect_equal(migration: &Migration<'_>, has_timestamps: bool) {
    let by_partition = |program| {
        let mut found: HashMap<(usize, i32), Vec<Compared>> = HashMap::new();
        for (number, topic) in migration.topics(program).into_iter().enumerate() {
            for record in migration.fixture.broker.read(&[topic]) {
                let timestamp = has_timestamps.then_some(record.timestamp);
                let partition_records = found.entry((number, record.partition)).or_default();
                partition_records.push((in_common(&record), timestamp));
            }
        }
        found
    };
    let (expected, found) = (by_partition("debezium"), by_partition("walpost"));
    assert!(
        expected.len() > 2,
        "{}: the load was too small",
        migration.name
    );
    for (partition, expected) in &expected {
        for (number, pair) in expected.iter().zip(&found[partition]).enumerate() {
            assert_eq!(
                pair.0, pair.1,
                "{}: {partition:?}, record {number}",
                migration.name
            );
        }
    }
    let counts = |all: &HashMap<_, Vec<_>>| all.values().map(Vec::len).sum::<usize>();
    assert_eq!(counts(&expected), counts(&found), "{}", migration.name);
}

/// Performs the switch-over steps at the end of the generated configuration file, in order. Returns
/// the Walpost process that has replaced the connector.
fn switch_over(migration: &Migration<'_>, wait_for_transactions: &dyn Fn(usize)) -> Walpost {
    let mut walpost = None;
    let mut done = Vec::new();
    for line in migration.commands() {
        wait_for_transactions(TRANSACTIONS_PER_STEP);
        if line.contains("walpost run") {
            walpost = Some(migration.run());
            done.push("run");
        } else if line.contains("confirmed_flush_lsn") {
            wait_until("Debezium to have passed", || migration.sh(&line) == "t");
            done.push("wait");
        } else {
            migration.sh(&line);
            let word = [
                "walpost init",
                "/stop",
                "sed",
                "check",
                "drop_replication_slot",
                "DELETE",
            ]
            .into_iter()
            .find(|word| line.contains(word));
            done.push(word.unwrap_or_else(|| panic!("unknown command: {line}")));
        }
    }
    let expected = [
        "walpost init",
        "wait",
        "/stop",
        "sed",
        "check",
        "run",
        "drop_replication_slot",
        "DELETE",
    ];
    assert_eq!(done, expected);
    walpost.unwrap()
}

#[test]
#[ignore = "fetches and starts Debezium: ./dev debezium"]
fn imported_configuration_replaces_debezium_without_a_gap_and_writes_the_same_records() {
    let fixture = Fixture::bare();
    let role = format!("debezium_{}", fixture.name);
    fixture.db.run(TABLE);
    fixture.db.run(&format!(
        "CREATE ROLE {role} LOGIN REPLICATION PASSWORD '{SECRET}'; GRANT SELECT ON outbox TO {role}"
    ));
    let connectors = variants().map(|(variant, more)| {
        let name = format!("{}-{variant}", fixture.name);
        for program in ["debezium", "walpost"] {
            for aggregate in ["customer", "order"] {
                fixture.topic(&topic(&name, program, aggregate), PARTITIONS, &[]);
            }
        }
        let slot = format!("debezium_{}", name.replace('-', "_"));
        let mut config = json!({
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "database.hostname": "127.0.0.1",
            "database.port": fixture.server.port.to_string(),
            "database.user": role,
            "database.password": SECRET,
            "database.dbname": fixture.name,
            "database.sslmode": "disable",
            "plugin.name": "pgoutput",
            "slot.name": slot,
            "publication.name": "debezium",
            "publication.autocreate.mode": "disabled",
            "table.include.list": "public.outbox",
            "tombstones.on.delete": "false",
            // The prefix must be unique: a connector waits two minutes to register its metrics if
            // another connector already uses the prefix.
            "topic.prefix": format!("shop_{variant}"),
            "poll.interval.ms": "50",
            "transforms": "outbox",
            "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
            "transforms.outbox.route.topic.replacement": topic(&name, "debezium", "${routedByValue}"),
        });
        let more = more.as_object().unwrap().clone();
        config.as_object_mut().unwrap().extend(more);
        (name, config)
    });
    let connect = Connect::start(Broker::shared(), &connectors);
    let migration = connectors.map(|(name, _)| Migration::import(&fixture, &connect, &name));
    let [plain, expanded, replaced] = &migration;
    let streaming =
        "SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name LIKE 'debezium_%'
                     AND database = current_database()";
    wait_until("the connectors to stream", || {
        fixture.db.number(streaming) == 3
    });

    let concurrent = [plain, expanded].map(|migration| {
        let text = fs::read_to_string(migration.file()).unwrap();
        let theirs = topic(&migration.name, "debezium", "");
        assert!(text.contains(&theirs), "{text}");
        let ours = topic(&migration.name, "walpost", "");
        fs::write(migration.file(), text.replace(&theirs, &ours)).unwrap();
        migration.sh(&migration.command("walpost init"));
        migration.run()
    });
    let successor = under_load(&fixture, |wait_for_transactions| {
        wait_for_transactions(CONCURRENT_TRANSACTIONS);
        switch_over(replaced, wait_for_transactions)
    });

    let history = fixture.history();
    let order: HashMap<_, _> = history
        .iter()
        .zip(0..)
        .map(|(event, at)| (event.id.as_str(), at))
        .collect();
    for migration in [plain, expanded] {
        for program in ["debezium", "walpost"] {
            let topics = migration.topics(program);
            wait_until("the records of both", || {
                fixture.broker.count(&topics) >= history.len()
            });
        }
    }
    for walpost in concurrent {
        walpost.terminate().expect_code(0);
    }
    expect_equal(plain, false);
    expect_equal(expanded, true);

    let topics = replaced.topics("debezium");
    let records = || fixture.broker.read(&topics);
    let ids = |records: &[Record]| -> HashSet<String> {
        records
            .iter()
            .map(|record| record.header("id").to_owned())
            .collect()
    };
    wait_until("the committed events", || {
        ids(&records()).len() >= history.len()
    });
    successor.terminate().expect_code(0);
    let records = records();
    let mut seen: HashMap<&str, Value> = HashMap::new();
    let mut furthest = HashMap::new();
    let is_walposts = |record: &Record| record.header_names().contains(&"walpost-position");
    for record in &records {
        let id = record.header("id");
        let common = in_common(record);
        match seen.get(id) {
            // A record that is delivered twice must be identical both times.
            Some(before) => assert_eq!(*before, common),
            None => {
                let at: usize = order[id];
                let before = furthest.insert(record.topic_partition(), at);
                assert!(
                    before.is_none_or(|before| before < at),
                    "{id} follows a later event"
                );
                seen.insert(id, common);
            }
        }
    }
    assert_eq!(seen.len(), history.len());
    let of_walpost = records.iter().filter(|record| is_walposts(record)).count();
    let repeated = records.len() - seen.len();
    eprintln!(
        "{} events: Debezium {}, Walpost {of_walpost}, of which {repeated} a second time",
        seen.len(),
        records.len() - of_walpost
    );
    assert!(
        of_walpost > repeated && records.len() > of_walpost,
        "both connectors have delivered part of it"
    );
    drop(connect);
    fixture.db.drop_role(&role);
}
