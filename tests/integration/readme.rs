//! The examples in README.md and docs/, run in the order in which a reader would run them.

mod consumers;
mod environment;
mod links;
mod markdown;
mod reference;

use std::fs;

use self::consumers::Consumer;
use self::environment::{ExampleEnvironment, Service};
use self::markdown::{Example, in_repository, manual, page};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server, StopMode};
use crate::support::secrets::SECRET;
use crate::support::session::Session;
use crate::support::wait::{avoid_utc_midnight, wait_until};
use crate::support::walpost::Invocation;

/// Defines the examples that tests run. If a page or a heading is renamed, only its line in this
/// list has to change.
macro_rules! examples {
    ($($name:ident = $page:literal, $heading:literal, $language:ident;)*) => {
        $(const $name: Example = Example {
            page: $page,
            heading: $heading,
            language: stringify!($language),
        };)*
        const NAMED: &[(&str, Example)] = &[$((stringify!($name), $name)),*];
    };
}

examples! {
    TRIAL = "README.md", "Try it", sh;
    QUICK_PREPARE = "README.md", "2. Prepare PostgreSQL", sh;
    QUICK_RUN = "README.md", "3. Run", sh;
    QUICK_EVENT = "README.md", "4. Send an event", sql;
    QUICK_READ = "README.md", "5. Read it", sh;
    TLS_INIT = "docs/deploy.md", "PostgreSQL over TLS", sh;
    TLS_FILE = "docs/deploy.md", "Configuration with secrets", toml;
    TLS_SECRETS = "docs/deploy.md", "Configuration with secrets", sh;
    TLS_RUN = "docs/deploy.md", "Check and run with secrets", sh;
    TLS_READER = "docs/deploy.md", "A consumer over TLS", properties;
    TLS_READ = "docs/deploy.md", "A consumer over TLS", sh;
    SETTINGS = "docs/deploy.md", "1. Server settings", sql;
    INIT = "docs/deploy.md", "2. Table, role, publication, slot", sh;
    ACCESS = "docs/deploy.md", "3. Allow the role to connect", text;
    TOPICS = "docs/deploy.md", "4. Topics", sh;
    FILE = "docs/deploy.md", "5. Configuration", toml;
    CHECK = "docs/deploy.md", "5. Configuration", sh;
    EVENT = "docs/deploy.md", "7. Send an event", sql;
    REMOVE = "docs/deploy.md", "Remove it", sh;
    DEBEZIUM = "docs/debezium.md", "Switch over", sh;
    DEBEZIUM_SLOTS = "docs/debezium.md", "Switch over", sql;
    PARTITIONED = "docs/retention.md", "A partitioned outbox", sh;
    RETENTION_FILE = "docs/retention.md", "Retention", toml;
    RETENTION_OWNER = "docs/retention.md", "Change the owner", sql;
    MAINTAIN = "docs/retention.md", "Retention", sh;
    DROP_PARTITION = "docs/retention.md", "Drop a partition by hand", sql;
    MOVE_ROWS = "docs/retention.md", "Move rows out of the default partition", sql;
    PUBLISH = "docs/messages.md", "Publish an event", sql;
    MESSAGES_INIT = "docs/messages.md", "Set it up", sh;
    MESSAGES_FILE = "docs/messages.md", "Set it up", toml;
    TABLES_FILE = "docs/tables.md", "Configure it", toml;
    TABLES_INIT = "docs/tables.md", "Set it up", sh;
    ADD_OUTBOX = "docs/tables.md", "Set it up", sql;
    PUBLISHER = "docs/tables.md", "Who may add a table", sql;
    REVOKE = "docs/messages.md", "Who can forge an event", sql;
    PIPELINES = "docs/configuration.md", "Several pipelines", sh;
    SOURCES = "docs/pipelines.md", "Defining pipelines", toml;
    ROWS_FILE = "docs/pipelines.md", "Pipelines from a query", toml;
    ROWS_ROLE = "docs/pipelines.md", "Pipelines from a query", sql;
    RELOAD = "docs/pipelines.md", "Changing pipelines", sh;
    CONTROL = "docs/pipelines.md", "Stopping, starting and restarting a pipeline", sh;
    BUDGET_FILE = "docs/wal-budget.md", "Set a budget", toml;
    ADOPT = "docs/exactly-once.md", "The first run", sh;
    JOURNAL = "docs/architecture.md", "The journal", sql;
    VERIFY = "docs/verify.md", "Run it", sh;
    VERIFY_OUTPUT = "docs/verify.md", "Run it", text;
    STATUS = "docs/monitoring.md", "walpost status", sh;
    POSITION = "docs/consumers.md", "The position", sql;
    CONSUMER_TABLES = "docs/consumers.md", "Tables of the consumer", sql;
    CONSUMER_JAVA = "docs/consumers.md", "Java", java;
    CONSUMER_GO = "docs/consumers.md", "Go", go;
    CONSUMER_PYTHON = "docs/consumers.md", "Python", python;
    OPEN_TRANSACTIONS = "docs/troubleshooting.md", "Other problems", sql;
    SKIP = "docs/skip.md", "Skip events", sh;
    REPLAY = "docs/replay.md", "Send rows again", sh;
    FIRST_LOOK = "docs/operations.md", "First look", sql;
}

