//! Requests that `verify` must reject because it can't fulfill them.

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::walpost::Invocation;

#[test]
fn verify_rejects_invalid_arguments_without_connecting() {
    let nowhere = [
        "verify",
        "--postgres",
        "host=/nowhere user=u dbname=d",
        "--kafka",
        "127.0.0.1:9",
    ];
    for (arguments, expected) in [
        (&["--since", "soon"][..], &["--since", "soon"][..]),
        (&["--until", "12"], &["--until", "12"]),
        (
            &["--since", "2026-01-02", "--until", "2026-01-01"],
            &["--since", "--until", "earlier"],
        ),
        (&["--memory", "much"], &["--memory", "much"]),
        (&["--memory", "1MiB"], &["--memory", "4MiB"]),
        (&["--wait", "10"], &["--wait"]),
        (&["--limit", "few"], &["--limit"]),
        (&["--strict", "--since", "1h"], &["--strict", "--since"]),
        (&["--output", "/nowhere/file"], &["--output"]),
        (
            &["--outbox", "messages"],
            &["outbox uses logical decoding messages", "table"],
        ),
    ] {
        Invocation::new(nowhere)
            .args(arguments)
            .finish()
            .expect_code(2)
            .expect_mentions(expected);
    }
    Invocation::new(nowhere)
        .finish()
        .expect_code(1)
        .expect_mentions(&["/nowhere"]);
}

#[test]
fn verify_reports_columns_that_the_table_lacks() {
    let fixture = Fixture::bare();
    fixture.verify().finish().expect_code(3).expect_mentions(&[
        "public.outbox",
        "does not exist",
        "walpost init",
    ]);
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id uuid, aggregatetype text, aggregateid text, type text, payload jsonb)",
    );
    fixture
        .verify()
        .args(["--since", "1h"])
        .finish()
        .expect_code(2)
        .expect_mentions(&["created_at", "--time-column"]);
    fixture
        .verify()
        .args(["--time-column", "type"])
        .finish()
        .expect_code(2)
        .expect_mentions(&["\"type\"", "type other than timestamptz and timestamp"]);
    fixture
        .verify()
        .args(["--header", "type={type}"])
        .finish()
        .expect_code(2)
        .expect_mentions(&["no header contains the event's id"]);
    fixture
        .verify()
        .args(["--topic", "{tenant}"])
        .finish()
        .expect_code(3)
        .expect_mentions(&["tenant", "no column"]);
    // Without any rows in the table, there is nothing to report.
    fixture.verify().finish().expect_code(0);
}

#[test]
fn verify_reports_an_unresponsive_broker() {
    let fixture = Fixture::new();
    fixture.insert("a", "k");
    fixture
        .invoke("verify")
        .args(["--kafka", "127.0.0.1:9"])
        .finish()
        .expect_code(1)
        .expect_mentions(&["127.0.0.1:9"]);
    let log = Fixture::with_outbox(Outbox::Messages);
    log.verify()
        .finish()
        .expect_code(2)
        .expect_mentions(&["no table"]);
}
