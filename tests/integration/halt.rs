//! Errors that require an operator: the pipeline halts and skips nothing.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;

use crate::support::event::Outbox;
use crate::support::fixture::Fixture;
use crate::support::kafka::Broker;
use crate::support::lsn::parse_position;
use crate::support::postgres::{MAJOR, Server};
use crate::support::wait::wait_until;
use crate::support::walpost::config_file;

/// Drops the publication while Walpost is streaming. Walpost must not skip events that are
/// committed afterwards.
fn publication_is_dropped(major: u32, exactly_once: bool) {
    let fixture =
        Fixture::on_servers(Server::shared(major), Broker::shared()).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    let publication = fixture.slot();
    fixture.db.run(&format!("DROP PUBLICATION {publication}"));
    fixture.insert(&aggregate, "after");
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", "publication", &publication]);
    let skipped = fixture.history().pop().unwrap();
    assert!(
        fixture.confirmed() < skipped.end,
        "the slot must not pass an event that was not delivered"
    );
    assert_eq!(fixture.records().len(), 1);
}

in_both_modes! {
    halts_if_the_publication_is_dropped_on_postgresql_15
    halts_if_the_publication_is_dropped_on_postgresql_18
    halts_if_the_slot_has_lost_its_wal
}

#[test]
fn halts_if_the_publication_is_dropped_on_postgresql_14() {
    publication_is_dropped(14, false);
}

fn halts_if_the_publication_is_dropped_on_postgresql_15(exactly_once: bool) {
    publication_is_dropped(15, exactly_once);
}

#[test]
fn halts_if_the_publication_is_dropped_on_postgresql_16() {
    publication_is_dropped(16, false);
}

#[test]
fn halts_if_the_publication_is_dropped_on_postgresql_17() {
    publication_is_dropped(17, false);
}

fn halts_if_the_publication_is_dropped_on_postgresql_18(exactly_once: bool) {
    publication_is_dropped(18, exactly_once);
}

#[test]
fn halts_if_the_table_is_removed_from_the_publication() {
    let fixture = Fixture::new();
    let walpost = fixture.start();
    fixture.db.run(&format!(
        "ALTER PUBLICATION {} DROP TABLE outbox",
        fixture.slot()
    ));
    walpost.finish().expect_code(3).expect_mentions(&[
        "halted",
        "public.outbox",
        "ALTER PUBLICATION",
    ]);
}

/// The publication's owner adds a row filter (PostgreSQL 15 and later), which would hide events
/// from Walpost.
#[test]
fn reports_a_row_filter_added_to_the_publication() {
    let fixture = Fixture::new();
    let mut walpost = fixture.start_with(&["--http", "127.0.0.1:0"]);
    let http = walpost.http();
    wait_until("readiness", || http.get("/readyz").code == 200);
    let publication = fixture.slot();
    let set = format!("ALTER PUBLICATION {publication} SET TABLE outbox");
    fixture.db.run(&format!("{set} WHERE (false)"));
    let line = walpost.wait_for_log("omits rows that do not match");
    assert!(line.contains("ALTER PUBLICATION"), "{line}");
    assert_eq!(http.get("/readyz").code, 503);
    fixture.db.run(&set);
    walpost.wait_for_log("rows_left_out resolved");
    walpost.terminate().expect_code(0);
}

for_each_outbox! {
    halts_if_the_slot_is_dropped_and_recreated
    halts_if_another_program_advances_the_slot
    halts_if_the_slot_was_dropped_while_walpost_was_stopped
}

/// While Walpost is stopped, the server removes WAL that the slot still needs.
fn halts_if_the_slot_has_lost_its_wal(exactly_once: bool) {
    let settings = "max_slot_wal_keep_size = 16MB\nmin_wal_size = 32MB\nmax_wal_size = 32MB\n";
    let server = Server::private(MAJOR, settings);
    let fixture = Fixture::on_servers(&server, Broker::shared()).in_mode(exactly_once);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.terminate().expect_code(0);
    fixture.insert(&aggregate, "lost");
    wait_until("the slot to be lost", || {
        fixture
            .db
            .run("SELECT pg_switch_wal(); CREATE TABLE x (); DROP TABLE x; CHECKPOINT");
        fixture.db.is_true(&format!(
            "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = '{}'",
            fixture.slot()
        ))
    });
    let confirmed = fixture.confirmed();
    fixture.run().finish().expect_code(3).expect_mentions(&[
        "halted",
        &fixture.slot(),
        "is lost",
        "max_slot_wal_keep_size",
        "pg_drop_replication_slot",
    ]);
    assert_eq!(fixture.confirmed(), confirmed);
    assert_eq!(fixture.records().len(), 1);
}