/// The page with configurations for managed services, which are not available in tests.
const MANAGED_PAGE: &str = "docs/managed.md";

/// Returns whether a test runs all blocks in this language on the page as a group, without naming
/// each example. This applies to `toml` on every page, and to `sql` and `sh` in docs/operations.md.
fn is_run_as_a_whole(page: &str, language: &str) -> bool {
    language == "toml" || page == "docs/operations.md" && ["sql", "sh"].contains(&language)
}

#[test]
fn every_documented_example_is_run_by_a_test() {
    for page in manual() {
        for block in page.blocks() {
            let is_picture = ["README.md", "docs/benchmarks.md"].contains(&&*page.path)
                && block.language == "text";
            let is_run = is_picture
                || is_run_as_a_whole(&page.path, &block.language)
                || NAMED.iter().any(|(_, example)| example.has(page, &block));
            let (path, language, heading) = (&page.path, &block.language, &block.heading);
            assert!(
                is_run,
                "{path}: no test runs the {language} under {heading:?}"
            );
        }
    }
    // Each named example must exist in the documentation and be used by a test in this file.
    let source = fs::read_to_string(in_repository("tests/integration/readme.rs")).unwrap();
    let source: String = source.split_whitespace().collect();
    for (name, example) in NAMED {
        example.all();
        let is_used = [".one()", ".all()"]
            .iter()
            .any(|call| source.contains(&format!("{name}{call}")));
        assert!(is_used, "no test uses {name}");
    }
}

/// Returns the command line in the systemd unit.
fn run_line() -> String {
    let unit = include_str!("../../deploy/systemd/walpost.service");
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    line.expect("a line ExecStart").to_owned()
}

/// Starts the service as docs/deploy.md describes, with the configuration file on that page.
fn run(environment: &ExampleEnvironment) -> Service {
    environment.write("walpost.toml", &FILE.one());
    environment.start(&run_line())
}

fn create_topic(environment: &ExampleEnvironment) {
    Broker::shared().create_topic(&environment.topic(), 1, &[]);
}

