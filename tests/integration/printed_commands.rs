//! Commands in messages work when an operator pastes them. A shell runs each command exactly as
//! printed, with none of Walpost's or PostgreSQL's environment variables set.

use std::path::Path;
use std::process::{Command, Output};

use crate::budget::{drop_slot, expect_everything};
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::postgres::{MAJOR, Server};
use crate::support::secrets::{self, OutputStream};
use crate::support::wait::wait_for;
use crate::support::walpost::Invocation;

const TABLE: &str =
    "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)";

/// Returns the first command in `text` that starts with `words`. The command ends at the end of the
/// sentence or at the first field of the log line.
fn find_command<'t>(text: &'t str, words: &str) -> &'t str {
    let from = text
        .find(words)
        .unwrap_or_else(|| panic!("no {words:?} in {text}"));
    let line = text[from..].lines().next().unwrap_or_default();
    let ends = ["; ", ". ", ", ", " pipeline=\"", "\""].iter();
    let end = ends.filter_map(|end| line.find(end)).min();
    let command = line[..end.unwrap_or(line.len())].trim_end_matches(['.', '`']);
    assert!(
        command.contains("--config ") || command.contains("--postgres "),
        "{command}"
    );
    command
}

/// Runs the command in a shell, with the words in `more` appended.
fn paste(command: &str, more: &str) -> Output {
    let binary = Path::new(env!("CARGO_BIN_EXE_walpost"));
    let folder = binary.parent().expect("a folder").display();
    let mut shell = Command::new("/bin/sh");
    for (name, _) in std::env::vars() {
        if name.starts_with("PG") || name.starts_with("WALPOST_") {
            shell.env_remove(name);
        }
    }
    let line = format!("PATH={folder}:$PATH; exec {command} {more}");
    let output = shell.args(["-c", &line]).output().expect("a shell");
    secrets::expect_none(
        OutputStream::Output,
        &String::from_utf8_lossy(&output.stdout),
    );
    secrets::expect_none(
        OutputStream::Error,
        &String::from_utf8_lossy(&output.stderr),
    );
    output
}

/// Like [`paste`], but asserts that the command succeeds.
fn paste_expecting_success(command: &str, more: &str) {
    let output = paste(command, more);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command} {more}: {text}");
}

/// Returns the path of the fixture's walpost.toml.
fn write_config_file(fixture: &Fixture<'_>) -> String {
    fixture.file("").display().to_string()
}

fn run(file: &str) -> Invocation {
    Invocation::new(["run", "--config", file])
}

fn status(file: &str) -> String {
    let finished = Invocation::new(["status", "--config", file]).finish();
    format!("{}\n{}", finished.stdout, finished.stderr)
}

fn check(file: &str) -> String {
    let finished = Invocation::new(["check", "--config", file]).finish();
    format!("{}\n{}", finished.stdout, finished.stderr)
}

fn drop_slot_of(fixture: &Fixture<'_>) -> String {
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "not delivered");
    drop_slot(fixture).stderr
}

#[test]
fn init_and_replay_commands_logged_for_a_dropped_slot_work_as_printed() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    let log = drop_slot_of(&fixture);
    let init = find_command(&log, "walpost init --slot");
    let replay = find_command(&log, "walpost replay --dropped-slots");
    // The printed command contains the address at which Walpost tried to reach Kafka without
    // success. Replace this address with the broker's.
    let replay = replay.replace("127.0.0.1:9", fixture.kafka());
    paste_expecting_success(init, "");
    let walpost = fixture.start();
    paste_expecting_success(&replay, "--yes");
    walpost.terminate().expect_code(0);
    expect_everything(&fixture);
}

#[test]
fn status_check_and_page_show_working_commands_for_a_dropped_slot() {
    let server = Server::private(MAJOR, "");
    let fixture = Fixture::on_servers(&server, Broker::shared());
    drop_slot_of(&fixture);
    let file = write_config_file(&fixture);
    paste_expecting_success(find_command(&check(&file), "walpost init"), "");
    let remedies = [status(&file), check(&file)];
    let mut walpost = run(&file).args(["--http", "127.0.0.1:0"]).start_streaming();
    let log = walpost.wait_for_log("have not been sent again yet");
    let http = walpost.http();
    let page = wait_for("the remedy", || {
        let text = http.status().to_string();
        text.contains("--dropped-slots").then_some(text)
    });
    let expected = find_command(&log, "walpost replay --dropped-slots");
    for text in [&remedies[0], &remedies[1], &page] {
        assert_eq!(
            find_command(text, "walpost replay --dropped-slots"),
            expected
        );
    }
    paste_expecting_success(expected, "--yes");
    walpost.terminate().expect_code(0);
    expect_everything(&fixture);
}

