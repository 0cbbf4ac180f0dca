//! The watchdog reports every problem that stops a pipeline's progress, once and with its remedy.

use crate::support::browser;
use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, MAJORS, Server};
use crate::support::session::Session;
use crate::support::wait::{avoid_utc_midnight, wait_until};

const PROBLEMS: &str = "walpost_watchdog_problem";

/// Returns whether `/metrics` reports the given kind of problem for the pipeline.
fn is_reported(http: &Http, fixture: &Fixture<'_>, kind: &str) -> bool {
    let series = format!(
        "{PROBLEMS}{{pipeline=\"{}\",kind=\"{kind}\"}}",
        fixture.name
    );
    http.metrics()[&series] > 0.0
}

/// Makes the server switch to a new WAL segment `count` times. Each segment is 16 MiB in size.
fn write_segments(db: &Session, count: usize) {
    for _ in 0..count {
        db.rows("SELECT pg_logical_emit_message(false, 'another', 'x'), pg_switch_wal()");
    }
}

/// Opens a transaction and inserts a row in it, which writes WAL. Also returns the PID of the
/// transaction's backend.
fn open_transaction(fixture: &Fixture<'_>, aggregate: &str) -> (Session, String) {
    let session = fixture.server.session(&fixture.name);
    session.run(&format!("BEGIN; {}", fixture.insert_sql(aggregate, "k")));
    let pid = session.value("SELECT pg_backend_pid()").unwrap();
    (session, pid)
}

/// Returns a connection string for the role that `walpost init` creates, which can see few details
/// of other sessions.
fn as_plain_role(fixture: &Fixture<'_>) -> String {
    fixture.invoke("init").finish().expect_code(0);
    fixture.conninfo_as("walpost")
}

#[test]
fn logs_a_stalled_delivery_once_and_its_recovery_once() {
    let broker = Broker::borrowed();
    let fixture = Fixture::on_servers(Server::shared(MAJOR), &broker);
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    assert!(!is_reported(&http, &fixture, "delivery_stuck"));
    broker.freeze();
    fixture.insert(&aggregate, "k");
    let line = walpost.wait_for_log("watchdog: 1 events are in flight");
    assert!(line.contains("min.insync.replicas"), "{line}");
    assert!(is_reported(&http, &fixture, "delivery_stuck"));
    let problem = &http.pipeline()["problems"][0];
    assert_eq!(problem["kind"], "delivery_stuck", "{problem}");
    assert!(problem["since"].is_number(), "{problem}");
    let shown = fixture
        .invoke("status")
        .args(["--http", http.address()])
        .finish()
        .expect_code(1)
        .expect_mentions(&["1 events are in flight", "min.insync.replicas"]);
    assert_eq!(
        shown.stdout.matches("in flight, but").count(),
        1,
        "{shown:?}"
    );
    broker.thaw();
    walpost.wait_for_log("delivery_stuck resolved");
    assert!(!is_reported(&http, &fixture, "delivery_stuck"));
    assert_eq!(walpost.logged("1 events are in flight"), 1);
    walpost.terminate().expect_code(0);
}

#[test]
fn logs_the_pid_of_a_transaction_that_retains_wal_when_run_as_an_unprivileged_role() {
    for major in [MAJORS[0], MAJORS[MAJORS.len() - 1]] {
        let server = Server::private(major, "max_slot_wal_keep_size = 128MB\n");
        let fixture = Fixture::on_servers(&server, Broker::shared());
        let aggregate = fixture.aggregate(1);
        let mut walpost = fixture
            .with_conninfo(&as_plain_role(&fixture))
            .run()
            .args(["--http", "127.0.0.1:0"])
            .start();
        let http = walpost.http();
        walpost.wait_for_log("streaming");
        let (session, pid) = open_transaction(&fixture, &aggregate);
        write_segments(&fixture.db, 3);
        let line = walpost.wait_for_log("a transaction has been open for ");
        for text in [
            &format!("PID {pid},"),
            "role \"postgres\"",
            &format!("database \"{}\"", fixture.name),
            &format!("pg_catalog.pg_terminate_backend({pid})"),
        ] {
            assert!(line.contains(text), "{text} in {line}");
        }
        assert!(is_reported(&http, &fixture, "long_transaction"));
        assert_eq!(http.get("/readyz").code, 200);
        session.run("COMMIT");
        walpost.wait_for_log("long_transaction resolved");
        assert!(!is_reported(&http, &fixture, "long_transaction"));
        fixture.wait_for_records(1);
        walpost.terminate().expect_code(0);
    }
}

#[test]
fn reports_a_prepared_transaction_that_retains_wal() {
    let settings = "max_slot_wal_keep_size = 128MB\nmax_prepared_transactions = 2\n";
    let server = Server::private(MAJOR, settings);
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    let (session, _) = open_transaction(&fixture, &aggregate);
    session.run("PREPARE TRANSACTION 'forgotten'");
    write_segments(&fixture.db, 3);
    let line = walpost.wait_for_log("prepared transaction \"forgotten\"");
    assert!(line.contains("ROLLBACK PREPARED 'forgotten'"), "{line}");
    session.run("ROLLBACK PREPARED 'forgotten'");
    walpost.wait_for_log("long_transaction resolved");
    walpost.terminate().expect_code(0);
}

