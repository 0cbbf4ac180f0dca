//! Pipelines that are defined by rows returned from a query.

use super::*;
use crate::support::http::Http;

const FAILED_MESSAGE: &str = "pipelines already started from this source keep running";

/// A database with a table of database names. Each row defines a pipeline.
struct Shards {
    fixture: Fixture<'static>,
}

impl Shards {
    fn new() -> Self {
        let fixture = Fixture::bare();
        fixture
            .db
            .run("CREATE TABLE public.shards (name text, dbname text, active bool)");
        Self { fixture }
    }

    fn add(&self, fixture: &Fixture) {
        self.run(&format!(
            "INSERT INTO shards VALUES ('{name}', '{name}', true)",
            name = fixture.name
        ));
    }

    fn run(&self, sql: &str) {
        self.fixture.db.run(sql);
    }

    fn source(&self) -> String {
        let socket = self.fixture.server.socket.display().to_string();
        self.source_with("name = '{name}'", &socket)
    }

    /// Like [`Self::source`], but the names of the pipelines begin with `prefix`, and the pipelines
    /// connect to `host`.
    fn source_with_prefix(&self, prefix: &str, host: &str) -> String {
        let names = format!(
            "name = '{prefix}{{name}}', slot = 'walpost_{{name}}', publication = 'walpost_{{name}}'"
        );
        self.source_with(&names, host)
    }

    fn source_with(&self, names: &str, host: &str) -> String {
        format!(
            "[[fleet.source]]
             postgres = \"{}\"
             query = 'SELECT name, dbname FROM public.shards WHERE active'
             every = '1s'
             template = {{ {names}, postgres = 'postgresql://postgres@/{{dbname}}?host={host}&port={}' }}\n",
            self.fixture.conninfo(),
            self.fixture.server.port
        )
    }

    /// Starts a process and waits until `pipelines` pipelines are streaming, including those
    /// defined by `in_file`.
    fn start(&self, in_file: &str, pipelines: usize) -> Process {
        start(&(self.source() + in_file), pipelines)
    }
}

/// Starts a process with the given sources and pipelines, and waits until `pipelines` pipelines are
/// streaming.
fn start(sources: &str, pipelines: usize) -> Process {
    let folder = reaper::folder("config");
    replace(&folder.join("walpost.toml"), &(head() + sources));
    Process::start_in(folder, pipelines)
}

fn wait_until_failed(http: &Http, expected: f64) {
    wait_until("the metric", || {
        http.metrics()["walpost_config_reload_failed"] == expected
    });
}

#[test]
fn adds_and_removes_pipelines_when_query_results_change_without_affecting_others() {
    let [stays, comes] = [Fixture::new(), Fixture::new()];
    let shards = Shards::new();
    shards.add(&stays);
    let mut process = shards.start("", 1);
    let aggregate = stays.aggregate(2);
    let load = stays.load(&[&aggregate]);
    let sender = walsender(&stays);
    shards.add(&comes);
    let line = process.walpost.wait_for_logs(RELOADED, 1);
    assert!(
        line.contains("1 added") && line.contains(&comes.name) && line.contains("1 unchanged"),
        "{line}"
    );
    wait_until_streaming(&comes);
    let other = comes.aggregate(1);
    comes.insert(&other, "k");
    comes.wait_for_records(1);
    shards.run(&format!(
        "UPDATE shards SET active = false WHERE name = '{}'",
        comes.name
    ));
    let line = process.walpost.wait_for_logs(RELOADED, 2);
    assert!(line.contains("1 removed"), "{line}");
    wait_until("the slot to be released", || !comes.slot_is_active());
    comes.insert(&other, "k");
    shards.run("UPDATE shards SET active = true");
    comes.wait_for_records(2);
    load.wait_for_transactions(20);
    load.stop();
    assert_eq!(walsender(&stays), sender);
    let summary = stays.settle(process.walpost, &[], Resends::Never);
    assert_eq!(summary.repeated, 0);
    assert_eq!(comes.check_delivered(&[], Resends::Never).committed, 2);
}