/// Follows every step of docs/deploy.md; `make` creates the table, role, publication and slot.
fn deploy(make: impl Fn(&ExampleEnvironment)) {
    let environment = ExampleEnvironment::new("wal_level = replica\n");
    environment.sql(&SETTINGS.one());
    environment.server.stop(StopMode::Fast);
    environment.server.start();
    let db = environment.shop();
    assert_eq!(db.value("SHOW wal_level").unwrap(), "logical");

    make(&environment);

    let file = db.value("SHOW hba_file").unwrap();
    let lines = fs::read_to_string(&file).unwrap() + &ACCESS.one();
    fs::write(&file, lines).unwrap();
    let rules = db.rows("SELECT error FROM pg_hba_file_rules WHERE database = '{shop}'");
    assert_eq!(rules, [vec![None], vec![None]]);

    environment.sh(&TOPICS.one());
    assert_eq!(Broker::shared().partitions(&environment.topic()), 12);
    environment.write("walpost.toml", &FILE.one());
    let found = environment.sh(&CHECK.one());
    assert!(!found.contains("WARNING"), "{found}");

    let mut walpost = environment.start(&run_line());
    environment.sql(&EVENT.one());
    let records = environment.wait_for_records(&mut walpost, 1);
    assert_eq!(records[0].key(), "4711");
    assert_eq!(records[0].text(), r#"{"total": "12.50"}"#);
    let slot = environment.sql(&FIRST_LOOK.all()[0]);
    assert!(slot.contains("walpost_outbox|t|reserved|"), "{slot}");
    walpost.stop();

    environment.sh(&REMOVE.one());
    assert_eq!(db.number("SELECT count(*) FROM pg_replication_slots"), 0);
}

#[test]
fn deployment_with_walpost_init_delivers_an_event() {
    deploy(|environment| {
        let made = INIT.all();
        assert!(made[0].contains("walpost init"), "{made:?}");
        environment.sh(&made[0]);
    });
}

#[test]
fn deployment_with_the_sql_files_delivers_an_event() {
    deploy(|environment| {
        let made = INIT.all();
        assert!(made[1].contains("psql"), "{made:?}");
        environment.sh(&made[1]);
    });
}

#[test]
fn documented_configuration_files_match_the_objects_created_by_init() {
    let environment = ExampleEnvironment::new("");
    let server = &environment.server;
    let db = server.session("postgres");
    db.run("CREATE DATABASE billing");
    db.run(&format!(
        "CREATE ROLE walpost LOGIN REPLICATION PASSWORD '{SECRET}'"
    ));
    // Create a table that has the usual columns and the columns that the examples add.
    for (database, table) in [("shop", "public.outbox"), ("billing", "accounts.outbox")] {
        server.session(database).run(&format!(
            "CREATE SCHEMA IF NOT EXISTS accounts;
             CREATE TABLE {table} (id uuid PRIMARY KEY, tenant text, aggregatetype text,
                 aggregateid text, type text, payload jsonb, created_at timestamptz, value_schema_id bytea)"
        ));
    }
    shards(&environment);
    Broker::shared().create_topic("walpost-dead-letters", 1, &[]);
    let files_of = |is_rented: bool| -> Vec<String> {
        let pages = manual().filter(|page| (page.path == MANAGED_PAGE) == is_rented);
        let blocks = pages.flat_map(|page| page.blocks());
        let blocks = blocks.filter(|block| block.language == "toml");
        blocks.map(|block| block.text).collect()
    };
    fs::create_dir(environment.etc("pipelines.d")).unwrap();
    let mut files = files_of(false);
    assert!(files.len() >= 4, "{files:?}");
    files.push(in_config_map());
    for text in files {
        environment.write("walpost.toml", &text);
        // First remove the database objects that were created for the previous configuration file,
        // because two of the files use the same names for different kinds of outbox.
        environment.sh(&REMOVE.one());
        let file: toml::Table = environment.fill_in(&text).parse().unwrap();
        let pipelines = file.get("pipeline").and_then(toml::Value::as_array);
        for pipeline in pipelines.into_iter().flatten() {
            let name = pipeline
                .get("name")
                .map_or("outbox", |name| name.as_str().unwrap());
            let database = if name == "billing" { "billing" } else { "shop" };
            let init = PIPELINES
                .one()
                .replace("--pipeline orders", &format!("--pipeline {name}"))
                .replace("@/shop?", &format!("@/{database}?"));
            environment.sh(&init);
        }
        environment.sh_as_walpost("walpost check --config /etc/walpost/walpost.toml");
    }
    // The managed servers that these configuration files name do not exist in tests, so check the
    // files offline.
    let rented = files_of(true);
    assert!(rented.len() >= 2, "{rented:?}");
    for text in rented {
        // The programs that the configuration names must exist, even though they are not run.
        let text = text.replace("/usr/local/bin/aws", "/bin/true");
        environment.write("walpost.toml", &text.replace("/usr/bin/curl", "/bin/true"));
        environment.sh("walpost check --offline --config /etc/walpost/walpost.toml");
    }
}

/// Returns the configuration file in the Kubernetes manifests.
fn in_config_map() -> String {
    let map = include_str!("../../deploy/kubernetes/configmap.yaml");
    let (_, file) = map.split_once("walpost.toml: |\n").unwrap();
    let lines = file
        .lines()
        .map(|line| line.strip_prefix("    ").unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn following_the_documented_switch_from_debezium_loses_no_event() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    let db = environment.shop();
    db.run(
        "CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
             aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb);
         CREATE PUBLICATION dbz_publication FOR ALL TABLES;",
    );
    db.rows("SELECT pg_create_logical_replication_slot('debezium', 'pgoutput')");
    let insert = |key: &str| {
        db.run(&environment.fill_in(&format!(
            "INSERT INTO outbox VALUES (gen_random_uuid(), 'order', '{key}', 'Placed', '{{}}')"
        )));
    };
    insert("before");
    environment.sh(&DEBEZIUM.one());
    let queries = DEBEZIUM_SLOTS.all();
    insert("between");
    assert_eq!(environment.sql(&queries[0]), "f");
    db.rows("SELECT pg_catalog.pg_replication_slot_advance('debezium', pg_current_wal_lsn())");
    assert_eq!(environment.sql(&queries[0]), "t");
    insert("after");
    environment.write("walpost.toml", &FILE.one());
    let mut walpost = environment.start(&format!("{} --snapshot never", run_line()));
    let records = environment.wait_for_records(&mut walpost, 2);
    let keys: Vec<_> = records.iter().map(|record| record.key()).collect();
    assert_eq!(keys, ["between", "after"]);
    environment.sql(&queries[1]);
    let slots = db.rows("SELECT slot_name FROM pg_replication_slots");
    assert_eq!(slots, [vec![Some("walpost_outbox".to_owned())]]);
    walpost.stop();
}

#[test]
fn documented_steps_drop_a_partition_only_after_its_rows_have_been_delivered() {
    avoid_utc_midnight();
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    let db = environment.shop();
    let commands = PARTITIONED.all();
    commands
        .iter()
        .for_each(|command| drop(environment.sh(command)));
    let queries = DROP_PARTITION.all();
    let today = db.value("SELECT to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD')");
    let today = |query: &str| query.replace("20251101", today.as_deref().unwrap());
    environment.sql(&EVENT.one());
    let position = environment.sql(&today(&queries[0]));
    let may_be_dropped = queries[1].replace("0/16B3748", &position);
    assert_eq!(environment.sql(&may_be_dropped), "f");
    let mut walpost = run(&environment);
    assert_eq!(
        environment.wait_for_records(&mut walpost, 1)[0].key(),
        "4711"
    );
    wait_until("the slot to pass", || {
        environment.sql(&may_be_dropped) == "t"
    });
    environment.sql(&today(&queries[2]));
    walpost.stop();
    assert_eq!(db.number("SELECT count(*) FROM outbox"), 0);
}

#[test]
fn run_maintains_partitions_as_documented() {
    avoid_utc_midnight();
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    let db = environment.shop();
    environment.sh(&PARTITIONED.all()[0]);
    environment.sql(&RETENTION_OWNER.one());
    let would = environment.sh(&MAINTAIN.one());
    assert!(
        !would.contains("would"),
        "no partition is old or missing: {would}"
    );
    db.run("DROP TABLE outbox_default; CREATE TABLE outbox_default PARTITION OF outbox DEFAULT");
    let last = "SELECT to_char(now() AT TIME ZONE 'UTC' + interval '7 days', 'YYYYMMDD')";
    let last = format!("outbox_p{}", db.value(last).unwrap());
    db.run(&format!("DROP TABLE {last}"));
    environment.write("walpost.toml", &BUDGET_FILE.one());
    let found = environment.sh(&CHECK.one());
    assert!(found.contains("the slot can be dropped"), "{found}");
    environment.write("walpost.toml", &RETENTION_FILE.one());
    let mut walpost = environment.start(&run_line());
    let made = format!("SELECT to_regclass('{last}') IS NOT NULL");
    wait_until("the last partition to be created", || db.is_true(&made));

    // Insert a row whose time range has no partition yet.
    let sql = MOVE_ROWS.one();
    environment.sql(&EVENT.one());
    let insert = "INSERT INTO outbox (aggregatetype, aggregateid, type, created_at) VALUES ('order', 'k', 't', '2025-11-01 12:00+00')";
    environment.sql(insert);
    environment.wait_for_records(&mut walpost, 2);
    assert_eq!(db.number("SELECT count(*) FROM outbox_default"), 1);
    environment.sql(&sql);
    assert_eq!(db.number("SELECT count(*) FROM outbox_default"), 0);
    assert_eq!(db.number("SELECT count(*) FROM outbox_p20251101"), 1);
    environment.sql(&EVENT.one());
    let records = environment.wait_for_records(&mut walpost, 3);
    assert_eq!(records.len(), 3, "moving a row publishes nothing");
    walpost.stop();
}

#[test]
fn delivers_an_event_published_without_a_table() {
    let made = MESSAGES_INIT.all();
    assert_eq!(made.len(), 2);
    for make in made {
        let environment = ExampleEnvironment::new("");
        create_topic(&environment);
        environment.sh(&make);
        environment.write("walpost.toml", &MESSAGES_FILE.one());
        let mut walpost = environment.start(&run_line());
        environment.sql(&REVOKE.one());
        environment.sql(&PUBLISH.one());
        let records = environment.wait_for_records(&mut walpost, 1);
        assert_eq!(records[0].key(), "4711");
        assert_eq!(records[0].text(), r#"{"total": "12.50"}"#);
        walpost.stop();
        environment.sh(&REMOVE.one());
        let kept = environment
            .shop()
            .number("SELECT count(*) FROM pg_replication_slots");
        assert_eq!(kept, 0);
    }
}

#[test]
fn pipelines_can_be_changed_as_documented() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    environment.write("walpost.toml", &SOURCES.one());
    fs::create_dir(environment.etc("pipelines.d")).unwrap();
    environment.sh(&PIPELINES.one());
    let mut walpost = environment.start(&run_line());
    walpost.wait_for_log("streaming");
    let [reload, accept] = &RELOAD.all()[..] else {
        panic!("two ways to reload");
    };
    // Use the control socket at the path that the systemd unit sets.
    let control = |example: &str| {
        let socket = "export WALPOST_CONTROL=/run/walpost/control.sock";
        environment.sh(&format!("{socket}\n{example}"))
    };
    assert!(control(reload).contains("1 unchanged"));
    let part = SOURCES.one();
    let (_, pipeline) = part.split_once("[[pipeline]]").unwrap();
    let late = format!("[[pipeline]]{}", pipeline.replace("orders", "late"));
    environment.write("pipelines.d/late.toml", &late);
    walpost.wait_for_log("1 added (late)");
    // As the documentation says, the pipeline halts because its publication does not exist yet.
    walpost.wait_for_log("halted");
    environment.sh(&PIPELINES
        .one()
        .replace("--pipeline orders", "--pipeline late"));
    assert!(control("walpost pipeline start late").contains("late has started"));
    let output = control(&CONTROL.one());
    for text in [
        "orders streaming",
        "orders has stopped",
        "orders has started",
    ] {
        assert!(output.contains(text), "{output}");
    }
    environment.write(
        "walpost.toml",
        &part.replace(pipeline, "").replace("[[pipeline]]", ""),
    );
    fs::remove_file(environment.etc("pipelines.d/late.toml")).unwrap();
    environment.write("pipelines.d/new.toml", &late.replace("late", "new"));
    walpost.wait_for_log("configuration not reloaded");
    environment.sh(&PIPELINES
        .one()
        .replace("--pipeline orders", "--pipeline new"));
    assert!(control(accept).contains("1 added (new), 2 removed (orders, late)"));
    walpost.stop();
}

/// Creates a database with an empty table for the query to read, and a role that may read the
/// table.
fn shards(environment: &ExampleEnvironment) -> Session {
    environment
        .server
        .session("postgres")
        .run("CREATE DATABASE shards");
    let db = environment.server.session("shards");
    db.run("CREATE TABLE public.shards (name text, dbname text, active bool)");
    db.run(&ROWS_ROLE.one());
    db
}

#[test]
fn rows_of_a_query_define_pipelines_as_documented() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    let db = shards(&environment);
    // The interval is so long that the query runs only when a reload is requested, after the
    // pipeline's objects have been created.
    environment.write("walpost.toml", &ROWS_FILE.one().replace("30s", "1h"));
    let mut walpost = environment.start(&run_line());
    walpost.wait_for_log("no pipeline is defined yet");
    db.run("INSERT INTO shards VALUES ('a', 'shop', true)");
    let init = PIPELINES.one();
    environment.sh(&init.replace("--pipeline orders", "--pipeline shard_a"));
    let reload = &RELOAD.all()[0];
    let output = environment.sh(&format!(
        "export WALPOST_CONTROL=/run/walpost/control.sock\n{reload}"
    ));
    assert!(output.contains("1 added (shard_a)"), "{output}");
    environment.sql(&EVENT.one());
    environment.wait_for_records(&mut walpost, 1);
    walpost.stop();
}

