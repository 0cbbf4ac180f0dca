//! Limits on file sizes and on the number of open files.

use std::fs::File;

use crate::support::fixture::Fixture;
use crate::support::reaper;
use crate::support::walpost::Invocation;
use crate::verify::advance_slot;

/// Arguments of `ulimit` that set RLIMIT_FSIZE to 0, so that files must remain empty.
const ZERO_FILE_SIZE_LIMIT: &str = "-f 0";

const REMEDY_TEXTS: [&str; 3] = [
    "File too large",
    "The maximum size of a file is 0 bytes (RLIMIT_FSIZE)",
    "ulimit -f unlimited",
];

fn file(name: &str) -> (String, File) {
    let path = reaper::folder("limited").join(name);
    let file = File::create(&path).unwrap();
    (path.to_str().unwrap().to_owned(), file)
}

fn expect_remedy(invocation: Invocation, code: i32, expected: &str) {
    let finished = invocation
        .limited(ZERO_FILE_SIZE_LIMIT)
        .finish()
        .expect_code(code);
    finished
        .expect_mentions(&REMEDY_TEXTS)
        .expect_mentions(&[expected]);
}

#[test]
fn verify_reports_the_limit_and_the_path_if_a_temporary_file_cannot_be_written() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    // `verify` can't keep this many events in 4 MiB of memory, so it writes temporary files.
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, 60_000, "NULL"));
    let verify = || fixture.verify().args(["--memory", "4MiB"]);
    expect_remedy(verify(), 1, "failed to write temporary file in /");
    // `verify` opens 64 temporary files besides its connections, so a limit of 64 is too low.
    let finished = verify().limited("-n 64").finish().expect_code(1);
    finished.expect_mentions(&[
        "failed to write temporary file in /",
        "Too many open files",
        "The limit on open files and connections is 64 (RLIMIT_NOFILE)",
    ]);
}

#[test]
fn verify_reports_the_path_if_its_output_file_cannot_be_written() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "delivered");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "missing");
    advance_slot(&fixture);
    // `verify` reports the event as missing only if the slot's confirmed position covers the
    // contents of the table. Start a pipeline, so that the position advances.
    let _walpost = fixture.start();
    fixture.insert(&aggregate, "last");
    let (path, _) = file("findings.jsonl");
    let verify = fixture.verify().args(["--output", &path]);
    expect_remedy(verify, 1, &format!("failed to write --output {path}"));
}

#[test]
fn command_exits_with_an_error_if_its_output_is_truncated() {
    let fixture = Fixture::bare();
    let (_, output) = file("init.sql");
    let print = fixture.init().arg("--print").output_to(output);
    expect_remedy(print, 1, "failed to write to standard output");
}

#[test]
fn halts_and_confirms_nothing_if_the_output_file_reaches_its_size_limit() {
    let fixture = Fixture::new();
    fixture.insert(&fixture.name, "k");
    let (_, output) = file("records.jsonl");
    let run = fixture.invoke("run").args(["--sink", "stdout"]);
    let run = run.output_to(output);
    expect_remedy(run, 3, "halted: failed to write to standard output");
    assert!(fixture.confirmed() < fixture.history()[0].end);
}

#[test]
fn delivers_events_while_the_log_cannot_be_written() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let (path, log) = file("walpost.log");
    let walpost = fixture
        .run()
        .limited(ZERO_FILE_SIZE_LIMIT)
        .log_to(log)
        .start();
    for _ in 0..3 {
        fixture.insert(&aggregate, "k");
    }
    fixture.wait_for_records(3);
    walpost.terminate().expect_code(0);
    assert_eq!(std::fs::read(path).unwrap(), b"");
}