#[test]
fn init_command_printed_for_a_missing_slot_works() {
    for place in ["status", "run"] {
        let fixture = Fixture::bare();
        fixture.init().finish().expect_code(0);
        fixture.drop_slot();
        let file = write_config_file(&fixture);
        let text = match place {
            "status" => status(&file),
            _ => run(&file).finish().expect_code(3).stderr,
        };
        paste_expecting_success(find_command(&text, "walpost init"), "");
        run(&file).start_streaming().terminate().expect_code(0);
    }
}

/// Runs a pipeline that halts on a row whose topic is empty, and returns its log.
fn run_until_halt(fixture: &Fixture<'_>, invocation: Invocation) -> String {
    fixture
        .db
        .run("INSERT INTO outbox VALUES (1, '', 'k', 'bad')");
    invocation.finish().expect_code(3).stderr
}

#[test]
fn skip_command_logged_for_a_row_that_halts_the_pipeline_works() {
    let fixture = Fixture::with_table(TABLE);
    let file = fixture
        .file("topic = \"{aggregatetype}\"\n")
        .display()
        .to_string();
    let log = run_until_halt(&fixture, run(&file));
    let skip = find_command(&log, "walpost skip --to");
    paste_expecting_success(skip, "--yes");
    run(&file).start_streaming().terminate().expect_code(0);
}

#[test]
fn skip_command_works_as_printed_for_a_pipeline_configured_by_flags() {
    let fixture = Fixture::with_table(TABLE);
    let log = run_until_halt(&fixture, fixture.run().args(["--topic", "{aggregatetype}"]));
    paste_expecting_success(find_command(&log, "walpost skip --to"), "--yes");
    fixture.start().terminate().expect_code(0);
}

#[test]
fn checkpoint_adopt_command_printed_by_check_or_run_works() {
    for place in ["check", "run"] {
        let fixture = Fixture::new();
        // Deliver an event in at-least-once mode first. If nothing had been read from the slot yet,
        // the first run in exactly-once mode would create the checkpoint itself.
        let aggregate = fixture.aggregate(1);
        let plain =
            Invocation::new(["run", "--config", &write_config_file(&fixture)]).start_streaming();
        fixture.insert(&aggregate, "k");
        fixture.wait_for_records(1);
        fixture.wait_until_confirmed();
        plain.terminate().expect_code(0);
        let file = fixture.file(&exactly_once_settings(&fixture));
        let file = file.display().to_string();
        let text = match place {
            "check" => check(&file),
            _ => run(&file).finish().expect_code(3).stderr,
        };
        paste_expecting_success(find_command(&text, "walpost checkpoint adopt"), "--yes");
        run(&file).start_streaming().terminate().expect_code(0);
    }
}

fn exactly_once_settings(fixture: &Fixture<'_>) -> String {
    format!(
        "delivery = \"exactly-once\"\n[pipeline.checkpoint]\ntopic = \"checkpoints-{}\"\nreplication = 1\n",
        fixture.name
    )
}

#[test]
fn replay_command_printed_when_a_table_is_set_aside_works() {
    let mut fixture = Fixture::bare();
    fixture.use_settings("tables = [\"tenant_*.outbox\"]\non_table_error = \"set-aside\"\ntopic = \"{aggregatetype}\"\n");
    fixture.init().finish().expect_code(0);
    let publication = fixture.slot();
    fixture.db.run(&format!(
        "CREATE SCHEMA tenant_1;
         CREATE TABLE tenant_1.outbox (id int PRIMARY KEY, aggregatetype text, aggregateid text, payload text);
         SELECT walpost.add_outbox('tenant_1.outbox', '{publication}')"
    ));
    let file = fixture
        .file("tables = [\"tenant_*.outbox\"]\non_table_error = \"set-aside\"\ntopic = \"{aggregatetype}\"\n")
        .display()
        .to_string();
    let mut walpost = run(&file).start_streaming();
    fixture
        .db
        .run("INSERT INTO tenant_1.outbox VALUES (1, '', 'k', 'bad')");
    let log = walpost.wait_for_log("table set aside");
    let aggregate = fixture.aggregate(1);
    fixture.topic(&aggregate, 1, &[]);
    fixture.db.run(&format!(
        "UPDATE tenant_1.outbox SET aggregatetype = '{aggregate}'"
    ));
    let replay = find_command(&log, "walpost replay --set-aside");
    assert_eq!(
        find_command(&check(&file), "walpost replay --set-aside"),
        replay
    );
    assert_eq!(
        find_command(&status(&file), "walpost replay --set-aside"),
        replay
    );
    paste_expecting_success(replay, "--yes");
    walpost.terminate().expect_code(0);
}