#[test]
fn reports_an_invalid_pipeline_query_or_row_and_changes_nothing() {
    let [one, other, in_file] = [Fixture::new(), Fixture::new(), Fixture::new()];
    let shards = Shards::new();
    shards.add(&one);
    shards.add(&other);
    let mut process = shards.start(&pipeline(&in_file, ""), 3);
    let http = process.walpost.http();
    let fixtures = [&one, &other, &in_file];
    let senders = fixtures.map(walsender);
    let broken = [
        (
            "ALTER TABLE shards RENAME TO away",
            "public.shards",
            "ALTER TABLE away RENAME TO shards",
        ),
        (
            "ALTER TABLE shards RENAME name TO away",
            "column \\\"name\\\"",
            "ALTER TABLE shards RENAME away TO name",
        ),
        (
            "INSERT INTO shards VALUES ('new', NULL, true)",
            "column dbname is NULL",
            "DELETE FROM shards WHERE name = 'new'",
        ),
        (
            "INSERT INTO shards VALUES ('Bad', 'x', true)",
            "characters of a-z",
            "DELETE FROM shards WHERE name = 'Bad'",
        ),
        (
            "INSERT INTO shards SELECT * FROM shards LIMIT 1",
            "another pipeline has the same name",
            "DELETE FROM shards WHERE ctid = (SELECT max(ctid) FROM shards)",
        ),
    ];
    for (times, (breaks, why, repairs)) in broken.into_iter().enumerate() {
        shards.run(breaks);
        let line = process.walpost.wait_for_logs(FAILED_MESSAGE, times + 1);
        assert!(line.contains(&why.replace('\\', "")), "{line}");
        wait_until_failed(&http, 1.0);
        shards.run(repairs);
        wait_until_failed(&http, 0.0);
    }
    // A row can't define a pipeline that the configuration file already defines. Changes to the
    // file still take effect while such a row exists.
    shards.run(&format!(
        "INSERT INTO shards VALUES ('{name}', '{name}', true)",
        name = in_file.name
    ));
    let line = process
        .walpost
        .wait_for_logs(FAILED_MESSAGE, broken.len() + 1);
    assert!(
        line.contains("another pipeline has the same name"),
        "{line}"
    );
    let changed = head() + &shards.source() + &pipeline(&in_file, "window_records = 500");
    replace(&process.file(), &changed);
    process.walpost.wait_for_log("1 changed");
    assert_eq!([&one, &other].map(walsender), senders[..2]);
    shards.run(&format!(
        "DELETE FROM shards WHERE name = '{}'",
        in_file.name
    ));
    wait_until_failed(&http, 0.0);
    // If a reload would remove more than half of the pipelines from a source, such as this query,
    // Walpost treats the change as a mistake unless an operator accepts it.
    shards.run("UPDATE shards SET active = false");
    let line = process.walpost.wait_for_log(NOT_RELOADED);
    assert!(
        line.contains("2 pipelines would be removed") && line.contains("reload --accept"),
        "{line}"
    );
    wait_until_failed(&http, 1.0);
    assert_eq!([&one, &other].map(walsender), senders[..2]);
    let accepted = process
        .pipeline_command(&["reload", "--accept"])
        .expect_code(0);
    accepted.expect_mentions(&["2 removed", "1 unchanged"]);
    wait_until_failed(&http, 0.0);
    wait_until("two slots to be released", || {
        !one.slot_is_active() && !other.slot_is_active()
    });
    process.walpost.terminate().expect_code(0);
}

