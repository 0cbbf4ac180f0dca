//! Walpost displays text from outside: server errors, ids and names. Such text may contain terminal
//! control sequences or imitate log lines. Therefore, Walpost escapes the control characters in
//! such text.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::thread;

use serde_json::Value;

use crate::support::fixture::Fixture;
use crate::support::http::Http;
use crate::support::kafka::Broker;
use crate::support::lsn::lsn_text;
use crate::support::reaper;
use crate::support::wait::{WAIT_TIMEOUT, wait_for, wait_until};
use crate::support::walpost::{Finished, Invocation};

/// Text that would set the window title, clear the screen, forge a log line, return to the start of
/// the line, clear the screen again with a C1 code, and reverse the direction of the text that
/// follows.
const EVIL: &str =
    "\x1b]0;owned\x07\x1b[2J\nERROR fake line\rover\u{9b}2J\u{7f}\u{202e}desrever\u{2028}\u{2066}";
/// The part of [`EVIL`] that would appear as a separate line if it were not escaped.
const FORGED_LINE: &str = "ERROR fake line";

/// Returns whether a character must be escaped before it is displayed.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Returns a description of all unescaped control characters and forged lines in the text, or
/// `None` if there are none.
fn unescaped_control(text: &str) -> Option<String> {
    let found: Vec<_> = text
        .chars()
        .filter(|c| *c != '\n' && is_control(*c))
        .collect();
    let forged = text.lines().any(|line| line.starts_with(FORGED_LINE));
    (forged || !found.is_empty()).then(|| format!("{found:?}, forged: {forged}, in {text:?}"))
}

fn expect_escaped(what: &str, text: &str) {
    let found = unescaped_control(text);
    assert!(found.is_none(), "{what}: {found:?}");
}

/// Collects violations in all displayed text, so that a failure reports all of them.
#[derive(Default)]
struct EscapeViolations(Vec<String>);

impl EscapeViolations {
    fn check_text(&mut self, what: &str, text: &str) {
        let found = unescaped_control(text);
        self.0.extend(found.map(|found| format!("{what}: {found}")));
    }

    /// Checks that the output contains the malicious text, and only in escaped form.
    fn check_output(&mut self, what: &str, finished: &Finished) {
        self.check_text(what, &finished.stdout);
        self.check_text(what, &finished.stderr);
        let output = format!("{}{}", finished.stdout, finished.stderr);
        // The escape character is escaped as \u{1b} in text and as four hex digits in JSON. Both
        // contain "1b".
        if !output.contains(FORGED_LINE) || !output.contains("1b") {
            self.0.push(format!("{what} shows no such text: {output}"));
        }
    }

    fn expect_none(&self) {
        assert!(self.0.is_empty(), "{:#?}", self.0);
    }
}

/// Asserts that the output contains the malicious text, and only in escaped form.
fn expect_shown_escaped(what: &str, finished: &Finished) {
    let mut findings = EscapeViolations::default();
    findings.check_output(what, finished);
    findings.expect_none();
}

/// Returns the text as an SQL literal.
fn literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// Starts a server that responds to every connection with the given error message. PostgreSQL can
/// send such a message during startup, but so can any other program that accepts connections.
fn hostile_postgres(message: &str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut fields = Vec::new();
    for (kind, text) in [
        (b'S', "FATAL"),
        (b'V', "FATAL"),
        (b'C', "57P03"),
        (b'M', message),
        (b'D', message),
        (b'H', message),
    ] {
        fields.push(kind);
        fields.extend(text.as_bytes());
        fields.push(0);
    }
    fields.push(0);
    let mut answer = vec![b'E'];
    answer.extend(u32::try_from(fields.len() + 4).unwrap().to_be_bytes());
    answer.extend(fields);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut length = [0; 4];
            if stream.read_exact(&mut length).is_ok() {
                let mut rest = vec![0; u32::from_be_bytes(length) as usize - 4];
                let _ = stream
                    .read_exact(&mut rest)
                    .and_then(|()| stream.write_all(&answer));
            }
        }
    });
    format!("host=127.0.0.1 port={port} user=u dbname=d sslmode=disable")
}

