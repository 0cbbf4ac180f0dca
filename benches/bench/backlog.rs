//! Writes backlogs of rows to the WAL and creates the slots that read them. The benchmark calls
//! every event a row, even if it is a logical decoding message.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::support::session::Session;
use crate::support::wait::wait_until;

pub(crate) const TABLE: &str = "public.outbox";
pub(crate) const PUBLICATION: &str = "walpost_outbox";

/// The publication that contains the tables created by the `tables` part of the benchmark.
pub(crate) const TABLES_PUBLICATION: &str = "bench_tables";
/// A publication without tables. pgoutput requires a publication, but sends logical decoding
/// messages regardless of the tables in it.
const EMPTY_PUBLICATION: &str = "walpost_log";
/// The message prefix that `walpost.publish` uses by default.
const PREFIX: &str = "walpost_outbox";

/// A slot that is never advanced. Each measurement reads from a copy of this slot, so that all
/// measurements read the same backlog.
const ORIGIN: &str = "origin";

/// SQL that creates the outbox table, and functions that generate rows. The rows resemble events of
/// an online shop, with 10,000 keys and payloads of about 220 bytes. If a size is given, payloads
/// have that size and consist of incompressible text. The function `payload` contains no subquery,
/// so that PostgreSQL can inline it. Otherwise, each call would cost several times as much as the
/// measured operation.
const SCHEMA: &str = "
CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype text NOT NULL, aggregateid text NOT NULL,
    type text NOT NULL, payload jsonb NOT NULL);
CREATE PUBLICATION walpost_outbox FOR TABLE outbox WITH (publish = 'insert');
CREATE PUBLICATION walpost_log;
CREATE FUNCTION long_payload(n bigint, size int) RETURNS jsonb LANGUAGE sql AS $$
  SELECT jsonb_build_object('n', n, 'note', (SELECT left(string_agg(md5(n || '-' || i), ''), size - 25)
    FROM generate_series(0, size / 32) i)) $$;
CREATE FUNCTION payload(n bigint, size int) RETURNS jsonb LANGUAGE sql AS $$
  SELECT CASE WHEN size IS NULL THEN
    jsonb_build_object('n', n, 'ts', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
      'customer', 'customer-' || (n % 5000),
      'amount', ((n * 7919) % 100000) / 100.0, 'currency', 'EUR', 'status', 'created', 'note',
      substr(md5(n::text) || md5((n + 1)::text) || md5((n + 2)::text), 1, 70))
  ELSE long_payload(n, size) END $$;
CREATE FUNCTION aggregate_type(n bigint, types bigint) RETURNS text LANGUAGE sql AS $$
  SELECT CASE WHEN types = 1 THEN 'order' ELSE 'order-' || n % types END $$;
CREATE PROCEDURE fill(kind text, types bigint, total bigint, batch bigint, size int) LANGUAGE plpgsql AS $$
DECLARE at bigint := 1; last bigint; BEGIN
  WHILE at <= total LOOP
    last := least(at + batch - 1, total);
    CASE kind
      WHEN 'table' THEN
        INSERT INTO outbox SELECT gen_random_uuid(), aggregate_type(n, types), 'ord-' || (n % 10000), 'OrderCreated',
          payload(n, size) FROM generate_series(at, last) n;
      WHEN 'tables' THEN
        EXECUTE format('INSERT INTO bench_%s.outbox SELECT gen_random_uuid(), ''order'', ''ord-'' || (n %% 10000),
          ''OrderCreated'', payload(n, $3) FROM generate_series($1, $2) n', (at / batch) % types + 1) USING at, last, size;
      WHEN 'log' THEN
        PERFORM walpost.publish(aggregate_type(n, types), 'ord-' || (n % 10000), 'OrderCreated', payload(n, size))
          FROM generate_series(at, last) n;
    END CASE;
    COMMIT; at := last + 1;
  END LOOP; END $$";

/// The kind of outbox to which events are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Table,
    /// Logical decoding messages, written with `walpost.publish`.
    Messages,
    /// The outbox tables of the `tables` part. Transactions are distributed among the tables
    /// round-robin.
    Tables,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Table => "table",
            Self::Messages => "log",
            Self::Tables => "tables",
        }
    }

    /// Returns the `walpost run` arguments that select this kind of outbox.
    pub(crate) fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Table => &["--publication", PUBLICATION, "--table", TABLE],
            Self::Messages => &[
                "--outbox",
                "messages",
                "--publication",
                EMPTY_PUBLICATION,
                "--prefix",
                PREFIX,
            ],
            Self::Tables => &["--publication", TABLES_PUBLICATION],
        }
    }

    /// Returns the pgoutput options needed to receive the events.
    pub(crate) fn options(self) -> Vec<String> {
        let publication = |name| format!("publication_names={name}");
        match self {
            Self::Table => vec![publication(PUBLICATION)],
            Self::Messages => vec![publication(EMPTY_PUBLICATION), "messages=true".to_owned()],
            Self::Tables => vec![publication(TABLES_PUBLICATION)],
        }
    }
}