/// Calls `meddle`, which changes the slot while Walpost is frozen and no walsender is using the
/// slot.
fn meddle_with_slot(outbox: Outbox, meddle: impl Fn(&Fixture, &str)) {
    let fixture = Fixture::with_outbox(outbox);
    let aggregate = fixture.aggregate(1);
    let walpost = fixture.start_and_confirm_one(&aggregate, "before");
    walpost.freeze();
    let slot = fixture.slot();
    wait_until("the walsender to end", || {
        fixture.end_walsender();
        !fixture.slot_is_active()
    });
    fixture.insert(&aggregate, "skipped");
    meddle(&fixture, &slot);
    fixture.insert(&aggregate, "after");
    let confirmed = fixture.confirmed();
    walpost.thaw();
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", "slot", &slot]);
    assert_eq!(
        fixture.confirmed(),
        confirmed,
        "Walpost does not move the slot"
    );
    assert_eq!(
        fixture.records().len(),
        1,
        "no event after the gap is delivered"
    );
}

fn halts_if_the_slot_is_dropped_and_recreated(outbox: Outbox) {
    meddle_with_slot(outbox, |fixture, slot| {
        fixture.db.run(&format!(
            "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
        ));
        fixture.db.run(&format!(
            "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        ));
    });
}

fn halts_if_another_program_advances_the_slot(outbox: Outbox) {
    meddle_with_slot(outbox, |fixture, slot| {
        fixture.db.run(&format!(
            "SELECT pg_catalog.pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
        ));
    });
}

fn halts_if_the_slot_was_dropped_while_walpost_was_stopped(outbox: Outbox) {
    let fixture = Fixture::with_outbox(outbox);
    let walpost = fixture.start();
    walpost.freeze();
    let slot = fixture.slot();
    fixture.drop_slot();
    walpost.thaw();
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", &slot, "does not exist"]);
}

/// Commits a row of the given size between two small rows, and asserts that Walpost halts when it
/// reaches the large row.
fn oversize(arguments: &[&str], bytes: usize, texts: &[&str]) {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)",
    );
    let aggregate = fixture.aggregate(1);
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (1, '{aggregate}', 'k', 'small')"
    ));
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (77, '{aggregate}', 'k', repeat('x', {bytes}))"
    ));
    for id in 100..200 {
        fixture.db.run(&format!(
            "INSERT INTO outbox VALUES ({id}, '{aggregate}', 'k', 'small')"
        ));
    }
    let (before, event) = (fixture.history()[0].end, fixture.history()[1].end);
    let finished = fixture.run().args(arguments).finish().expect_code(3);
    assert!(fixture.confirmed() < event);
    let records = fixture.records();
    let early = records.iter().filter(|r| r.header("id") != "1").count();
    assert_eq!(early, 0, "no record after the row must be delivered");

    let finished = finished.expect_mentions(&["halted"]).expect_mentions(texts);
    let position = finished
        .stderr
        .split(|c: char| c.is_whitespace() || ",;()\"=".contains(c))
        .map(|word| word.trim_end_matches([':', '.']))
        .filter(|word| word.len() == 28 && word.contains('/'))
        .map(parse_position)
        .any(|(commit, index)| (before..event).contains(&commit) && index == 0);
    assert!(position, "the position is missing in:\n{}", finished.stderr);
}

#[test]
fn suggests_a_remedy_if_a_row_is_too_large_for_the_producer() {
    oversize(
        &[],
        2_000_000,
        &[
            "id 77",
            "but message.max.bytes is 1000000",
            "kafka-configs.sh --bootstrap-server 127.0.0.1:",
            "on_oversize = \"dead-letter\"",
            "walpost skip --to ",
        ],
    );
}

#[test]
fn suggests_a_remedy_if_a_row_is_too_large_for_the_topic() {
    oversize(
        &[
            "-X",
            "message.max.bytes=26214400",
            "-X",
            "compression.type=none",
        ],
        2_000_000,
        &[
            "the topic accepts batches of at most 1048588 bytes (max.message.bytes)",
            "kafka-configs.sh --bootstrap-server 127.0.0.1:",
            "on_oversize = \"dead-letter\"",
            "walpost skip --to ",
        ],
    );
}

#[test]
fn suggests_a_remedy_if_a_row_exceeds_max_row_bytes() {
    oversize(&["--max-row-bytes", "100KiB"], 200_000, &["max_row_bytes"]);
}

#[test]
fn halts_on_a_row_without_a_topic() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text)",
    );
    let walpost = fixture.start();
    fixture
        .db
        .run("INSERT INTO outbox VALUES (77, NULL, 'k', '')");
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", "77", "topic", "null"]);
    assert!(fixture.confirmed() < fixture.history()[0].end);
}

#[test]
fn halts_on_a_row_with_an_invalid_topic_name() {
    let fixture = Fixture::new();
    let walpost = fixture.start();
    fixture.accept_any_name("outbox");
    fixture.insert("no topic/name", "k");
    walpost.finish().expect_code(3).expect_mentions(&[
        "halted",
        "outbox.event.no topic/name",
        "topic",
        "on_unroutable = \"dead-letter\"",
        "walpost skip --to ",
    ]);
}

