//! Records arrive in commit order. Transactions are complete, and no uncommitted event is
//! delivered.

use crate::support::checker::Resends;
use crate::support::event::Event;
use crate::support::fixture::Fixture;
use crate::support::records::Record;
use crate::support::walpost::Walpost;

const FIRST: &str = "00000000-0000-0000-0000-000000000001";
const SECOND: &str = "00000000-0000-0000-0000-000000000002";
const THIRD: &str = "00000000-0000-0000-0000-000000000003";

for_each_fixture! {
    delivers_the_event_with_the_lower_id_last_if_it_commits_last
    never_delivers_rolled_back_events
    delivers_a_prepared_transaction_only_after_commit_prepared
    delivers_events_of_concurrent_sessions_in_commit_order
    delivers_a_complete_transaction_larger_than_the_window
    delivers_a_complete_transaction_with_many_savepoints
    long_transaction_does_not_delay_other_events
    delivers_adjacent_transactions_when_killed_between_them
    delivers_a_backlog_of_rows_of_all_sizes_over_local_tcp
}

/// Returns a statement that inserts an event with the given id.
fn event(fixture: &Fixture, id: &str, aggregate: &str) -> String {
    let event = Event::new(aggregate, "key", "{}");
    fixture.events().insert_one(Event {
        id: Some(id),
        ..event
    })
}

fn ids(records: &[Record]) -> Vec<&str> {
    records.iter().map(|record| record.header("id")).collect()
}

fn delivers_the_event_with_the_lower_id_last_if_it_commits_last(fixture: Fixture) {
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let slow = fixture.server.session(&fixture.name);
    slow.run(&format!("BEGIN; {}", event(&fixture, FIRST, &aggregate)));
    fixture.db.run(&event(&fixture, SECOND, &aggregate));
    assert_eq!(ids(&fixture.wait_for_records(1)), [SECOND]);
    slow.run("COMMIT");
    fixture.wait_for_records(2);
    fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(ids(&fixture.records()), [SECOND, FIRST]);
}

fn never_delivers_rolled_back_events(fixture: Fixture) {
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "BEGIN; {} ROLLBACK",
        event(&fixture, FIRST, &aggregate)
    ));
    fixture.db.run(&format!(
        "BEGIN; {} SAVEPOINT a; {} ROLLBACK TO a; SAVEPOINT b; {} RELEASE b; COMMIT",
        event(&fixture, FIRST, &aggregate),
        event(&fixture, SECOND, &aggregate),
        event(&fixture, THIRD, &aggregate),
    ));
    fixture.wait_for_records(2);
    fixture.settle(walpost, &[], Resends::Never);
    let records = fixture.records();
    assert_eq!(ids(&records), [FIRST, THIRD]);
    let positions = records
        .iter()
        .map(|record| record.header("walpost-position"));
    let (commits, indexes): (Vec<_>, Vec<_>) = positions
        .map(|position| position.rsplit_once(':').unwrap())
        .unzip();
    assert_eq!(commits[0], commits[1], "one transaction has one commit LSN");
    assert_eq!(indexes, ["0000000000", "0000000001"]);
}

fn delivers_a_prepared_transaction_only_after_commit_prepared(fixture: Fixture) {
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    let name = &fixture.name;
    fixture.db.run(&format!(
        "BEGIN; {} PREPARE TRANSACTION '{name}_kept'",
        event(&fixture, FIRST, &aggregate)
    ));
    fixture.db.run(&format!(
        "BEGIN; {} PREPARE TRANSACTION '{name}_not'",
        event(&fixture, SECOND, &aggregate)
    ));
    fixture.db.run(&event(&fixture, THIRD, &aggregate));
    assert_eq!(ids(&fixture.wait_for_records(1)), [THIRD]);
    fixture.db.run(&format!("ROLLBACK PREPARED '{name}_not'"));
    fixture.db.run(&format!("COMMIT PREPARED '{name}_kept'"));
    fixture.wait_for_records(2);
    fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(ids(&fixture.records()), [THIRD, FIRST]);
}

fn delivers_events_of_concurrent_sessions_in_commit_order(fixture: Fixture) {
    let aggregates = [fixture.aggregate(3), fixture.aggregate(1)];
    let walpost = fixture.start();
    let load = fixture.load(&[&aggregates[0], &aggregates[1]]);
    load.wait_for_transactions(500);
    load.stop();
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.repeated, 0);
    assert!(summary.committed >= 500, "{summary:?}");
}

fn delivers_a_complete_transaction_larger_than_the_window(fixture: Fixture) {
    let aggregate = fixture.aggregate(2);
    let walpost = fixture.start_with(&["--window-records", "100", "--window-bytes", "1MiB"]);
    let payload = "jsonb_build_object('n', n)";
    fixture
        .db
        .run(&fixture.events().insert_many(&aggregate, 20_000, payload));
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20_000);
}

