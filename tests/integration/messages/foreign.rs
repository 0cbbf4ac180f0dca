//! Messages that are not events of the pipeline's outbox.

use super::{TestRoles, message_fixture, publish};
use crate::support::checker::Resends;
use crate::support::event::{Event, EventWriter};
use crate::support::lsn::parse_position;
use crate::support::records::{Record, keys};

in_both_modes! { writes_a_message_that_is_not_an_event_as_a_dead_letter }

/// Returns the value of a numeric field in the log line `stopped`.
fn counted(log: &str, field: &str) -> u64 {
    let line = log.lines().find(|line| line.contains("stopped"));
    let line = line.expect("a line stopped");
    let (_, rest) = line.split_once(&format!("{field}=")).expect(line);
    let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap()
}

#[test]
fn delivers_only_messages_with_the_prefix_of_the_pipeline() {
    let fixture = message_fixture();
    let aggregate = fixture.aggregate(1);
    let other = fixture
        .invoke("init")
        .args(["--slot", &format!("{}_other", fixture.slot())]);
    other.arg("--no-role").finish().expect_code(0);
    let topic = format!("other-{}", fixture.name);
    fixture.broker.create_topic(&topic, 1, &[]);
    let ours = fixture.start();
    let other_slot = format!("{}_other", fixture.slot());
    let theirs = fixture.start_with(&[
        "--slot",
        &other_slot,
        "--prefix",
        "Other.1",
        "--topic",
        &topic,
    ]);
    let event = Event::new(&aggregate, "k", "{}");
    let foreign = EventWriter::Messages("Other.1".to_owned()).insert_one(event);
    for _ in 0..3 {
        fixture.db.run(&format!(
            "BEGIN; {foreign} {} {foreign} COMMIT",
            fixture.insert_sql(&aggregate, "k")
        ));
    }
    fixture
        .db
        .run("SELECT pg_logical_emit_message(true, 'elsewhere', 'no envelope')");
    fixture.wait_for_records(3);
    fixture.wait_until_confirmed();
    let finished = ours.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "foreign_messages"), 7);
    assert_eq!(counted(&finished.stderr, "nontransactional_messages"), 0);
    assert_eq!(fixture.check_delivered(&[], Resends::Never).committed, 3);
    crate::support::wait::wait_until("the other topic", || {
        fixture.broker.count(std::slice::from_ref(&topic)) == 6
    });
    let finished = theirs.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "foreign_messages"), 4);
}

#[test]
fn skips_nontransactional_messages_and_logs_the_first_one() {
    let fixture = message_fixture();
    let aggregate = fixture.aggregate(1);
    let mut walpost = fixture.start();
    let message = |prefix: &str| {
        format!("SELECT pg_logical_emit_message(false, '{prefix}', 'never to be delivered')")
    };
    let ours = format!("walpost_{}", fixture.name);
    fixture.db.run(&message("elsewhere"));
    fixture.db.run(&message(&ours));
    fixture
        .db
        .run(&format!("BEGIN; {}; ROLLBACK", message(&ours)));
    fixture.insert(&aggregate, "k");
    walpost.wait_for_log("skipped a non-transactional message");
    fixture.wait_for_records(1);
    assert_eq!(walpost.logged("non-transactional"), 1);
    fixture.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "nontransactional_messages"), 3);
    assert_eq!(fixture.check_delivered(&[], Resends::Never).committed, 1);
}

