//! Tests `walpost status` with a running process, with a database, and with both.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::thread;

use serde_json::Value;

use super::init::psql_file;
use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::reaper;
use crate::support::wait::wait_until;
use crate::support::walpost::{Invocation, Walpost, config_file};

fn start(fixture: &Fixture<'_>) -> (Walpost, Http) {
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    (walpost, http)
}

/// Returns a `walpost status` command that queries the fixture's database and the process at the
/// given address.
fn status(fixture: &Fixture<'_>, address: &str) -> Invocation {
    fixture.invoke("status").args(["--http", address])
}

/// Returns the cells of the table row that starts with the given name.
fn row<'t>(text: &'t str, name: &str) -> Vec<&'t str> {
    let line = text.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no row of {name} in:\n{text}"));
    line.split("  ")
        .map(str::trim)
        .filter(|cell| !cell.is_empty())
        .collect()
}

#[test]
fn status_shows_process_and_database_data_for_a_healthy_pipeline() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let (walpost, http) = start(&fixture);
    fixture.insert(&aggregate, "k");
    fixture.wait_for_records(1);
    fixture.wait_until_confirmed();
    wait_until("readiness", || http.get("/readyz").code == 200);
    let shown = status(&fixture, http.address()).finish().expect_code(0);
    let cells = row(&shown.stdout, &fixture.name);
    assert_eq!(cells[1], "streaming", "{cells:?}");
    assert_eq!(cells[10], "0", "in flight: {cells:?}");
    assert_eq!(cells[8], "reserved", "{cells:?}");
    let json = status(&fixture, http.address())
        .arg("--json")
        .finish()
        .expect_code(0);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!(json["healthy"], true, "{json}");
    let pipeline = &json["pipelines"][0];
    assert_eq!(pipeline["connector"]["events"]["delivered"], 1, "{json}");
    assert_eq!(pipeline["database"]["active"], true, "{json}");
    // If no database is given, only the process is queried.
    let alone = Invocation::new(["status", "--http", http.address()])
        .finish()
        .expect_code(0);
    assert_eq!(row(&alone.stdout, &fixture.name)[1], "streaming");
    walpost.terminate().expect_code(0);
}

#[test]
fn status_queries_only_the_database_if_walpost_is_not_running() {
    let fixture = Fixture::new();
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = nowhere.local_addr().unwrap().to_string();
    drop(nowhere);
    let shown = status(&fixture, &address)
        .finish()
        .expect_code(1)
        .expect_mentions(&[
            "no response from Walpost",
            &address,
            "no process is reading slot",
        ]);
    let cells = row(&shown.stdout, &fixture.name);
    assert_eq!(cells[1], "not read", "{cells:?}");
    assert!(cells.contains(&"reserved"), "{cells:?}");
    // Without an HTTP address, only the database shows that the process is running.
    let walpost = fixture.start();
    let shown = status(&fixture, "off").finish().expect_code(0);
    assert_eq!(row(&shown.stdout, &fixture.name)[1], "in use");
    walpost.terminate().expect_code(0);
}

