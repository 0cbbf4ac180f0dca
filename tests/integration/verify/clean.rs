//! Correctly delivered events pass verification, whatever the structure of the table and the
//! topics.

use super::{ForgedRecord, insert_rows, verify, verify_with};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::walpost::config_file;

in_both_modes! { verify_finds_no_problem_after_delivery_under_load }

fn verify_finds_no_problem_after_delivery_under_load(exactly_once: bool) {
    let fixture = Fixture::new().in_mode(exactly_once);
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let walpost = fixture.start();
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    load.wait_for_transactions(200);
    // Other sessions keep writing, so some records belong to rows that `verify` has not read.
    let verdict = verify(&fixture);
    assert!(verdict.ok, "{}", verdict.counts());
    load.stop();
    let history = fixture.history();
    let verdict = verify(&fixture);
    let all = history.len();
    assert_eq!(
        verdict.counts(),
        format!("rows {all}, records {all}, delivered {all}")
    );
    assert_eq!(verdict.notes(), "[]");
    fixture.verify().finish().expect_code(0).expect_mentions(&[
        "public.outbox",
        "delivered",
        "ok",
        "rows read",
        "records read",
    ]);
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_finds_all_records_even_if_the_leader_initially_reports_an_older_end_offset() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "first");
    fixture.insert(&aggregate, "second");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let proxy = broker.proxy();
    let lag = proxy.lag_behind(1);
    let far = format!("bootstrap.servers=127.0.0.1:{}", proxy.port());
    let verdict = verify_with(&fixture, &["-X", &far]);
    assert_eq!(verdict.counts(), "rows 2, records 2, delivered 2");
    assert!(
        lag.has_caught_up(),
        "verify did not read until the leader had caught up"
    );
}

#[test]
fn verify_accepts_events_repeated_in_order_after_a_crash() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(2);
    let mut walpost = fixture.start();
    let load = fixture.load(&[&aggregate]);
    for _ in 0..3 {
        load.wait_for_transactions(50);
        fixture.kill(walpost);
        walpost = fixture.start();
    }
    load.stop();
    let verdict = verify(&fixture);
    let counts = &verdict.pipeline["counts"];
    assert_eq!(counts["delivered"], counts["rows"]);
    assert!(verdict.ok, "{}", verdict.counts());
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_counts_replayed_events_separately() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let ids = insert_rows(&fixture, &aggregate, &["a", "b"]);
    let record = |number: usize| ForgedRecord::new(&aggregate, ["a", "b"][number], &ids[number]);
    record(0).at(0x20, 0).produce(fixture.broker);
    record(0)
        .at(0x10, 0)
        .with("walpost-replay", "run-1")
        .produce(fixture.broker);
    record(1)
        .with("walpost-replay", "run-1")
        .produce(fixture.broker);
    let verdict = verify(&fixture);
    assert!(verdict.ok);
    assert_eq!(
        verdict.counts(),
        "rows 2, records 3, delivered 2, replayed 2"
    );
}

#[test]
fn verify_formats_values_like_the_replication_stream() {
    let fixture = Fixture::with_table(
        "CREATE TYPE mood AS ENUM ('sad', 'glad');
         CREATE TABLE outbox (id int8 PRIMARY KEY, \"order\" bool, \"A\"\"b\" char(5), at timestamptz,
             raw bytea, mood mood, shard int, payload text)",
    );
    for setting in [
        "timezone = 'Asia/Kolkata'",
        "bytea_output = escape",
        "datestyle = 'German'",
    ] {
        let name = &fixture.name;
        fixture
            .db
            .run(&format!("ALTER DATABASE {name} SET {setting}"));
    }
    let topic = format!("{}-t", fixture.name);
    fixture.topic(&topic, 2, &[]);
    let walpost = fixture.start_with_file(&format!(
        "topic = '{}-{{order}}'
         key = '{{A\"b}}|{{at}}|{{raw}}|{{mood}}'
         headers = {{ event = '{{id}}' }}
         partition = 'shard'",
        fixture.name
    ));
    fixture.db.run(
        "INSERT INTO outbox SELECT n, true, 'x', now(), '\\x00ff', 'glad', n % 2, repeat('p', 1000)
         FROM generate_series(1, 10) AS n",
    );
    fixture.wait_for_records(10);
    fixture.wait_until_confirmed();
    let config = format!(
        "[[pipeline]]\nname = '{0}'\ntopic = '{0}-{{order}}'\nkey = '{{A\"b}}|{{at}}|{{raw}}|{{mood}}'\n\
         headers = {{ event = '{{id}}' }}\npartition = 'shard'\n",
        fixture.name
    );
    let file = config_file(&config);
    let file = file.display().to_string();
    let verdict = verify_with(&fixture, &["--config", &file]);
    assert_eq!(verdict.counts(), "rows 10, records 10, delivered 10");
    // Change one row so that it has no topic, and change the partition number of another row so
    // that it differs from the partition of its record.
    fixture.db.run("UPDATE outbox SET \"order\" = NULL WHERE id = 1; UPDATE outbox SET shard = 1 - shard WHERE id = 2");
    let verdict = verify_with(&fixture, &["--config", &file]);
    assert_eq!(
        verdict.counts(),
        "rows 10, records 10, delivered 9, misplaced 1, unroutable 1, unexpected 1"
    );
    walpost.terminate().expect_code(0);
}

#[test]
fn verify_finds_rows_of_partitions() {
    let fixture = Fixture::bare();
    fixture.init().arg("--partitioned").finish().expect_code(0);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.insert(&aggregate, "a");
    fixture.db.run(&format!(
        "INSERT INTO outbox (aggregatetype, aggregateid, type, created_at)
         VALUES ('{aggregate}', 'b', 't', now() + interval '1 day'), ('{aggregate}', 'c', 't', 'infinity')"
    ));
    fixture.wait_for_records(3);
    assert_eq!(verify(&fixture).counts(), "rows 3, records 3, delivered 3");
    walpost.terminate().expect_code(0);
}