/// Writes a message with the pipeline's prefix and the given content, and asserts that Walpost
/// halts. Then skips the transaction with the command from the error message.
fn bad_content(content: &str, texts: &[&str]) {
    let fixture = message_fixture();
    let aggregate = fixture.aggregate(1);
    fixture.insert(&aggregate, "before");
    let before = fixture.history().pop().unwrap().end;
    fixture.db.run(&format!(
        "BEGIN; SELECT pg_logical_emit_message(true, 'x', 'first');
         SELECT pg_logical_emit_message(true, 'walpost_{}', {content}); COMMIT",
        fixture.name
    ));
    fixture.insert(&aggregate, "after");
    let run = fixture.run().args(["--on-malformed", "halt"]);
    let finished = run.finish().expect_code(3);
    let prefix = format!("\"walpost_{}\"", fixture.name);
    let finished = finished
        .expect_mentions(&["halted", &prefix])
        .expect_mentions(texts);
    assert_eq!(fixture.records().len(), 1, "only the preceding events");
    assert!(fixture.confirmed() >= before, "the command is complete");
    let position = finished
        .stderr
        .split(|c: char| c.is_whitespace())
        .map(|word| word.trim_end_matches(':'))
        .find(|word| word.len() == 28 && word.contains('/'));
    let (_, index) = parse_position(position.expect("a position"));
    assert_eq!(index, 1);

    let (_, command) = finished.stderr.split_once("walpost skip --to ").unwrap();
    let to = command.split(' ').next().unwrap();
    fixture.skip(to).arg("--yes").finish().expect_code(0);
    let walpost = fixture.start();
    assert_eq!(keys(&fixture.wait_for_records(2)), ["before", "after"]);
    walpost.terminate().expect_code(0);
}

#[test]
fn halts_on_a_message_without_an_envelope_and_allows_it_to_be_skipped() {
    bad_content("'no envelope'", &["byte 0x6e", "walpost.publish"]);
    bad_content("'\\x01ab'::bytea", &["ends within field id"]);
}

#[test]
fn halts_on_a_message_whose_envelope_has_a_newer_version() {
    bad_content(
        "'\\x02'::bytea",
        &["byte 0x02", "0x01", "newer version of Walpost"],
    );
}

fn writes_a_message_that_is_not_an_event_as_a_dead_letter(exactly_once: bool) {
    let fixture = message_fixture().in_mode(exactly_once);
    let (_roles, [other_role]) = TestRoles::new(&fixture, ["other"]);
    let aggregate = fixture.aggregate(1);
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let start = || fixture.start_with(&["--dead-letter-topic", &topic]);
    let walpost = start();
    fixture.insert(&aggregate, "before");
    let bad = |content: &str| {
        let prefix = format!("walpost_{}", fixture.name);
        format!("SELECT pg_logical_emit_message(true, '{prefix}', {content});")
    };
    for content in [
        "'no envelope'",
        "''",
        "'\\x02'::bytea",
        "'\\x01ab'::bytea",
        "repeat('x', 2000000)",
    ] {
        other_role.run(&bad(content));
    }
    fixture.db.run(&format!(
        "BEGIN; {} {} {} COMMIT",
        bad("'first'"),
        fixture.insert_sql(&aggregate, "behind"),
        bad("'last'")
    ));
    let records = fixture.wait_for_records(9);
    let is_other_topic = |record: &&Record| record.topic != topic;
    let events: Vec<_> = records
        .iter()
        .filter(is_other_topic)
        .map(Record::key)
        .collect();
    assert_eq!(events, ["before", "behind"]);
    let behind = records
        .iter()
        .find(|r| r.topic != topic && r.key() == "behind");
    let position = behind.expect("the event").header("walpost-position");
    assert_eq!(
        parse_position(position).1,
        1,
        "messages that are not events are numbered, too"
    );
    let letters: Vec<_> = records.iter().filter(|r| r.topic == topic).collect();
    for letter in &letters {
        assert_eq!(letter.header("walpost-error"), "malformed");
        let prefix = format!("walpost_{}", fixture.name);
        assert_eq!(letter.header("walpost-source-prefix"), prefix);
        assert!(letter.key.is_none());
    }
    let payloads: Vec<_> = letters.iter().map(|r| r.payload.as_deref()).collect();
    let expected: [Option<&[u8]>; 7] = [
        Some(b"no envelope"),
        Some(b""),
        Some(b"\x02"),
        Some(b"\x01\xab"),
        None,
        Some(b"first"),
        Some(b"last"),
    ];
    assert_eq!(payloads, expected);
    assert_eq!(letters[4].header("walpost-payload-bytes"), "2000000");
    fixture.wait_until_confirmed();
    let finished = walpost.terminate().expect_code(0);
    assert_eq!(counted(&finished.stderr, "malformed_dead_letters"), 7);
    let walpost = start();
    fixture.insert(&aggregate, "again");
    assert_eq!(fixture.wait_for_records(10).len(), 10, "nothing twice");
    walpost.terminate().expect_code(0);
}