#[test]
fn starts_other_pipelines_if_the_query_that_defines_some_pipelines_fails() {
    let [of_row, in_file] = [Fixture::new(), Fixture::new()];
    let shards = Shards::new();
    shards.add(&of_row);
    shards.run("ALTER TABLE shards RENAME TO away");
    let mut process = shards.start(&pipeline(&in_file, ""), 1);
    let log_line = process.walpost.wait_for_log("pipelines are missing");
    assert!(log_line.contains("public.shards"), "{log_line}");
    let http = process.walpost.http();
    assert_eq!(http.metrics()["walpost_config_reload_failed"], 1.0);
    let sender = walsender(&in_file);
    let check = |words: &[&str]| {
        let config = process.file();
        Invocation::new(["check", "--config"])
            .arg(config)
            .args(words)
            .finish()
    };
    check(&["--offline"])
        .expect_code(0)
        .expect_mentions(&["source", "not queried"]);
    let found = check(&[]).expect_code(3);
    found.expect_mentions(&["walpost.toml: source", "public.shards", &in_file.name]);
    // If a changed query fails, no pipelines are changed.
    let changed = std::fs::read_to_string(process.file())
        .unwrap()
        .replace("WHERE active", "WHERE true");
    replace(&process.file(), &changed);
    let line = process.walpost.wait_for_log(NOT_RELOADED);
    assert!(line.contains("public.shards"), "{line}");
    shards.run("ALTER TABLE away RENAME TO shards");
    wait_until_streaming(&of_row);
    wait_until_failed(&http, 0.0);
    assert_eq!(walsender(&in_file), sender);
    process.walpost.terminate().expect_code(0);
}

/// While a query that defines pipelines fails, the checkpoint topic of these pipelines must stay
/// reserved. Otherwise, a role that writes events could forge a checkpoint, and the pipelines would
/// skip events once the query succeeds again.
#[test]
fn no_event_reaches_the_checkpoint_topic_of_a_pipeline_whose_defining_query_fails() {
    let in_file = Fixture::new();
    let shards = Shards::new();
    let checkpoints = format!("{}.cp", in_file.name);
    let source = shards.source().replace(
        "template = {",
        &format!(
            "template = {{ delivery = 'exactly-once', checkpoint = {{ topic = '{checkpoints}' }},"
        ),
    );
    shards.run("ALTER TABLE shards RENAME TO away");
    in_file.topic(&checkpoints, 1, &[]);
    let in_file_text = pipeline(&in_file, "topic = '{aggregatetype}'");
    let mut process = start(&(source + &in_file_text), 1);
    in_file.insert(&checkpoints, "shard_a");
    let position = in_file.history()[0].end;
    let line = process.walpost.wait_for_log("is reserved for checkpoints");
    assert!(line.contains(&checkpoints), "{line}");
    assert!(in_file.confirmed() < position);
}

/// A new row with its own dead-letter topic must not restart the pipelines in the configuration
/// file. Otherwise, anyone who can add rows could restart these pipelines at any time.
#[test]
fn adding_a_pipeline_with_its_own_topics_does_not_restart_other_pipelines() {
    let [of_row, in_file] = [Fixture::new(), Fixture::new()];
    let shards = Shards::new();
    let template = "template = { on_unroutable = 'dead-letter', dead_letter_topic = '{name}.dead',";
    let source = shards.source().replace("template = {", template);
    let mut process = start(
        &(source + &pipeline(&in_file, "topic = '{aggregatetype}'")),
        1,
    );
    let sender = walsender(&in_file);
    shards.add(&of_row);
    let line = process.walpost.wait_for_log(RELOADED);
    assert!(
        line.contains("1 added") && line.contains("1 unchanged"),
        "{line}"
    );
    wait_until_streaming(&of_row);
    assert_eq!(walsender(&in_file), sender);
    process.walpost.terminate().expect_code(0);
}

/// If most rows of a source are removed, Walpost must hold back only the changes to that source.
/// Otherwise, anyone who can remove rows of one source could block changes to all sources and
/// files.
#[test]
fn removing_most_rows_returned_by_one_query_does_not_block_changes_to_other_pipelines() {
    let [one, other, in_file, added] = std::array::from_fn(|_| Fixture::new());
    let shards = Shards::new();
    shards.add(&one);
    shards.add(&other);
    let mut process = shards.start(&pipeline(&in_file, ""), 3);
    let http = process.walpost.http();
    let fixtures = [&one, &other];
    let senders = fixtures.map(walsender);
    shards.run("UPDATE shards SET active = false");
    process.walpost.wait_for_log(NOT_RELOADED);
    let changed = head() + &shards.source() + &pipeline(&in_file, "window_records = 500");
    replace(&process.file(), &(changed + &pipeline(&added, "")));
    let line = process.walpost.wait_for_log(RELOADED);
    for word in ["1 added", "1 changed", "2 unchanged"] {
        assert!(line.contains(word), "{word} in {line}");
    }
    let line = process.walpost.wait_for_logs(NOT_RELOADED, 2);
    assert!(
        line.contains("2 pipelines would be removed") && line.contains(FAILED_MESSAGE),
        "{line}"
    );
    wait_until_streaming(&added);
    assert_eq!(http.metrics()["walpost_config_reload_failed"], 1.0);
    assert_eq!(fixtures.map(walsender), senders);
    let accepted = process
        .pipeline_command(&["reload", "--accept"])
        .expect_code(0);
    accepted.expect_mentions(&["2 removed", "2 unchanged"]);
    wait_until_failed(&http, 0.0);
    process.walpost.terminate().expect_code(0);
}