#[test]
fn tenants_can_be_added_as_documented() {
    let environment = ExampleEnvironment::new("");
    let db = environment.shop();
    let tenants = ["tenant_1", "tenant_42", "tenant_43"];
    let topics = tenants.map(|tenant| format!("{tenant}.{}", environment.aggregate));
    for topic in &topics {
        Broker::shared().create_topic(topic, 1, &[]);
    }
    environment.write("walpost.toml", &TABLES_FILE.one());
    db.run("CREATE SCHEMA tenant_1");
    environment.sh(&TABLES_INIT.one());
    let mut walpost = environment.start(&run_line());
    walpost.wait_for_log("streaming");
    let event = EVENT.one();
    environment.sql(&event.replace("INTO outbox", "INTO tenant_1.outbox"));
    db.run("CREATE SCHEMA tenant_42; CREATE TABLE tenant_42.outbox (LIKE tenant_1.outbox INCLUDING ALL)");
    let event = event.replace("INTO outbox", "INTO tenant_42.outbox");
    environment.sql(&event);
    assert_eq!(environment.sql(&ADD_OUTBOX.one()), "1");
    environment.sql(&event);
    db.run("CREATE ROLE migrator; GRANT USAGE ON SCHEMA tenant_1 TO migrator; GRANT SELECT ON tenant_1.outbox TO migrator");
    environment.sql(&PUBLISHER.one());
    let migration = format!(
        "SET ROLE migrator; CREATE SCHEMA tenant_43; CREATE TABLE tenant_43.outbox (LIKE tenant_1.outbox INCLUDING DEFAULTS); {}; {}",
        event.replace("tenant_42", "tenant_43"),
        ADD_OUTBOX.one().replace("tenant_42", "tenant_43")
    );
    assert_eq!(environment.sql(&migration), "1");
    for (topic, count) in topics.into_iter().zip([1, 2, 1]) {
        let topics = [topic];
        wait_until("the records of the tenants", || {
            Broker::shared().count(&topics) == count
        });
    }
    walpost.stop();
}