#[test]
fn check_reports_a_missing_dead_letter_topic_for_malformed_messages() {
    let fixture = message_fixture();
    let aggregate = fixture.aggregate(1);
    let topic = format!("{}.dead", fixture.name);
    let dead = ["--dead-letter-topic", &topic];
    let output = fixture.check().args(dead).finish().expect_code(0);
    let output = output.expect_mentions(&["warning", "can halt the pipeline", "--create --topic"]);
    assert!(output.stdout.contains(&topic), "{}", output.stdout);
    let halting = fixture
        .check()
        .args(dead)
        .args(["--on-unroutable", "dead-letter"]);
    halting.finish().expect_code(3).expect_mentions(&[&topic]);
    let output = fixture.check().args(["--on-malformed", "halt"]).finish();
    assert!(!output.expect_code(0).stdout.contains("dead letters"));
    fixture.db.run(&format!(
        "SELECT pg_logical_emit_message(true, 'walpost_{}', 'bad')",
        fixture.name
    ));
    let halted = fixture.run().args(dead).finish().expect_code(3);
    halted.expect_mentions(&["halted", &topic, "does not exist"]);
    let walpost = fixture.start_with(&[&dead[..], &["--create-topics", "1:1"]].concat());
    fixture.insert(&aggregate, "behind");
    fixture.wait_for_records(1);
    fixture.expect_topic(&topic);
    assert_eq!(fixture.wait_for_records(2).len(), 2);
    walpost.terminate().expect_code(0);
}

#[test]
fn message_larger_than_the_read_buffer_does_not_delay_events() {
    let fixture = message_fixture();
    let (_roles, [other_role]) = TestRoles::new(&fixture, ["other"]);
    let aggregate = fixture.aggregate(1);
    let topic = format!("{}.dead", fixture.name);
    fixture.topic(&topic, 1, &[]);
    let walpost = fixture.start_with(&["--dead-letter-topic", &topic, "--max-row-bytes", "1MB"]);
    let ours = format!("walpost_{}", fixture.name);
    let emit = |transactional: bool, prefix: &str, megabytes: usize| {
        format!(
            "SELECT pg_logical_emit_message({transactional}, {prefix}, repeat('x', {megabytes} * 1048576));"
        )
    };
    other_role.run(&emit(true, "'elsewhere'", 3));
    other_role.run(&emit(true, "repeat('p', 2000000)", 0));
    other_role.run(&emit(false, "'elsewhere'", 2));
    other_role.run(&emit(false, &format!("'{ours}'"), 40));
    fixture.db.run(&format!(
        "BEGIN; {} {} {} COMMIT",
        emit(true, "'elsewhere'", 70),
        emit(true, &format!("'{ours}'"), 70),
        fixture.insert_sql(&aggregate, "behind")
    ));
    let records = fixture.wait_for_records(2);
    let letter = records.iter().find(|r| r.topic == topic).expect("a letter");
    assert_eq!(letter.header("walpost-error"), "malformed");
    let bytes = (70 * 1_048_576).to_string();
    assert_eq!(letter.header("walpost-payload-bytes"), bytes);
    assert!(letter.payload.is_none());
    let event = records
        .iter()
        .find(|r| r.topic != topic)
        .expect("the event");
    assert_eq!(parse_position(event.header("walpost-position")).1, 2);
    let resident = walpost.resident_bytes();
    assert!(resident < 60_000_000, "{resident} bytes");
    fixture.wait_until_confirmed();
    let stopped = walpost.terminate().expect_code(0).stderr;
    assert_eq!(counted(&stopped, "foreign_messages"), 3);
    assert_eq!(counted(&stopped, "nontransactional_messages"), 2);
    // A message that `walpost.publish` could have written counts as an event. If it exceeds
    // max_row_bytes, the pipeline halts until that setting is raised.
    fixture.db.run(&publish(
        &fixture,
        &format!("'{aggregate}', 'k', 't', to_jsonb(repeat('x', 900000))"),
    ));
    let halted = fixture.run().args(["--max-row-bytes", "500kB"]).finish();
    halted
        .expect_code(3)
        .expect_mentions(&["halted", "max_row_bytes allows"]);
}