/// If two rows define pipelines with the same name, Walpost must accept neither row. Otherwise, a
/// row that belongs to another owner and sorts first would take over the pipeline's slot,
/// checkpoint and transactional ID.
#[test]
fn startup_rejects_query_rows_that_define_pipelines_with_the_same_name() {
    let [of_row, in_file] = [Fixture::new(), Fixture::new()];
    let shards = Shards::new();
    shards.add(&of_row);
    shards.run(&format!(
        "INSERT INTO shards VALUES ('{}', 'a', true)",
        of_row.name
    ));
    let mut process = shards.start(&pipeline(&in_file, ""), 1);
    let line = process.walpost.wait_for_log("pipelines are missing");
    assert!(
        line.contains("2 rows can't be used")
            && line.contains("another pipeline has the same name"),
        "{line}"
    );
    shards.run("DELETE FROM shards WHERE dbname = 'a'");
    wait_until_streaming(&of_row);
    process.walpost.terminate().expect_code(0);
}

/// Part of the error message for a slot that belongs to another pipeline.
const FOREIGN_SLOT: &str = "init --take-slot";

/// A row defines a pipeline with the slot of another pipeline, and a different address of the same
/// server. The pipeline that the row defines must not wait for the slot, and must never use the
/// slot, even if the other pipeline is not running.
#[test]
fn pipeline_defined_by_a_query_row_does_not_take_over_the_slot_of_another_pipeline() {
    let [of_row, in_file] = [Fixture::bare(), Fixture::new()];
    let [own, others] = [Shards::new(), Shards::new()];
    own.add(&of_row);
    let folder = reaper::folder("config");
    let file = folder.join("walpost.toml");
    let socket = of_row.server.socket.display().to_string();
    let sources = own.source_with_prefix("a_", &socket);
    let sources = sources + &others.source_with_prefix("b_", "127.0.0.1");
    replace(&file, &(head() + &sources + &pipeline(&in_file, "")));
    let init = |pipeline: &str, flags: &[&str]| {
        let init = Invocation::new(["init", "--no-role", "--pipeline", pipeline, "--config"]);
        init.arg(&file).args(flags).finish()
    };
    let [owner, intruder] = ["a_", "b_"].map(|prefix| format!("{prefix}{}", of_row.name));
    init(&owner, &[]).expect_code(0);
    let mut process = Process::start_in(folder, 2);
    let fixtures = [&of_row, &in_file];
    let senders = fixtures.map(walsender);
    others.add(&of_row);
    others.add(&in_file);
    process.walpost.wait_for_logs(FOREIGN_SLOT, 2);
    for (fixture, owner) in [(&of_row, &owner), (&in_file, &in_file.name)] {
        let expected = format!(
            "slot {:?} belongs to pipeline {owner:?} according to walpost.slot_state",
            fixture.slot()
        );
        assert!(process.walpost.log().contains(&expected), "{expected}");
    }
    // Editing the query does not affect the pipelines that own the slots.
    let changed = std::fs::read_to_string(&file).unwrap();
    replace(
        &file,
        &changed.replacen("WHERE active", "WHERE active = true", 1),
    );
    process.walpost.wait_for_log(": 4 unchanged");
    assert_eq!(fixtures.map(walsender), senders);
    for fixture in fixtures {
        assert!(fixture.end_walsender());
    }
    process.walpost.wait_for_logs("streaming", 4);

    // When Walpost starts, the query that defines the pipeline to which the slot belongs fails.
    own.run("ALTER TABLE shards RENAME TO away");
    let Process { folder, walpost } = process;
    walpost.terminate().expect_code(3);
    let aggregate = of_row.aggregate(1);
    of_row.insert(&aggregate, "k");
    let run = Invocation::new(["run", "--http", "127.0.0.1:0", "--config"]);
    let walpost = run.arg(&file).start();
    let mut process = Process { folder, walpost };
    process.walpost.wait_for_log("pipelines are missing");
    process.walpost.wait_for_logs(FOREIGN_SLOT, 2);
    process.walpost.wait_for_log("streaming");
    assert!(!of_row.slot_is_active());
    own.run("ALTER TABLE away RENAME TO shards");
    of_row.wait_for_records(1);

    // The row that defines the pipeline to which the slot belongs is removed, and later added
    // again.
    own.run("UPDATE shards SET active = false");
    process.walpost.wait_for_log(NOT_RELOADED);
    let accept = process.pipeline_command(&["reload", "--accept"]);
    accept.expect_code(0).expect_mentions(&["1 removed"]);
    wait_until("the slot to be released", || !of_row.slot_is_active());
    process.pipeline_command(&["restart", &intruder]);
    process.walpost.wait_for_logs(FOREIGN_SLOT, 3);
    assert!(!of_row.slot_is_active());
    own.run("UPDATE shards SET active = true");
    wait_until_streaming(&of_row);
    of_row.insert(&aggregate, "k");
    of_row.wait_for_records(2);
    let summary = of_row.check_delivered(&[], Resends::Never);
    assert_eq!((summary.committed, summary.repeated), (2, 0));
    process.walpost.terminate().expect_code(3);
}