#[test]
fn suggests_a_remedy_if_a_slot_is_about_to_be_lost() {
    let server = Server::private(MAJOR, "max_slot_wal_keep_size = 48MB\n");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    let (session, _) = open_transaction(&fixture, &aggregate);
    write_segments(&fixture.db, 6);
    let line = walpost.wait_for_log("is unreserved");
    assert!(
        line.contains("ALTER SYSTEM SET max_slot_wal_keep_size"),
        "{line}"
    );
    assert!(is_reported(&http, &fixture, "slot_unreserved"));
    fixture
        .invoke("status")
        .args(["--http", http.address()])
        .finish()
        .expect_code(1)
        .expect_mentions(&["is unreserved", "ALTER SYSTEM SET"]);
    fixture
        .db
        .run("ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'");
    fixture.db.run("SELECT pg_catalog.pg_reload_conf()");
    walpost.wait_for_log("slot_unreserved resolved");
    session.run("COMMIT");
    fixture.wait_for_records(1);
    wait_until("all problems to be resolved", || {
        http.pipeline()["problems"] == serde_json::json!([])
    });
    walpost.terminate().expect_code(0);
}

/// Creates a table with a partition for the current day in UTC and a default partition.
fn partitioned_by<'s>(server: &'s Server, column_type: &str, settings: &str) -> Fixture<'s> {
    avoid_utc_midnight();
    let fixture = Fixture::bare_on_servers(server, Broker::shared());
    let today = "to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD')";
    let today = fixture.db.value(&format!("SELECT {today}")).unwrap();
    let zone = if column_type == "timestamptz" {
        " 00:00+00"
    } else {
        ""
    };
    fixture.db.run(&format!(
        "CREATE TABLE outbox (id uuid DEFAULT gen_random_uuid(), aggregatetype text, aggregateid text, type text,
             payload jsonb, at {column_type} DEFAULT now(), PRIMARY KEY (id, at)) PARTITION BY RANGE (at);
         CREATE TABLE outbox_rest PARTITION OF outbox DEFAULT;"
    ));
    let tomorrow = fixture
        .db
        .value(&format!("SELECT ('{today}'::date + 1)::text"));
    fixture.db.run(&format!(
        "CREATE TABLE outbox_today PARTITION OF outbox FOR VALUES FROM ('{today}{zone}') TO ('{}{zone}');
         ALTER DATABASE {} {settings};",
        tomorrow.unwrap(),
        fixture.name
    ));
    fixture.init().finish().expect_code(0);
    fixture
}

#[test]
fn warns_about_running_out_of_partitions_until_more_are_created() {
    let types = ["timestamptz", "timestamp", "date", "timestamptz", "date"];
    for (major, column_type) in MAJORS.into_iter().zip(types) {
        let settings = "SET TimeZone = 'America/New_York'";
        let fixture = partitioned_by(Server::shared(major), column_type, settings);
        let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
        let http = walpost.http();
        let line = walpost.wait_for_log("the last partition of table public.outbox ends at ");
        assert!(line.contains("T00:00:00Z: later rows"), "{line}");
        assert!(line.contains("walpost maintain"), "{line}");
        assert!(is_reported(&http, &fixture, "partitions_run_out"));
        if major == 18 {
            let page = browser::document(&format!("http://{}/", http.address()));
            let problem = "the last partition of table public.outbox ends at ";
            assert!(page.contains(problem), "{page}");
        }
        let end = "SELECT (extract(epoch FROM date_trunc('day', now() AT TIME ZONE 'UTC')) + 86400)::int8";
        let end = fixture.db.number(end) as f64;
        let metric = |name: &str| http.metric(name, &fixture.name);
        assert_eq!(
            metric("walpost_partitions_end_timestamp_seconds"),
            Some(end)
        );
        assert_eq!(metric("walpost_partitions_ahead"), Some(0.0));
        fixture
            .invoke("status")
            .args(["--http", "off"])
            .finish()
            .expect_code(1)
            .expect_mentions(&["the last partition of table public.outbox"]);
        fixture
            .invoke("maintain")
            .args(["--partitions-ahead", "3"])
            .finish()
            .expect_code(0);
        walpost.wait_for_log("partitions_run_out resolved");
        let end = end + 3.0 * 86_400.0;
        // Creating the first partition is enough to resolve the problem, so wait for the other
        // partitions.
        wait_until("all partitions to be known", || {
            metric("walpost_partitions_end_timestamp_seconds") == Some(end)
                && metric("walpost_partitions_ahead") == Some(3.0)
        });
        walpost.terminate().expect_code(0);
    }
}

/// The watchdog reports the end of the last partition regardless of DateStyle. If the last
/// partition has no upper bound, there is no end to report.
#[test]
fn reports_when_the_last_partition_ends_unless_it_has_no_upper_bound() {
    let style = "SET DateStyle = 'SQL, DMY'";
    let fixture = partitioned_by(Server::shared(MAJOR), "timestamptz", style);
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    wait_until("the end to be known", || {
        is_reported(&http, &fixture, "partitions_run_out")
            && !http.pipeline()["partitions_end"].is_null()
    });
    fixture.db.run(
        "CREATE TABLE outbox_later PARTITION OF outbox FOR VALUES FROM ('3000-01-01 00:00+00') TO (MAXVALUE)",
    );
    wait_until("the end to be unknown", || {
        http.pipeline()["partitions_end"].is_null()
            && !is_reported(&http, &fixture, "partitions_run_out")
    });
    walpost.terminate().expect_code(0);
}