/// Uses more subtransactions than PostgreSQL keeps in shared memory, and rolls back half of them.
fn delivers_a_complete_transaction_with_many_savepoints(fixture: Fixture) {
    const SAVEPOINTS: usize = 10_000;
    let aggregate = fixture.aggregate(2);
    let walpost = fixture.start_with(&["--window-records", "100"]);
    let before = walpost.resident_bytes();
    let writes = fixture
        .events()
        .insert_one(Event::new(&aggregate, "k", "{}"));
    let (writes, last) = (
        writes.trim_end_matches(';'),
        event(&fixture, FIRST, &aggregate),
    );
    let run = match writes.strip_prefix("SELECT") {
        Some(call) => format!("PERFORM {call};"),
        None => format!("{writes};"),
    };
    fixture.db.run(&format!(
        "BEGIN;
         DO $$ BEGIN
             FOR n IN 1..{SAVEPOINTS} LOOP
                 BEGIN
                     {run}
                     IF n % 2 = 0 THEN RAISE 'rolled back'; END IF;
                 EXCEPTION WHEN raise_exception THEN NULL;
                 END;
             END LOOP;
         END $$;
         {last}
         COMMIT"
    ));
    let grown = |walpost: &Walpost| walpost.resident_bytes().saturating_sub(before);
    fixture.wait_until_confirmed();
    let grown = grown(&walpost);
    assert!(grown < 50 << 20, "grown by {grown} bytes");
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, SAVEPOINTS / 2 + 1);
}

/// Events of short transactions are confirmed while a long transaction is open, although the long
/// transaction wrote its row before all of them.
fn long_transaction_does_not_delay_other_events(fixture: Fixture) {
    let aggregate = fixture.aggregate(1);
    let long = fixture.server.session(&fixture.name);
    long.run(&format!("BEGIN; {}", event(&fixture, FIRST, &aggregate)));
    let mut deaths = Vec::new();
    for _ in 0..3 {
        let walpost = fixture.start();
        let load = fixture.load(&[&aggregate]);
        load.wait_for_transactions(20);
        load.stop();
        fixture.wait_until_confirmed();
        deaths.push(fixture.kill(walpost));
    }
    long.run("COMMIT");
    let walpost = fixture.start();
    let resends = fixture.resends(deaths.len());
    fixture.settle(walpost, &deaths, resends);
}

/// Each transaction starts at the byte where the previous one ended. If a position were off by one
/// transaction, Walpost would skip or resend a transaction.
fn delivers_adjacent_transactions_when_killed_between_them(fixture: Fixture) {
    const ROWS_EACH: usize = 20;
    let aggregate = fixture.aggregate(1);
    let mut deaths = Vec::new();
    let commit = |count| {
        let event = fixture
            .events()
            .insert_one(Event::new(&aggregate, "k", "{}"));
        fixture
            .db
            .run(&format!("BEGIN; {event} COMMIT;").repeat(count));
    };
    for round in 1..=5 {
        commit(ROWS_EACH / 2);
        let walpost = fixture.start();
        commit(ROWS_EACH / 2);
        fixture.wait_for_records(round * ROWS_EACH - ROWS_EACH / 2);
        deaths.push(fixture.kill(walpost));
    }
    let walpost = fixture.start();
    let resends = fixture.resends(deaths.len());
    let summary = fixture.settle(walpost, &deaths, resends);
    assert_eq!(summary.committed, 5 * ROWS_EACH);
}

/// Over local TCP, Walpost shrinks the receive buffer, and waits until the buffer is full before it
/// reads. This must work even for a row that is larger than the buffer.
fn delivers_a_backlog_of_rows_of_all_sizes_over_local_tcp(fixture: Fixture) {
    let aggregate = fixture.aggregate(3);
    let write = |count, bytes: usize| {
        let payload = format!("jsonb_build_object('n', n, 'text', repeat('x', {bytes}))");
        fixture
            .db
            .run(&fixture.events().insert_many(&aggregate, count, &payload));
    };
    write(20_000, 10);
    (0..500).for_each(|_| write(5, 300));
    write(200, 10_000);
    write(20, 400_000);
    write(20_000, 10);
    let over_tcp = fixture.server.tcp_conninfo(&fixture.name);
    let walpost = fixture.with_conninfo(&over_tcp).run().start_streaming();
    fixture.wait_until_confirmed();
    // Inserts more rows slowly, one at a time, while the pipeline is still running.
    (0..20).for_each(|_| write(1, 10));
    let summary = fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(summary.committed, 20_000 + 2_500 + 200 + 20 + 20_000 + 20);
    assert_eq!(summary.repeated, 0);
}

#[test]
fn delete_and_truncate_produce_no_events() {
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start();
    fixture.db.run(&event(&fixture, FIRST, &aggregate));
    fixture.db.run("DELETE FROM outbox; TRUNCATE outbox");
    fixture.db.run(&event(&fixture, SECOND, &aggregate));
    fixture.settle(walpost, &[], Resends::Never);
    assert_eq!(ids(&fixture.records()), [FIRST, SECOND]);
}

#[test]
fn maps_keys_to_the_same_partitions_as_the_java_client() {
    // Hashes taken from UtilsTest.testMurmur2 in Apache Kafka.
    const HASHES: [(&str, i32); 5] = [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("abc", 479_470_107),
    ];
    let fixture = Fixture::new();
    let aggregate = fixture.aggregate(12);
    let walpost = fixture.start();
    HASHES
        .iter()
        .for_each(|(key, _)| fixture.insert(&aggregate, key));
    let records = fixture.wait_for_records(HASHES.len());
    for (key, hash) in HASHES {
        let record = records
            .iter()
            .find(|record| record.key() == key)
            .expect("a record for the key");
        assert_eq!(record.partition, (hash & i32::MAX) % 12, "{key}");
    }
    walpost.terminate().expect_code(0);
}