#[test]
fn halts_on_a_row_for_a_nonexistent_topic_partition() {
    let fixture = Fixture::with_table(
        "CREATE TABLE outbox (id int, aggregatetype text, aggregateid text, payload text, shard int)",
    );
    let aggregate = fixture.aggregate(2);
    let settings = format!(
        "[[pipeline]]\nname = '{}'\npostgres = \"{}\"\npartition = 'shard'\nkafka = {{ 'bootstrap.servers' = '{}' }}",
        fixture.name,
        fixture.conninfo(),
        fixture.broker.address()
    );
    let file = config_file(settings);
    let walpost = crate::support::walpost::Invocation::new(["run", "--config"])
        .arg(file)
        .start();
    fixture.db.run(&format!(
        "INSERT INTO outbox VALUES (77, '{aggregate}', 'k', '', 2)"
    ));
    walpost
        .finish()
        .expect_code(3)
        .expect_mentions(&["halted", &aggregate, "partition"]);
    assert!(fixture.confirmed() < fixture.history()[0].end);
}

/// Simulates PgBouncer, which supports neither replication connections nor arbitrary startup
/// parameters.
#[test]
fn suggests_a_remedy_if_the_connection_uses_a_pooler() {
    const REFUSAL: &[u8] = b"SFATAL\0C08P01\0Munsupported startup parameter: replication\0\0";
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut startup = [0; 512];
            let _ = client.read(&mut startup);
            let length = u32::try_from(REFUSAL.len() + 4).unwrap().to_be_bytes();
            let _ = client.write_all(&[b"E", &length[..], REFUSAL].concat());
        }
    });
    let fixture = Fixture::bare();
    let conninfo = format!("host=127.0.0.1 port={port} user=u dbname=d sslmode=disable");
    let halted = fixture
        .with_conninfo(&conninfo)
        .run()
        .finish()
        .expect_code(3);
    halted.expect_mentions(&[
        "unsupported startup parameter",
        "connection pooler",
        "PostgreSQL's address and port",
    ]);
}

/// Simulates a pooler that forwards only the user and the database to the server. Returns its port.
fn pooler_without_parameters(server_port: &str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = format!("127.0.0.1:{server_port}");
    thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
            let mut length = [0; 4];
            if client.read_exact(&mut length).is_err() {
                continue;
            }
            let mut startup = vec![0; usize::try_from(u32::from_be_bytes(length)).unwrap() - 4];
            client.read_exact(&mut startup).unwrap();
            let words: Vec<_> = startup[4..].split(|byte| *byte == 0).collect();
            let mut kept = startup[..4].to_vec();
            for pair in words.chunks(2) {
                if [&b"user"[..], b"database"].contains(&pair[0]) {
                    kept.extend([pair[0], b"\0", pair[1], b"\0"].concat());
                }
            }
            kept.push(0);
            let length = u32::try_from(kept.len() + 4).unwrap().to_be_bytes();
            server.write_all(&[&length[..], &kept].concat()).unwrap();
            let (mut requests, mut responses) = (client.try_clone(), server.try_clone());
            thread::spawn(move || {
                let _ = io::copy(requests.as_mut().unwrap(), &mut server);
                let _ = server.shutdown(Shutdown::Both);
            });
            thread::spawn(move || {
                let _ = io::copy(responses.as_mut().unwrap(), &mut client);
                let _ = client.shutdown(Shutdown::Both);
            });
        }
    });
    port
}

/// PgCat and Supavisor drop startup parameters that they do not support, such as `search_path`. The
/// session then has the search_path that the database's owner has set.
#[test]
fn does_not_call_user_functions_if_a_pooler_drops_startup_parameters() {
    for major in [14, MAJOR, 18] {
        let fixture = Fixture::on_servers(Server::shared(major), Broker::shared());
        fixture.db.run(&format!(
            "CREATE SCHEMA plot; CREATE TABLE plot.calls (name text);
             CREATE FUNCTION plot.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS
                 $$ BEGIN INSERT INTO plot.calls VALUES ('set_config'); RETURN $2; END $$;
             ALTER DATABASE {} SET search_path = plot, pg_catalog",
            fixture.name
        ));
        let direct = fixture.server.tcp_conninfo(&fixture.name);
        let (_, port) = direct.split_once("port=").unwrap();
        let port = port.split(' ').next().unwrap();
        let pooled = format!("port={}", pooler_without_parameters(port));
        let conninfo = direct.replace(&format!("port={port}"), &pooled);
        for command in ["init", "check", "run", "skip"] {
            let commands = fixture.with_conninfo(&conninfo);
            let command = match command {
                "init" => commands.init(),
                "check" => commands.check(),
                "run" => commands.run(),
                _ => commands.skip("0/1").arg("--yes"),
            };
            let refused = command.finish().expect_code(3);
            refused.expect_mentions(&["has search_path", "a connection pooler (such as PgCat"]);
        }
        assert_eq!(
            fixture.db.number("SELECT count(*) FROM plot.calls"),
            0,
            "{major}"
        );
    }
}