#[test]
fn exactly_once_pipeline_starts_at_an_adopted_checkpoint() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    environment.sh(&INIT.all()[0]);
    environment.write("walpost.toml", &FILE.one());
    let adopt = ADOPT.one();
    let shown = environment.sh(&format!("echo outbox | {adopt}"));
    assert!(shown.contains("no checkpoint"), "{shown}");
    let mut walpost = environment.start(&format!("{} --exactly-once", run_line()));
    environment.sql(&EVENT.one());
    let records = environment.wait_for_records(&mut walpost, 1);
    assert_eq!(records[0].key(), "4711");
    walpost.stop();
}

#[test]
fn event_that_halts_the_pipeline_can_be_skipped_as_documented() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    environment.sh(&INIT.all()[0]);
    environment.write("walpost.toml", &FILE.one());
    let event = EVENT.one();
    environment.sql("ALTER TABLE outbox DROP CONSTRAINT walpost_aggregatetype_fits_topic_name;\n");
    environment.sql(&event.replace("'order'", "'not a topic'"));
    environment.sql(&event);
    let halted = environment.sh(&format!("{} 2>&1 || test $? = 3", run_line()));
    let (_, rest) = halted.split_once("halted: ").unwrap();
    let (_, rest) = rest.split_once(" at ").unwrap();
    let position = rest.split(' ').next().unwrap();
    let skip = SKIP.one().replace("00000000/016B3748:0000000002", position);
    environment.sh(&format!("echo outbox | {skip}"));
    let mut walpost = run(&environment);
    assert_eq!(
        environment.wait_for_records(&mut walpost, 1)[0].key(),
        "4711"
    );
    walpost.stop();
}