/// Starts a web server that responds to every request with the given document.
fn hostile_walpost(document: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream: TcpStream = stream.unwrap();
            let mut head = Vec::new();
            let mut bytes = [0; 1024];
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read(&mut bytes) {
                    Ok(read) if read > 0 => head.extend_from_slice(&bytes[..read]),
                    _ => break,
                }
            }
            let length = document.len();
            let _ = write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{document}"
            );
        }
    });
    address
}

#[test]
fn every_command_escapes_control_characters_in_server_errors() {
    let conninfo = hostile_postgres(EVIL);
    let mut findings = EscapeViolations::default();
    for command in [
        ["check"].as_slice(),
        &["check", "--json"],
        &["init"],
        &["maintain", "--retention", "24h"],
        &["replay", "--all", "--dry-run"],
        &["skip", "--to", "0/1"],
        &["status", "--http", "off"],
        &["status", "--http", "off", "--json"],
        &["verify"],
        &["verify", "--json"],
        &["checkpoint", "show"],
        &["checkpoint", "adopt"],
    ] {
        for format in ["text", "json", "auto"] {
            let mut run =
                Invocation::new(command).args(["--postgres", &conninfo, "--log-format", format]);
            if !["init", "maintain", "status"].contains(&command[0]) {
                run = run.args(["--kafka", &Broker::shared().address()]);
            }
            let finished = run.finish();
            assert_ne!(finished.code, Some(0), "{command:?}");
            let what = format!("{command:?} {format}");
            findings.check_output(&what, &finished);
            if command.contains(&"--json") && !finished.stdout.is_empty() {
                serde_json::from_str::<Value>(&finished.stdout).expect("one JSON document");
            }
            if format == "json" {
                for line in finished.stderr.lines() {
                    serde_json::from_str::<Value>(line).expect("a JSON document a line");
                }
            }
        }
    }
    findings.expect_none();
}

#[test]
fn server_errors_cannot_forge_log_lines_or_http_responses_or_systemd_status() {
    let folder = reaper::folder("notify");
    let systemd = UnixDatagram::bind(folder.join("socket")).unwrap();
    systemd.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let conninfo = hostile_postgres(&format!("x\nMAINPID=1\nWATCHDOG=trigger\n{EVIL}"));
    let mut walpost = Invocation::new(["run", "--postgres", &conninfo])
        .args(["--kafka", &Broker::shared().address()])
        .args(["--http", "127.0.0.1:0"])
        .env("NOTIFY_SOCKET", folder.join("socket"))
        .start();
    let http = walpost.http();
    let ready = wait_for("the error", || {
        let answer = http.get("/readyz");
        answer.body.contains(FORGED_LINE).then_some(answer)
    });
    assert_eq!(ready.body.lines().count(), 1, "{ready:?}");
    expect_escaped("/readyz", &ready.body);
    for path in ["/status", "/history", "/metrics"] {
        expect_escaped(path, &http.get(path).body);
    }
    let error = http.pipeline()["last_error"]["message"].clone();
    assert!(
        error.as_str().unwrap().contains(EVIL),
        "JSON preserves the whole text: {error}"
    );
    let log_line = wait_for("the notification of systemd", || {
        let mut bytes = [0; 4096];
        let read = systemd.recv(&mut bytes).unwrap();
        let text = String::from_utf8(bytes[..read].to_vec()).unwrap();
        for line in text.lines() {
            let (name, _) = line.split_once('=').unwrap_or((line, ""));
            assert!(["STATUS", "READY"].contains(&name), "{text:?}");
        }
        expect_escaped("systemd", &text);
        text.contains("MAINPID").then_some(text)
    });
    assert!(log_line.contains("STATUS="), "{log_line:?}");
    let status = Invocation::new(["status", "--http", http.address()]).finish();
    expect_shown_escaped("status", &status);
    walpost.wait_for_log(FORGED_LINE);
    let finished = walpost.terminate();
    expect_shown_escaped("run", &finished);
}