/// If the slot belongs to another pipeline, `init` neither re-creates the slot for a pipeline that
/// a row defines nor assigns the slot to that pipeline, unless the operator requests this.
#[test]
fn operator_can_reassign_a_slot_to_a_pipeline_defined_by_a_query_row() {
    let fixture = Fixture::new();
    let shards = Shards::new();
    shards.add(&fixture);
    let pipeline = format!("b_{}", fixture.name);
    let file = reaper::folder("config").join("walpost.toml");
    replace(
        &file,
        &(head() + &shards.source_with_prefix("b_", "127.0.0.1")),
    );
    let command = |words: &[&str]| {
        let command = Invocation::new(words).args(["--pipeline", &pipeline, "--config"]);
        command.arg(&file)
    };
    let expect_rejection = || {
        for words in [
            &["init", "--no-role"][..],
            &["run"],
            &["run", "--init"],
            &["check"],
        ] {
            let rejected = command(words).finish().expect_code(3);
            let expected = format!("belongs to pipeline {:?}", fixture.name);
            rejected.expect_mentions(&[&expected, FOREIGN_SLOT]);
        }
        for words in [
            &["skip", "--to", "F/0", "--yes"][..],
            &["maintain"],
            &["replay", "--all", "--yes"],
            &["replay", "--dropped-slots", "--yes"],
            &["replay", "--dropped-slots", "--already-delivered", "--yes"],
        ] {
            let rejected = command(words).finish();
            assert_ne!(rejected.code, Some(0), "{words:?}");
            rejected.expect_mentions(&[&format!("belongs to pipeline {:?}", fixture.name)]);
        }
    };
    expect_rejection();
    fixture.drop_slot();
    expect_rejection();
    let slot = format!(
        "SELECT 1 FROM pg_replication_slots WHERE slot_name = '{}'",
        fixture.slot()
    );
    assert_eq!(fixture.db.value(&slot), None);
    fixture.init().finish().expect_code(0);
    // A slot that is not listed in walpost.slot_state may have been created for a different
    // purpose.
    fixture.db.run("DELETE FROM walpost.slot_state");
    for words in [&["init", "--no-role"][..], &["run"]] {
        let rejected = command(words).finish().expect_code(3);
        rejected.expect_mentions(&["does not record which pipeline", FOREIGN_SLOT]);
    }
    command(&["init", "--no-role", "--take-slot"])
        .finish()
        .expect_code(0);
    let aggregate = fixture.aggregate(1);
    let mut walpost = command(&["run"]).start();
    walpost.wait_for_log("streaming");
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    // If the slot is assigned to another pipeline, nothing more is confirmed.
    fixture
        .db
        .run("UPDATE walpost.slot_state SET pipeline = 'other'");
    fixture.insert(&aggregate, "k");
    let line = walpost.wait_for_log("failed to record the delivered position");
    assert!(line.contains("belongs to pipeline"), "{line}");
    assert!(fixture.end_walsender());
    walpost.finish().expect_code(3);
    let owner = fixture.db.value("SELECT pipeline FROM walpost.slot_state");
    assert_eq!(owner.as_deref(), Some("other"));
}

