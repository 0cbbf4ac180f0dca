//! Tests `walpost check`, and features of other commands that no other test file covers.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;
use walpost::facade::identifier;

use crate::init::objects;
use crate::support::fixture::Fixture;
use crate::support::kafka::{Broker, SASL_USER};
use crate::support::postgres::{MAJORS, Server};
use crate::support::process::free_port;
use crate::support::proxy::{Proxy, ProxyMode};
use crate::support::secrets::SECRET;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, config_file};

#[test]
fn init_and_check_report_an_unreachable_server() {
    let nowhere = "host=/nowhere user=postgres dbname=postgres";
    for command in ["init", "check"] {
        let mut invocation = Invocation::new([command, "--postgres", nowhere]);
        if command == "check" {
            invocation = invocation.args(["--kafka", "127.0.0.1:9"]);
        }
        invocation
            .finish()
            .expect_code(1)
            .expect_mentions(&["/nowhere"]);
    }
}

#[test]
fn check_passes_after_init() {
    for major in MAJORS {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        fixture.check().finish().expect_code(0);
        let finished = fixture.check().arg("--json").finish().expect_code(0);
        serde_json::from_str::<Value>(&finished.stdout).expect("one JSON document");
    }
}

#[test]
fn quotes_identifiers_the_way_each_server_version_does() {
    for major in MAJORS {
        let session = Server::shared(major).session("postgres");
        let rows = session.rows(
            "SELECT word, quote_ident(word) FROM pg_get_keywords()
             UNION ALL SELECT name, quote_ident(name) FROM unnest('{outbox,o_1,1o,O,o b,ö}'::text[]) AS name",
        );
        for row in rows {
            let [Some(name), Some(quoted)] = &row[..] else {
                panic!("{row:?}");
            };
            let ours = identifier(name);
            assert!(ours == *quoted || ours == format!("\"{name}\""), "{ours}");
        }
    }
}

/// Names such as `order` and `user` are SQL keywords, so statements must quote them.
#[test]
fn accepts_names_that_are_sql_keywords() {
    let fixture = Fixture::bare();
    fixture.db.run(
        "CREATE SCHEMA \"order\";
         CREATE TABLE \"order\".\"user\" (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text,
             payload jsonb, created_at timestamptz DEFAULT now())",
    );
    let aggregate = fixture.aggregate(1);
    let insert = || {
        fixture.db.run(&format!(
            "INSERT INTO \"order\".\"user\" VALUES (gen_random_uuid(), '{aggregate}', 'k', 't', '{{}}')"
        ));
    };
    let run = |command: Invocation| {
        let done = command.args(["--table", "order.user"]).finish();
        done.expect_code(0)
    };
    insert();
    run(fixture.init());
    run(fixture.check());
    let walpost = fixture
        .run()
        .args(["--table", "order.user"])
        .start_streaming();
    insert();
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    run(fixture.verify());
    run(fixture.replay(&["--all", "--yes"])).expect_mentions(&["table \"order\".\"user\""]);
    fixture.wait_for_records(4);
    let maintain = ["--retention", "1s", "--delete-rows"];
    wait_until("the rows to be deleted", || {
        run(fixture.invoke("maintain").args(maintain));
        fixture.db.run("CHECKPOINT");
        fixture.db.number("SELECT count(*) FROM \"order\".\"user\"") == 0
    });
    walpost.terminate().expect_code(0);
}

#[test]
fn check_reports_every_problem_with_its_remedy() {
    let fixture = Fixture::bare();
    fixture.check().finish().expect_code(3).expect_mentions(&[
        "public.outbox",
        "publication",
        "slot",
        "walpost init",
    ]);
    let finished = fixture.check().arg("--json").finish().expect_code(3);
    let report: Value = serde_json::from_str(&finished.stdout).expect("one JSON document");
    assert!(report.to_string().contains("walpost init"), "{report}");
    assert!(objects(&fixture).is_empty(), "check changes nothing");
}

#[test]
fn check_reports_an_unresponsive_broker() {
    let fixture = Fixture::new();
    let finished = fixture
        .invoke("check")
        .args(["--kafka", "127.0.0.1:9"])
        .finish();
    assert!(matches!(finished.code, Some(1 | 3)), "{finished:?}");
    finished.expect_mentions(&["127.0.0.1:9"]);
}