#[test]
fn status_shows_a_running_pipeline() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    environment.sh(&INIT.all()[0]);
    let mut walpost = run(&environment);
    let address = walpost.wait_for_log("status at http://");
    let address = address.rsplit_once("http://").unwrap().1.trim();
    // Wait for a delivery rather than a log line: a pipeline that has delivered an event is
    // certainly streaming.
    environment.sql(&EVENT.one());
    environment.wait_for_records(&mut walpost, 1);
    let shown = environment.sh_as_walpost(&format!("{} --http {address}", STATUS.one().trim()));
    assert!(shown.contains("streaming"), "{shown}");
    walpost.stop();
}

#[test]
fn replayed_events_keep_their_ids() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    environment.sh(&INIT.all()[0]);
    for _ in 0..3 {
        environment.sql(&EVENT.one());
    }
    // Imitate a lost slot that is then re-created.
    environment.sh(&REMOVE.one());
    environment.sh(&INIT.all()[0]);
    let mut walpost = run(&environment);
    let db = environment.shop();
    let ids = "SELECT id FROM outbox ORDER BY created_at, id";
    let before = db.rows(ids);
    let replay = REPLAY.one();
    let shown = environment.sh(&replay);
    assert!(shown.contains("3 rows of table public.outbox"), "{shown}");
    let replay = replay.replace("--dry-run", "");
    environment.sh(&format!("echo outbox | {replay}"));
    assert_eq!(db.rows(ids), before);
    let records = environment.wait_for_records(&mut walpost, 3);
    let delivered: Vec<_> = records
        .iter()
        .map(|record| vec![Some(record.header("id").to_owned())])
        .collect();
    assert_eq!(delivered, before);
    walpost.stop();
}

/// Delivers events to one of the example consumers in the documentation, and then replays them.
fn check_consumer(environment: &ExampleEnvironment, consumer: &Consumer<'_>) {
    create_topic(environment);
    environment.sh(&INIT.all()[0]);
    let walpost = run(environment);
    let insert = || drop(environment.sql(&EVENT.one()));
    let replay = || {
        let replay = REPLAY.one().replace("--dry-run", "");
        environment.sh(&format!("echo outbox | {replay}"));
    };
    consumer.skips_duplicates(&insert, &replay);
    walpost.stop();
}

#[test]
fn java_consumer_example_skips_duplicates() {
    let command = consumers::java();
    check_consumer_with_postgres(CONSUMER_JAVA.one(), "Billing.java", "true", command);
}

#[test]
fn go_consumer_example_skips_duplicates() {
    let prepare = consumers::build_go();
    check_consumer_with_postgres(
        CONSUMER_GO.one(),
        "main.go",
        &prepare,
        "./billing".to_owned(),
    );
}