/// Returns a row that defines a pipeline, as JSON. Entries in `values` override the defaults.
fn row_of(fixture: &Fixture, values: serde_json::Value) -> serde_json::Value {
    let mut row = serde_json::json!({
        "name": fixture.name,
        "host": "127.0.0.1",
        "port": fixture.server.port.to_string(),
        "dbname": fixture.name,
        "schema": "public",
        "tenant": "shop",
        "brokers": fixture.broker.address(),
    });
    for (column, value) in values.as_object().unwrap() {
        row[column] = value.clone();
    }
    row
}

/// Creates a database with a table of tenants. Each row defines several properties of a pipeline,
/// such as its host and its brokers.
fn registry(rows: &[serde_json::Value], template: &str) -> (Fixture<'static>, String) {
    let registry = Fixture::bare();
    registry
        .db
        .run("CREATE TABLE public.tenants (name text, host text, port text, dbname text, schema text, tenant text, brokers text)");
    for row in rows {
        add_row(&registry, row);
    }
    let source = format!(
        "{}[[fleet.source]]\npostgres = \"{}\"\nquery = 'SELECT * FROM public.tenants'\nevery = '1s'\n[fleet.source.template]\n\
         name = '{{name}}'\n{template}\n",
        head(),
        registry.conninfo()
    );
    (registry, source)
}

fn add_row(registry: &Fixture, row: &serde_json::Value) {
    registry.db.run(&format!(
        "INSERT INTO public.tenants SELECT * FROM json_populate_record(NULL::public.tenants, '{}')",
        row.to_string().replace('\'', "''")
    ));
}

const SOURCE_BY_HOST: &str =
    "postgres = 'postgresql://postgres:s3cr3t@{host}:{port}/{dbname}?sslmode=prefer'";

/// If a row could name a Unix-domain socket as the host, Walpost would send the password to it in
/// clear text, whatever the `sslmode`.
#[test]
fn rejects_only_the_query_row_whose_host_is_a_socket_path() {
    let fixture = Fixture::new();
    let good = row_of(&fixture, serde_json::json!({}));
    let (registry, source) = registry(&[good], SOURCE_BY_HOST);
    let folder = reaper::folder("socket");
    let socket = folder.join(format!(".s.PGSQL.{}", fixture.server.port));
    let listener = std::os::unix::net::UnixListener::bind(socket).unwrap();
    listener.set_nonblocking(true).unwrap();
    // Keep accepted connections for later checks.
    let accepted = std::cell::RefCell::new(Vec::new());
    let is_untouched = || {
        accepted.borrow_mut().extend(listener.accept());
        accepted.borrow().is_empty()
    };

    let config = reaper::folder("config");
    replace(&config.join("walpost.toml"), &source);
    let mut process = Process::start_in(config, 1);
    let http = process.walpost.http();
    let sender = walsender(&fixture);
    let host = folder.display().to_string();
    let evil = serde_json::json!({ "name": "evil", "host": host });
    add_row(&registry, &row_of(&fixture, evil));
    wait_until("the row to be read", || {
        process.walpost.logged(FAILED_MESSAGE) > 0 || !is_untouched()
    });
    assert!(is_untouched(), "Walpost connected to the row's socket");
    let line = process.walpost.wait_for_log(FAILED_MESSAGE);
    for text in [
        "row of pipeline \"evil\"",
        "column host: found",
        &host,
        "expected a host name",
    ] {
        assert!(line.contains(text), "{text} in {line}");
    }
    wait_until_failed(&http, 1.0);
    assert_eq!(walsender(&fixture), sender);
    let file = process.file();
    process.walpost.terminate().expect_code(0);

    let mut again = Invocation::new(["run", "--config"]).arg(&file).start();
    again.wait_for_log("streaming");
    again.wait_for_log("pipelines are missing");
    assert!(is_untouched(), "Walpost connected to the row's socket");
    again.terminate().expect_code(0);
}