/// `check` takes longest to fail if a server accepts connections but never responds.
#[test]
fn check_times_out_promptly_if_no_broker_responds() {
    let fixture = Fixture::new();
    let address = fixture.broker.address();
    let (_, port) = address.rsplit_once(':').unwrap();
    let hole = Proxy::start(free_port(), port.parse().unwrap());
    hole.set_mode(ProxyMode::Swallow);
    let check = |address: &str| {
        fixture
            .invoke("check")
            .args(["--kafka", address, "--exactly-once"])
    };
    // The time that `check` takes on this machine if a broker responds.
    let started = Instant::now();
    check(&address).finish();
    let overhead = started.elapsed();
    let by_sasl = check(&fixture.broker.sasl_address())
        .args([
            "-Xsecurity.protocol=sasl_plaintext",
            "-Xsasl.mechanism=PLAIN",
        ])
        .arg(format!("-Xsasl.username={SASL_USER}"))
        .arg(format!("-Xsasl.password={SECRET}-wrong"));
    for (check, code, expected) in [
        (check("127.0.0.1:9"), 1, "no broker at 127.0.0.1:9 responds"),
        (by_sasl, 3, "rejects the connection"),
        (
            check(&format!("127.0.0.1:{}", hole.port())),
            1,
            "responds: ",
        ),
    ] {
        let started = Instant::now();
        check
            .finish()
            .expect_code(code)
            .expect_mentions(&[expected]);
        let duration = started.elapsed();
        assert!(
            duration < Duration::from_secs(6) + overhead,
            "{expected}: {duration:?}, and {overhead:?} with a broker that responds"
        );
    }
}

/// The default buffer size applies to every socket on the machine, so a socket of this process has
/// the same buffer size as a socket of the server.
#[test]
fn check_reports_a_small_socket_buffer_for_a_local_server() {
    const SUFFICIENT_BUFFER_BYTES: usize = 4 << 20;
    let (socket, _other) = UnixStream::pair().unwrap();
    let bytes = socket2::SockRef::from(&socket).send_buffer_size().unwrap();
    let fixture = Fixture::new();
    let memory_use = format!("buffer is {bytes} bytes");
    let check = fixture.check().finish().expect_code(0);
    assert_eq!(
        check.stdout.contains(&memory_use),
        bytes < SUFFICIENT_BUFFER_BYTES,
        "{check:?}"
    );
    if bytes < SUFFICIENT_BUFFER_BYTES {
        check.expect_mentions(&["sysctl -w net.core.wmem_default=4194304"]);
    }
    let over_tcp = fixture
        .with_conninfo(&fixture.server.tcp_conninfo(&fixture.name))
        .check();
    let over_tcp = over_tcp.finish().expect_code(0);
    assert!(!over_tcp.stdout.contains("wmem_default"), "{over_tcp:?}");
}

#[test]
fn check_reports_a_missing_topic_with_a_fixed_name() {
    let fixture = Fixture::new();
    let topic = format!("{}.orders", fixture.name);
    let check = || fixture.check().args(["--topic", &topic]);
    let missing = format!("topic \"{topic}\" does not exist");
    check().finish().expect_code(3).expect_mentions(&[&missing]);
    let created = check().args(["--create-topics", "3"]).finish();
    created.expect_code(0).expect_mentions(&["will be created"]);
    fixture.topic(&topic, 1, &[]);
    check()
        .finish()
        .expect_code(0)
        .expect_mentions(&["has 1 partition(s)"]);
}