#[test]
fn status_reports_every_problem() {
    let bare = Fixture::bare();
    status(&bare, "off")
        .finish()
        .expect_code(1)
        .expect_mentions(&["does not exist", "walpost init"]);
    Invocation::new([
        "status",
        "--postgres",
        "host=/nowhere dbname=x user=y",
        "--http",
        "off",
    ])
    .finish()
    .expect_code(1)
    .expect_mentions(&["catalog query failed", "/nowhere"]);
    // The process at this address runs a different pipeline.
    let fixture = Fixture::new();
    let (walpost, http) = start(&fixture);
    let other = Fixture::new();
    status(&other, http.address())
        .finish()
        .expect_code(1)
        .expect_mentions(&["has no pipeline with this name"]);
    Invocation::new(["status", "--pipeline", "nobody", "--http", http.address()])
        .finish()
        .expect_code(1)
        .expect_mentions(&["no pipeline with this name was found"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn status_rejects_a_configuration_without_any_server_to_query() {
    Invocation::new(["status", "--http", "off"])
        .finish()
        .expect_code(2)
        .expect_mentions(&["nothing to query", "--postgres", "--http"]);
    Invocation::new(["status", "--config", "/nowhere/walpost.toml"])
        .finish()
        .expect_code(2)
        .expect_mentions(&["/nowhere/walpost.toml"]);
}

#[test]
fn status_reports_that_the_http_server_is_not_walpost() {
    let other_program = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other_program.local_addr().unwrap().to_string();
    let answers = [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        "SSH-2.0-x\r\n",
    ];
    let server = thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = other_program.accept().unwrap();
            // Read the whole request before responding.
            let mut request = BufReader::new(stream.try_clone().unwrap()).lines();
            while request.next().is_some_and(|line| !line.unwrap().is_empty()) {}
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    for expected in ["is not Walpost", "does not use HTTP"] {
        Invocation::new(["status", "--http", &address])
            .finish()
            .expect_code(1)
            .expect_mentions(&[&address, expected]);
    }
    server.join().unwrap();
}

#[test]
fn watch_mode_continues_until_interrupted() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let (walpost, http) = start(&fixture);
    let watch = status(&fixture, http.address())
        .args(["--watch", "--json"])
        .start();
    let delivered = |n: usize| {
        watch.output().lines().any(|line| {
            let json: Value = serde_json::from_str(line).unwrap_or_default();
            json["pipelines"][0]["connector"]["events"]["delivered"] == n
        })
    };
    wait_until("the first check", || delivered(0));
    fixture.insert(&aggregate, "k");
    wait_until("a later check", || delivered(1));
    watch.kill();
    walpost.terminate().expect_code(0);
}

/// When writing to a pipe, `status --watch` prints the table repeatedly without escape sequences,
/// so that a program can parse the output.
#[test]
fn watch_mode_writes_no_escape_sequences_to_a_pipe() {
    let fixture = Fixture::new();
    let (walpost, http) = start(&fixture);
    let watch = status(&fixture, http.address()).arg("--watch").start();
    let tables = || watch.output().matches("PIPELINE  ").count();
    wait_until("a second table", || tables() >= 2);
    let shown = watch.kill().stdout;
    assert!(!shown.contains('\x1b'), "{shown:?}");
    assert!(shown.starts_with("PIPELINE  "), "{shown:?}");
    walpost.terminate().expect_code(0);
}

/// On a terminal, each frame overwrites the previous one and fits on the screen.
#[test]
fn watch_mode_fits_the_terminal_without_clearing_it() {
    let fixture = Fixture::new();
    let (walpost, http) = start(&fixture);
    // Nothing listens on this address, and the error message is longer than a line.
    let nowhere = TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = nowhere.local_addr().unwrap().to_string();
    drop(nowhere);
    for (address, columns, expected) in [
        (http.address(), 40, "PIPELINE"),
        (&silent, 60, "no response"),
    ] {
        let file = reaper::folder("terminal").join("shown");
        let watch = status(&fixture, address)
            .arg("--watch")
            .on_terminal(columns, 12)
            .output_to(File::create(&file).unwrap())
            .start();
        let shown = || fs::read_to_string(&file).unwrap();
        wait_until("a third frame", || shown().matches("\x1b[?7h").count() >= 3);
        watch.kill();
        let shown = shown();
        // The previous contents of the screen must be scrolled up rather than erased.
        let (before, frames) = shown.split_once("\x1b[?7l").expect(&shown);
        assert_eq!(before.matches('\n').count(), 12, "{shown:?}");
        for clear in ["\x1b[2J", "\x1b[3J", "\x1bc", "\n"] {
            assert!(!frames.contains(clear), "{clear:?}: {shown:?}");
        }
        let (frame, _) = frames.split_once("\x1b[J\x1b[?7h").expect(&shown);
        assert!(frame.contains(expected), "{frame:?}");
        let pieces = frame.split("\x1b[");
        let lines: Vec<_> = pieces.filter_map(|piece| piece.split_once('H')).collect();
        assert!((3..=12).contains(&lines.len()), "{frame:?}");
        for (_, text) in lines {
            assert!(text.chars().count() <= columns, "{text:?}: {frame:?}");
        }
    }
    walpost.terminate().expect_code(0);
}

#[test]
fn status_shows_the_last_halt_reason_after_the_process_has_exited() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    fixture.accept_any_name("outbox");
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    fixture.insert("no topic", "bad");
    let halted = walpost.finish().expect_code(3);
    let (_, at) = halted.stderr.rsplit_once("walpost skip --to ").unwrap();
    let at: String = at.chars().take_while(|c| !c.is_whitespace()).collect();
    let from_database = || status(&fixture, "off").finish();
    from_database().expect_code(1).expect_mentions(&[
        "halted at 20",
        "(Walpost 0.1.0): row with id",
        "is not a valid topic name",
    ]);
    let json = status(&fixture, "off").arg("--json").finish();
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    let halt = &json["pipelines"][0]["database"]["last_halt"];
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(halt["host"], host.trim(), "{json}");

    fixture.skip(&at).arg("--yes").finish().expect_code(0);
    let walpost = fixture.start();
    let shown = from_database().expect_code(0);
    assert!(!shown.stdout.contains("halted"), "{}", shown.stdout);
    fixture.insert(&aggregate, "after");
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let shown = from_database().expect_code(1);
    assert!(!shown.stdout.contains("halted"), "{}", shown.stdout);
}

#[test]
fn halts_even_if_the_role_cannot_record_the_halt() {
    let fixture = Fixture::new();
    fixture.accept_any_name("outbox");
    let role = fixture.conninfo_as(&fixture.name);
    psql_file(&fixture, "role.sql");
    fixture.db.run(&format!(
        "REVOKE UPDATE ON walpost.slot_state FROM {}",
        fixture.name
    ));
    fixture.insert("no topic", "bad");
    let halted = fixture.with_conninfo(&role).run().finish().expect_code(3);
    halted.expect_mentions(&[
        "halted: row with id",
        "failed to record the halt in walpost.slot_state",
        "permission denied",
    ]);
}

#[test]
fn status_shows_the_dead_letter_count_and_the_last_dead_letter() {
    let fixture = Fixture::new();
    fixture.accept_any_name("outbox");
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let flags = [
        "--on-unroutable",
        "dead-letter",
        "--dead-letter-topic",
        &topic,
    ];
    let mut walpost = fixture.start_with(&[&flags[..], &["--http", "127.0.0.1:0"]].concat());
    let http = walpost.http();
    fixture.insert("no topic", "first");
    fixture.insert("nor this", "second");
    fixture.wait_for_records(2);
    fixture.wait_until_confirmed();
    wait_until("readiness", || http.get("/readyz").code == 200);
    status(&fixture, http.address())
        .finish()
        .expect_code(0)
        .expect_mentions(&[
            &format!(
                "{}: 2 dead letters in topic {topic:?} since the process started",
                fixture.name
            ),
            "the last one is for the event at 00000000/",
            "\"outbox.event.nor this\" is not a valid topic name",
        ]);
    walpost.terminate().expect_code(0);
}

#[test]
fn status_shows_slots_without_a_pipeline() {
    let fixture = Fixture::new();
    let other = format!("walpost_{}_gone", fixture.name);
    fixture.db.run(&format!(
        "SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')"
    ));
    let file = config_file(format!(
        "[kafka]\n'bootstrap.servers' = '{}'\n[[pipeline]]\nname = '{}'\npostgres = \"{}\"\n",
        fixture.broker.address(),
        fixture.name,
        fixture.conninfo()
    ));
    let walpost = fixture.start();
    let shown = || {
        let status = Invocation::new(["status", "--http", "off", "--config"]);
        status.arg(&file).finish().expect_code(0).stdout
    };
    let found = shown();
    let drop_slot = format!("pg_catalog.pg_drop_replication_slot('{other}')");
    assert!(found.contains(&drop_slot), "{found}");
    fixture.db.run(&format!("SELECT {drop_slot}"));
    let found = shown();
    assert!(!found.contains(&other), "{found}");
    walpost.terminate().expect_code(0);
}