/// Any role that writes an event can choose its id.
#[test]
fn escapes_event_ids_in_all_output() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id text PRIMARY KEY, aggregatetype text, aggregateid text, payload text,
         created_at timestamptz DEFAULT now())",
    );
    let aggregate = fixture.aggregate(1);
    let id = literal(EVIL);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES ({id}, 'not a topic', 'k', '{{}}')"
    ));
    let mut findings = EscapeViolations::default();
    let halted = fixture.run().finish().expect_code(3);
    findings.check_output("a halt", &halted);
    let end = lsn_text(fixture.history()[0].end);
    let skip = fixture.skip(&end).arg("--dry-run").finish().expect_code(0);
    findings.check_output("skip", &skip);
    let verified = fixture.verify().finish().expect_code(1);
    findings.check_output("verify: unroutable", &verified);
    let file = reaper::folder("verify").join("findings.json");
    let json = fixture
        .verify()
        .arg("--json")
        .arg("--output")
        .arg(&file)
        .finish();
    findings.check_output("verify --json", &json);
    findings.check_text("verify --output", &std::fs::read_to_string(&file).unwrap());
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert!(json.to_string().contains("fake line"), "{json}");

    // After this update, Walpost could deliver the event. To make sure that the event is never
    // delivered, the statements below move the slot past it.
    fixture
        .db
        .run(&format!("UPDATE outbox SET aggregatetype = '{aggregate}'"));
    // Without the slot's row in walpost.slot_state, Walpost does not detect that the slot was
    // moved.
    fixture.db.run("DELETE FROM walpost.slot_state");
    fixture.db.rows(&format!(
        "SELECT pg_catalog.pg_replication_slot_advance('{}', pg_current_wal_lsn())",
        fixture.slot()
    ));
    // `verify` reports the event as missing only while a pipeline is running. Otherwise, `verify`
    // would report the event as pending.
    let walpost = fixture.start();
    let missing = fixture.verify().finish().expect_code(1);
    walpost.terminate().expect_code(0);
    assert!(missing.stdout.contains("MISSING"), "{missing:?}");
    findings.check_output("verify: missing", &missing);
    let replay = fixture.replay(&[
        "--dry-run",
        "--id",
        EVIL,
        "--id",
        "none\x1b[2J\nERROR fake line",
    ]);
    findings.check_output("replay", &replay.finish());
    findings.expect_none();
}

#[test]
fn checkpoint_command_escapes_the_id_of_the_last_event() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id text PRIMARY KEY, aggregatetype text, aggregateid text, payload text)",
    )
    .exactly_once();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let id = literal(EVIL);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES ({id}, '{aggregate}', 'k', '{{}}')"
    ));
    fixture.wait_until_confirmed();
    walpost.terminate().expect_code(0);
    let shown = fixture.checkpoint("show").finish().expect_code(0);
    expect_shown_escaped("checkpoint show", &shown);
    let json = fixture
        .checkpoint("show")
        .arg("--json")
        .finish()
        .expect_code(0);
    expect_shown_escaped("checkpoint show --json", &json);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert!(json.to_string().contains("fake line"), "{json}");
}

/// A table's owner can choose any name for it, and the output of `maintain` contains that name.
#[test]
fn escapes_table_and_column_names() {
    let fixture = Fixture::bare();
    let name = format!("out{EVIL}").replace('\0', "");
    let cut: String = name.chars().take(40).collect();
    fixture.db.run(&format!(
        "CREATE TABLE \"{cut}\" (id int, aggregatetype text, aggregateid text, payload text)"
    ));
    let table = format!("public.\"{cut}\"");
    let with_table = |command: &str| fixture.invoke(command).args(["--table", &table]);
    let mut findings = EscapeViolations::default();
    let made = with_table("init").finish().expect_code(0);
    findings.check_output("init", &made);
    let printed = with_table("init").arg("--print").finish().expect_code(0);
    let comments = printed
        .stdout
        .lines()
        .filter(|line| line.starts_with("-- "));
    findings.check_text("init --print", &comments.collect::<Vec<_>>().join("\n"));
    let forged = printed
        .stdout
        .lines()
        .find(|line| line.starts_with(FORGED_LINE));
    assert!(
        forged.is_none_or(|line| line.contains("over")),
        "{forged:?}"
    );
    let checked = with_table("check").args(["--kafka", &fixture.broker.address()]);
    findings.check_output("check", &checked.finish());
    let kept = with_table("maintain").args(["--retention", "1s"]).finish();
    findings.check_output("maintain", &kept);
    findings.expect_none();
}