#[test]
fn imported_debezium_configuration_is_valid_without_changes() {
    let connector = serde_json::json!({ "name": "shop-outbox", "config": {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": "db.example.com",
        "database.user": "debezium",
        "database.password": SECRET,
        "database.dbname": "shop",
        "database.sslmode": "verify-full",
        "topic.prefix": "lab",
        "extended.headers.enabled": "false",
        "table.include.list": "public.outbox",
        "table.whitelist": "public.outbox",
        "transforms": "outbox",
        "transforms.outbox.type": "io.debezium.transforms.outbox.EventRouter",
        "key.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter": "org.apache.kafka.connect.storage.StringConverter",
        "value.converter.replace.null.with.default": "false",
        "producer.override.bootstrap.servers": "kafka1.example.com:9092",
    }})
    .to_string();
    let import = || Invocation::new(["import", "debezium", "-"]).answer(&connector);
    let printed = import().finish().expect_code(3).expect_mentions(&[
        "Carried over",
        "TO DO  database.password: the value is a secret",
        "Unknown",
        "did you mean table.include.list?",
    ]);
    let file = config_file(&printed.stdout);
    let check = |file: &Path| {
        let check = Invocation::new(["check", "--offline", "--config"]).arg(file);
        check.finish()
    };
    check(&file).expect_code(0).expect_mentions(&[
        "table public.outbox, slot \"walpost_shop_outbox\", in shop on db.example.com:5432 as debezium",
        "PostgreSQL and Kafka were not contacted",
    ]);
    import()
        .arg("--output")
        .arg(&file)
        .finish()
        .expect_code(2)
        .expect_mentions(&["already exists"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), printed.stdout);
    let broken = config_file(printed.stdout.replace("snapshot = ", "snapshoot = "));
    check(&broken)
        .expect_code(2)
        .expect_mentions(&["`snapshoot`"]);
    let other = Invocation::new(["import", "debezium", "-"])
        .answer("{\"connector.class\": \"io.debezium.connector.mysql.MySqlConnector\"}");
    other
        .finish()
        .expect_code(2)
        .expect_mentions(&["- can't be imported", "Walpost reads PostgreSQL"]);
}

#[test]
fn generates_completions_for_every_supported_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let finished = Invocation::new(["completions", shell])
            .finish()
            .expect_code(0);
        assert!(finished.stdout.contains("null-payload"), "{shell}");
    }
}

#[test]
fn prints_version_and_help() {
    let finished = Invocation::new(["--version"]).finish().expect_code(0);
    assert_eq!(
        finished.stdout.trim(),
        concat!("walpost ", env!("CARGO_PKG_VERSION"))
    );
    Invocation::new(["run", "--help"])
        .finish()
        .expect_code(0)
        .expect_mentions(&["--null-payload", "WALPOST_KAFKA"]);
}

/// Returns each heading in a help text with the flags listed under it.
fn sections(help: &str) -> Vec<(String, Vec<String>)> {
    let mut sections: Vec<(String, Vec<String>)> = Vec::new();
    for line in help.lines() {
        let flag = line.trim_start();
        match (line.strip_suffix(':'), &mut sections[..]) {
            (Some(heading), _) if flag == line => sections.push((heading.to_owned(), Vec::new())),
            (_, [.., (_, flags)]) if flag.starts_with('-') => {
                // The line can contain a value name with a dash, so only words that start with two
                // dashes are flags.
                let long = flag.split(' ').find(|word| word.starts_with("--"));
                flags.extend(long.map(str::to_owned));
            }
            _ => {}
        }
    }
    sections
}

#[test]
fn help_lists_command_specific_flags_first_and_omits_unused_flags() {
    let everywhere = ["Pipelines and database", "Logging"];
    let records = ["Kafka", "Delivery", "Records", "Limits"];
    for (command, own, shared, useless) in [
        (
            &["init"][..],
            "--owner",
            &[][..],
            &["--kafka", "--window-bytes"][..],
        ),
        (
            &["check"],
            "--json",
            &records,
            &["--window-bytes", "--drain-timeout"],
        ),
        (&["run"], "--init", &records, &[]),
        (
            &["replay"],
            "--dry-run",
            &records,
            &["--link-timeout", "--wal-budget-max", "--retention"],
        ),
        (
            &["skip"],
            "--to",
            &records[..3],
            &["--window-records", "--create-topics"],
        ),
        (
            &["verify"],
            "--since",
            &records,
            &["--on-oversize", "--wal-budget-max", "--link-timeout"],
        ),
        (
            &["checkpoint", "show"],
            "--json",
            &records[..1],
            &["--topic", "--retention"],
        ),
        (
            &["checkpoint", "adopt"],
            "--yes",
            &records[..1],
            &["--topic", "--window-bytes"],
        ),
        (&["maintain"], "--dry-run", &["Retention"], &["--kafka"]),
        (&["status"], "--watch", &[], &["--kafka"]),
    ] {
        let help = |flag| {
            let help = Invocation::new(command.iter().chain(&[flag])).finish();
            sections(&help.expect_code(0).stdout)
        };
        let long = help("--help");
        let (first, flags) = &long[0];
        assert_eq!(first, "Options", "{command:?}");
        assert!(
            flags.iter().any(|flag| flag == own),
            "{command:?}: {flags:?}"
        );
        for heading in everywhere.iter().chain(shared) {
            let has_it = long.iter().any(|(found, _)| found == heading);
            assert!(has_it, "{command:?}: no {heading} in {long:?}");
        }
        let listed: Vec<_> = long.iter().flat_map(|(_, flags)| flags).collect();
        for flag in useless {
            assert!(
                !listed.iter().any(|found| found == flag),
                "{command:?}: {flag}"
            );
        }
        let count = |sections: &[(String, Vec<String>)]| -> usize {
            sections.iter().map(|(_, flags)| flags.len()).sum()
        };
        let short = help("-h");
        // The only flags that `-h` omits are some of the Kafka flags.
        let has_rare = shared.contains(&"Kafka");
        assert_eq!(
            count(&short) < count(&long),
            has_rare,
            "{command:?}: {short:?}"
        );
    }
}