#[test]
fn rejects_values_in_query_rows_that_would_alter_other_settings() {
    const WITH_TABLES: &str = "postgres = 'postgresql://postgres@{host}:{port}/{dbname}'\ntables = ['{schema}.outbox']\n\
        topic = '{source.tenant}.{aggregatetype}'\nkafka = { 'bootstrap.servers' = '{brokers}' }";
    const WITH_URL: &str = "postgres = '{host}'";
    let fixture = Fixture::bare();
    let attacks = [
        (WITH_TABLES, "host", "@abstract", "column host"),
        (WITH_TABLES, "host", "db,/tmp", "column host"),
        (WITH_TABLES, "host", "db?sslmode=disable", "column host"),
        (WITH_TABLES, "host", "", "column host"),
        (WITH_TABLES, "port", "1,2", "column port"),
        (WITH_TABLES, "dbname", "", "column dbname"),
        (WITH_TABLES, "schema", "*", "column schema"),
        (WITH_TABLES, "schema", "a?", "column schema"),
        (WITH_TABLES, "schema", "other.outbox", "column schema"),
        (WITH_TABLES, "schema", "\"*\"", "column schema"),
        (WITH_TABLES, "tenant", "shop.orders", "column tenant"),
        (WITH_TABLES, "tenant", "{table.schema}", "column tenant"),
        (
            WITH_TABLES,
            "brokers",
            "plaintext://evil:1",
            "column brokers",
        ),
        (WITH_URL, "host", "host=/tmp user=u", "column host"),
        (
            WITH_URL,
            "host",
            "host=db user=u passfile=/etc/shadow",
            "passfile",
        ),
        (
            WITH_URL,
            "host",
            "host=db user=u options=-cfsync=off",
            "options",
        ),
    ];
    let file = reaper::folder("config").join("walpost.toml");
    for (template, column, value, expected) in attacks {
        let row = row_of(&fixture, serde_json::json!({ column: value }));
        let (_registry, source) = registry(&[row], template);
        replace(&file, &source);
        let check = Invocation::new(["check", "--config"]).arg(&file).finish();
        let found = format!("{}\n{}", check.stdout, check.stderr);
        assert!(
            found.contains(expected),
            "{column} = {value}: {expected} in {found}"
        );
        assert!(found.contains(&fixture.name), "the row in {found}");
    }
    for (template, expected) in [
        ("postgres = 'postgresql://u@h/d?sslmode={host}'", "{host}"),
        (
            "kafka = { 'ssl.ca.location' = '{host}' }",
            "ssl.ca.location",
        ),
    ] {
        let (_registry, source) = registry(&[], template);
        replace(&file, &source);
        let check = Invocation::new(["check", "--config"]).arg(&file).finish();
        check
            .expect_code(2)
            .expect_mentions(&[expected, "the same for each row"]);
    }
}

#[test]
fn limits_the_number_of_rows_and_bytes_returned_by_a_pipeline_query() {
    let registry = Fixture::bare();
    let file = reaper::folder("config").join("walpost.toml");
    for (query, expected) in [
        (
            "SELECT generate_series(1, 1000000000) AS name",
            "more than 10000 rows",
        ),
        (
            "SELECT repeat(generate_series(1, 1000000000)::text, 100000) AS name",
            "of memory",
        ),
    ] {
        let text = format!(
            "{}[[fleet.source]]\npostgres = \"{}\"\nquery = \"{query}\"\ntemplate = {{ name = 't{{name}}' }}\n",
            head(),
            registry.conninfo()
        );
        replace(&file, &text);
        let mut check = Invocation::new(["check", "--config"]).arg(&file).start();
        let peak = check.peak_memory_at_exit();
        let found = check.finish().expect_code(3);
        found.expect_mentions(&[expected]);
        assert!(peak < 200 << 20, "{peak} bytes of memory");
    }
}