fn check_consumer_with_postgres(text: String, file: &'static str, prepare: &str, command: String) {
    let environment = ExampleEnvironment::new("");
    consumers::create_database(&environment, &CONSUMER_TABLES.one());
    let billing = environment.server.session("billing");
    let sql = |statement: &str| match statement.starts_with("SELECT") {
        true => billing.value(statement).unwrap_or_default(),
        false => {
            billing.run(statement);
            String::new()
        }
    };
    let consumer = Consumer {
        environment: &environment,
        text,
        file,
        prepare: prepare.to_owned(),
        command,
        sql: &sql,
    };
    check_consumer(&environment, &consumer);
}

#[test]
fn python_consumer_example_skips_duplicates() {
    let environment = ExampleEnvironment::new("");
    let database = environment.etc("billing.db");
    let sql = |statement: &str| {
        // The query fails until the consumer creates the table.
        environment.sh(&format!(
            "python3 -B -c 'import sqlite3, sys
with sqlite3.connect(sys.argv[1], timeout=30) as db:
    try:
        print(*(row[0] for row in db.execute(sys.argv[2])))
    except sqlite3.OperationalError:
        pass' '{}' '{}'",
            database.display(),
            statement.replace('\'', r"'\''")
        ))
    };
    let consumer = Consumer {
        environment: &environment,
        text: CONSUMER_PYTHON.one(),
        file: "billing.py",
        prepare: "true".to_owned(),
        command: consumers::python(),
        sql: &sql,
    };
    check_consumer(&environment, &consumer);
}

#[test]
fn documented_verify_command_finds_delivered_events() {
    let environment = ExampleEnvironment::new("");
    create_topic(&environment);
    environment.sh(&INIT.all()[0]);
    let mut walpost = run(&environment);
    for _ in 0..3 {
        environment.sql(&EVENT.one());
    }
    environment.wait_for_records(&mut walpost, 3);
    let found = environment.sh(&VERIFY.one());
    let shown = VERIFY_OUTPUT.one();
    let lines = |text: &str, from: &str| {
        let lines: Vec<_> = text
            .lines()
            .skip_while(|line| !line.starts_with(from))
            .collect();
        lines
            .join("\n")
            .replace(|c: char| c.is_ascii_digit(), "")
            .replace(' ', "")
    };
    let shown = lines(&shown, "outbox:").replace("NOTOK", "ok");
    assert_eq!(lines(&found, "outbox:"), shown);
    walpost.stop();
}

#[test]
fn documented_queries_return_the_described_results() {
    let fixture = Fixture::new();
    let journal = fixture.db.rows(&JOURNAL.one());
    let [entry] = &journal[..] else {
        panic!("expected one entry: {journal:?}");
    };
    assert_eq!(entry[2].as_deref(), Some("snapshot"));
    let position = fixture.db.rows(&POSITION.one());
    assert_eq!(position, [vec![Some("0/16B3748".to_owned())]]);
    let other = fixture.server.session(&fixture.name);
    other.run("BEGIN; CREATE TABLE held_open ()");
    let open = fixture.db.rows(&OPEN_TRANSACTIONS.one());
    let held =
        |row: &Vec<Option<String>>| row[4].as_deref().is_some_and(|q| q.contains("held_open"));
    assert!(open.iter().any(held), "{open:?}");
}

fn restart(environment: &ExampleEnvironment) {
    environment.server.stop(StopMode::Fast);
    environment.server.start();
}

#[test]
fn quick_start_delivers_an_event_to_a_consumer() {
    let environment = ExampleEnvironment::new("wal_level = replica\n");
    let prepare = QUICK_PREPARE.all();
    environment.sh(&prepare[0]);
    restart(&environment);
    environment.sh(&prepare[1]);
    let owner = "SELECT relowner = 'shop'::regrole FROM pg_class WHERE oid = 'outbox'::regclass";
    assert!(environment.shop().is_true(owner));
    let mut walpost = environment.start(&QUICK_RUN.one());
    walpost.wait_for_log("streaming");
    environment.sql(&format!("SET ROLE shop; {}", QUICK_EVENT.one()));
    environment.wait_for_records(&mut walpost, 1);
    let shown = environment.sh(&QUICK_READ.one());
    for part in ["4711", r#"{"total": "12.50"}"#, "id:", "walpost-position:"] {
        assert!(shown.contains(part), "{shown}");
    }
    walpost.stop();
}

#[test]
fn trial_without_kafka_prints_an_event() {
    let environment = ExampleEnvironment::new("");
    let mut walpost = environment.start(&TRIAL.one());
    walpost.wait_for_log("streaming");
    environment.sql(&QUICK_EVENT.one());
    walpost.wait_for_output("4711");
    walpost.stop();
    environment.sh(&REMOVE.one());
    let slots = "SELECT count(*) FROM pg_replication_slots";
    assert_eq!(environment.shop().number(slots), 0);
}