/// Scripts can pass the same flags to every command, even to those that ignore them.
#[test]
fn accepts_common_flags_that_the_help_of_a_command_omits() {
    let fixture = Fixture::new();
    let flags = [
        "--window-bytes",
        "1MiB",
        "--drain-timeout",
        "5s",
        "--link-timeout",
        "5s",
    ];
    fixture.check().args(flags).finish().expect_code(0);
    fixture.verify().args(flags).finish().expect_code(0);
    fixture
        .replay(&["--all", "--yes"])
        .args(flags)
        .finish()
        .expect_code(0);
}

#[test]
fn logs_in_json_format_when_requested() {
    let fixture = Fixture::new();
    let walpost = fixture
        .run()
        .args(["--log-format", "json"])
        .start_streaming();
    let finished = walpost.terminate().expect_code(0);
    for line in finished.stderr.lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
}

#[test]
fn warns_about_implicit_tombstones_if_a_topic_is_compacted() {
    const WARNING: &str = "is compacted, but null_payload is not set";
    let fixture = Fixture::new();
    let topic = format!("{}.compacted", fixture.name);
    fixture.topic(&topic, 1, &[("cleanup.policy", "compact")]);
    let check = |more: &[&str]| {
        let checked = fixture
            .check()
            .args(["--topic", &topic])
            .args(more)
            .finish();
        checked.expect_code(0).stdout
    };
    assert!(check(&[]).contains(WARNING));
    for asked in ["tombstone", "empty"] {
        let output = check(&["--null-payload", asked]);
        assert!(!output.contains(WARNING), "{output}");
    }
    let mut walpost = fixture.start_with(&["--topic", &topic]);
    fixture.insert(&topic, "k");
    walpost.wait_for_log(WARNING);
    walpost.terminate().expect_code(0);
}

/// The producer accepts records up to a size that is above the topic's limit, so Kafka would reject
/// the largest of these records.
#[test]
fn check_warns_about_a_topic_limit_below_the_maximum_record_size() {
    let fixture = Fixture::new();
    let topic = format!("{}.limited", fixture.name);
    fixture.topic(&topic, 1, &[("max.message.bytes", "100000")]);
    let check = |more: &[&str]| {
        let checked = fixture
            .check()
            .args(["--topic", &topic])
            .args(more)
            .finish();
        checked.expect_code(0).stdout
    };
    let output = check(&[]);
    for expected in [
        "WARNING",
        "accepts batches of at most 100000 bytes (max.message.bytes)",
        "records can be up to 1000000 bytes (\"message.max.bytes\" in [kafka])",
        &format!(
            "kafka-configs.sh --bootstrap-server {} --alter --entity-type topics --entity-name {topic} --add-config \
             max.message.bytes=1000061",
            fixture.broker.address()
        ),
    ] {
        assert!(output.contains(expected), "{expected}: {output}");
    }
    let (_, command) = output
        .split_once("kafka-configs.sh --bootstrap-server ")
        .unwrap();
    let words = command.lines().next().unwrap().split_whitespace();
    // Omit the address, because `tool` adds the broker's address itself.
    let arguments: Vec<_> = words.skip(1).collect();
    fixture.broker.tool("kafka.admin.ConfigCommand", &arguments);
    let output = check(&[]);
    assert!(!output.contains("max.message.bytes"), "{output}");
    let output = check(&["-X", "message.max.bytes=2000000"]);
    assert!(output.contains("max.message.bytes=2000061"), "{output}");
}