/// Creates the outbox table, the functions that publish messages, and the procedures that write
/// rows.
pub(crate) fn install(db: &Session) {
    let publish = include_str!("../../sql/publish.sql").lines();
    // Omits psql's meta-commands, which begin with a backslash.
    let publish: Vec<_> = publish.filter(|line| !line.starts_with('\\')).collect();
    db.run(&publish.join("\n"));
    // publish.sql sets search_path to pg_catalog, but the tables of the benchmark belong in
    // `public`.
    db.run("RESET search_path");
    db.run(SCHEMA);
}

/// The number and size of the events that form a backlog.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    pub(crate) rows: usize,
    /// The number of rows per transaction.
    pub(crate) batch: usize,
    /// The approximate length of a payload as text, in bytes. `None` for the default payloads.
    pub(crate) payload_bytes: Option<usize>,
    /// The number of aggregate types, which are assigned to rows round-robin. For [`Kind::Tables`],
    /// this is the number of tables, which are assigned to transactions round-robin.
    pub(crate) types: usize,
}

impl Shape {
    /// Returns the parameters of a single-table backlog with the default transaction size and
    /// payload.
    pub(crate) fn with_rows(rows: usize) -> Self {
        Self {
            kind: Kind::Table,
            rows,
            batch: 100,
            payload_bytes: None,
            types: 1,
        }
    }
}

/// Returns the aggregate type of row `n`. The SQL function of the same name must return the same
/// value.
pub(crate) fn aggregate_type(n: usize, types: usize) -> String {
    match types {
        1 => "order".to_owned(),
        types => format!("order-{}", n % types),
    }
}

/// A backlog that has been written to the WAL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Backlog {
    pub(crate) kind: Kind,
    pub(crate) rows: usize,
    pub(crate) batch: usize,
    /// The average payload size in bytes, measured on the payload's text form.
    pub(crate) payload_bytes: f64,
    /// The amount of WAL that was generated while writing the backlog.
    pub(crate) wal_bytes: u64,
    /// How long one session took to write the backlog.
    pub(crate) write_seconds: f64,
}

/// Replaces the previous backlog with a new one.
pub(crate) fn fill(db: &Session, shape: Shape) -> Backlog {
    let Shape {
        kind,
        rows,
        batch,
        types,
        ..
    } = shape;
    empty(db);
    db.run(&create_slot(ORIGIN));
    let payload_size = shape
        .payload_bytes
        .map_or("NULL".to_owned(), |size| size.to_string());
    let start = position(db);
    let began = Instant::now();
    db.run(&format!(
        "CALL fill('{}', {types}, {rows}, {batch}, {payload_size})",
        kind.name()
    ));
    let write_seconds = began.elapsed().as_secs_f64();
    let wal_bytes = position(db) - start;
    let payload_bytes = db.value(&format!(
        "SELECT avg(octet_length(payload(n, {payload_size})::text)) FROM generate_series(1, least({rows}, 1000)) n"
    ));
    db.run("CHECKPOINT");
    eprintln!("  {rows} rows in transactions of {batch} written in {write_seconds:.1} s");
    Backlog {
        kind,
        rows,
        batch,
        payload_bytes: payload_bytes.unwrap().parse().unwrap(),
        wal_bytes,
        write_seconds,
    }
}

/// Deletes the rows and drops the slot [`ORIGIN`], so that the server no longer retains WAL for it.
pub(crate) fn empty(db: &Session) {
    let exists = format!("SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{ORIGIN}'");
    if db.number(&exists) > 0 {
        drop_slot(db, ORIGIN);
    }
    db.run("TRUNCATE outbox");
    db.run("CHECKPOINT");
}

/// Returns the current end of the WAL as a byte position.
pub(crate) fn position(db: &Session) -> u64 {
    let position = db.number("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint");
    u64::try_from(position).unwrap()
}

/// A slot for one measurement. Dropping this value drops the slot.
pub(crate) struct Slot<'a> {
    db: &'a Session,
    pub(crate) name: String,
}

impl<'a> Slot<'a> {
    /// Creates a slot that starts at the beginning of the backlog.
    pub(crate) fn at_backlog(db: &'a Session) -> Self {
        let name = unique_name();
        db.run(&format!(
            "SELECT pg_copy_logical_replication_slot('{ORIGIN}', '{name}')"
        ));
        Self { db, name }
    }

    /// Creates a slot that starts at the current end of the WAL.
    pub(crate) fn at_end(db: &'a Session) -> Self {
        let name = unique_name();
        db.run(&create_slot(&name));
        Self { db, name }
    }
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            drop_slot(self.db, &self.name);
        }
    }
}

fn create_slot(name: &str) -> String {
    format!("SELECT pg_create_logical_replication_slot('{name}', 'pgoutput')")
}

/// Drops a slot. Retries until the server has detected that the client has exited and has released
/// the slot.
fn drop_slot(db: &Session, name: &str) {
    let drop = format!("SELECT pg_drop_replication_slot('{name}')");
    wait_until("the slot to be free", || db.try_run(&drop).is_ok());
}

fn unique_name() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("bench_{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}