/// Both PostgreSQL and Kafka require passwords and TLS, and the roles are not superusers.
#[test]
fn deployment_with_passwords_and_tls_delivers_an_event_to_a_consumer() {
    let environment = ExampleEnvironment::new("wal_level = replica\n");
    let role = |name: &str, password: &str| {
        let sql = format!("ALTER ROLE {name} LOGIN PASSWORD '{password}'");
        environment.server.session("postgres").run(&sql);
    };
    role("shop", &format!("{SECRET}-shop"));
    environment.sql(&SETTINGS.one());
    restart(&environment);

    // Answer the prompts of psql's \password.
    let password = format!("{SECRET}-role");
    let init = TLS_INIT.one().replace(
        "psql ",
        &format!("printf '%s\\n%s\\n' {password} {password} | setsid --wait psql "),
    );
    environment.sh(&init);
    let admitted = in_backticks("docs/deploy.md", "hostssl ");
    let file = environment.shop().value("SHOW hba_file").unwrap();
    // The new line in pg_hba.conf must apply only to this role and precede the existing lines.
    let admitted = admitted.replace("192.0.2.17/32", "127.0.0.1/32");
    let rules = fs::read_to_string(&file).unwrap();
    let reject = "host all walpost 127.0.0.1/32 reject";
    fs::write(&file, format!("{admitted}\n{reject}\n{rules}")).unwrap();
    environment.shop().run("SELECT pg_catalog.pg_reload_conf()");

    environment.write("walpost.toml", &TLS_FILE.one());
    let secrets = TLS_SECRETS
        .one()
        .replace("the password of the role walpost", &password)
        .replace(
            "the password of the Kafka user walpost",
            &crate::support::kafka::sasl_password(),
        );
    environment.write("secrets.env", &secrets);
    let lines = TLS_RUN.one();
    let (prepare, run) = lines.trim().rsplit_once('\n').unwrap();
    let found = environment.sh(prepare);
    assert!(found.contains("slot"), "{found}");
    let (source, _) = prepare.split_once('\n').unwrap();
    let mut walpost = environment.start_after(source, run);
    walpost.wait_for_log("streaming");

    environment.sql_as("shop", &format!("{SECRET}-shop"), &EVENT.one());
    environment.wait_for_records(&mut walpost, 1);
    let reader = TLS_READER
        .one()
        .replace("username=\"reader\"", "username=\"walpost\"")
        .replace("...", &crate::support::kafka::sasl_password());
    environment.write("reader.properties", &reader);
    let read = TLS_READ
        .one()
        .replace("reader.properties", "/etc/walpost/reader.properties");
    let shown = environment.sh(&read);
    assert!(shown.contains("4711"), "{shown}");
    assert!(shown.contains(r#"{"total": "12.50"}"#), "{shown}");
    walpost.stop();
}

/// Returns the text in backticks that begins with `start` on the given page.
fn in_backticks(path: &str, start: &str) -> String {
    let found = markdown::in_backticks(&page(path).text);
    let found = found.into_iter().find(|code| code.starts_with(start));
    found.unwrap_or_else(|| panic!("{path} has no `{start}…`"))
}

#[test]
fn runbook_statements_are_valid_sql() {
    let server = Server::private(MAJOR, "max_prepared_transactions = 1\n");
    let db = server.session("postgres");
    db.rows("SELECT pg_create_logical_replication_slot('walpost_outbox', 'pgoutput')");
    let blocks = page("docs/operations.md").blocks();
    let statements = blocks.iter().filter(|block| block.language == "sql");
    for block in statements {
        for statement in block.text.split_inclusive(";\n") {
            db.run(statement);
        }
    }
    // The statements must not drop a slot that is still needed.
    assert_eq!(db.number("SELECT count(*) FROM pg_replication_slots"), 1);
}

/// Checks all Walpost commands in the documentation's shell examples.
#[test]
fn commands_in_the_documentation_exist() {
    let blocks = manual().flat_map(|page| page.blocks());
    let shell = blocks.filter(|block| block.language == "sh");
    let lines: Vec<_> = shell
        .flat_map(|block| {
            let joined = block.text.replace("\\\n", " ");
            joined
                .lines()
                .map(|line| line.trim().to_owned())
                .collect::<Vec<_>>()
        })
        .filter_map(|line| line.strip_prefix("walpost ").map(str::to_owned))
        .collect();
    assert!(lines.len() > 15, "{lines:?}");
    for line in lines {
        let arguments = line.split_whitespace().chain(["--help"]);
        Invocation::new(arguments).finish().expect_code(0);
    }
}