/// Any program that listens on Walpost's address can send a response to `walpost status`.
#[test]
fn status_escapes_responses_from_other_programs() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    wait_until("readiness", || http.get("/readyz").code == 200);
    let mut status = http.status();
    walpost.terminate().expect_code(0);
    let pipeline = &mut status["pipelines"][0];
    pipeline["name"] = EVIL.into();
    pipeline["ready"] = false.into();
    pipeline["not_ready"] = EVIL.into();
    let summary = &mut pipeline["summary"];
    summary["state"] = EVIL.into();
    summary["reasons"] = serde_json::json!([{
        "severity": "critical", "source": "connector", "what": EVIL, "remedy": EVIL, "since": null
    }]);
    for document in [status.to_string(), format!("{{\"version\": \"{EVIL}")] {
        let address = hostile_walpost(document);
        for arguments in [
            ["--http", &*address].as_slice(),
            &["--http", &address, "--json"],
        ] {
            let shown = Invocation::new(["status"])
                .args(arguments)
                .finish()
                .expect_code(1);
            expect_escaped("status", &shown.stdout);
            expect_escaped("status", &shown.stderr);
        }
    }
}

/// The status page is displayed in a browser, so it must not contain characters that change the
/// direction of text.
#[test]
fn status_page_escapes_error_messages() {
    let conninfo = hostile_postgres("<img src=x onerror=document.title='owned'>\u{202e}desrever");
    let mut walpost = Invocation::new(["run", "--postgres", &conninfo])
        .args(["--kafka", &Broker::shared().address()])
        .args(["--http", "127.0.0.1:0"])
        .start();
    let http: Http = walpost.http();
    wait_until("the error", || {
        http.get("/readyz").body.contains("desrever")
    });
    let document = crate::support::browser::document(&format!("http://{}/", http.address()));
    assert!(document.contains("&lt;img src=x"), "{document}");
    assert!(!document.contains("<title>owned"), "{document}");
    assert!(
        document.contains("desrever") && !document.contains('\u{202e}'),
        "{document}"
    );
    walpost.terminate();
}

/// Records are data and must be delivered unchanged, even if standard output is a terminal.
#[test]
fn json_records_on_standard_output_are_escaped_and_decode_to_the_original_values() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)",
    );
    let walpost = fixture
        .invoke("run")
        .args(["--sink", "stdout"])
        .start_streaming();
    let evil = literal(EVIL);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, 'order', {evil}, {evil})"
    ));
    let line = wait_for("a record", || {
        walpost.output().lines().next().map(str::to_owned)
    });
    expect_escaped("a record", &line);
    let record: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(
        (&record["key"], &record["value"]),
        (&EVIL.into(), &EVIL.into())
    );
    walpost.terminate().expect_code(0);
}

/// If the disk is full, or if a reader such as `head` exits early, a command must report an error
/// instead of panicking.
#[test]
fn commands_exit_with_an_error_if_their_output_cannot_be_written() {
    for command in [["completions", "bash"].as_slice(), &["init", "--print"]] {
        let full = std::fs::File::create("/dev/full").unwrap();
        let walpost = Invocation::new(command)
            .env("PGHOST", "127.0.0.1")
            .env("PGUSER", "u")
            .output_to(full);
        let output = walpost.finish().expect_code(1).stderr;
        assert_eq!(output.lines().count(), 1, "{output}");
        assert!(
            output.contains("failed to write to standard output"),
            "{output}"
        );
    }
}
