//! Walpost carries a PostgreSQL transactional outbox to Apache Kafka by reading the write-ahead
//! log.
//!
//! ```text
//! socket ──frame──▶ pgoutput ──message──▶ decode ──row──▶ route ──record──▶ producer ──▶ Kafka
//!    ▲                                                                       │
//!    └────────── status update: confirmed LSN ◀── watermark ◀── delivery ────┘
//! ```
//!
//! Data flows one way. One value travels back, the confirmed LSN, and only
//! [`delivery::watermark`] can make one.
//!
//! # The rooms
//!
//! From the highest to the lowest. A room may name those below it and none of the same rank: `tests/layers.rs` reads every
//! path in `src/`, of the tests in it too, and fails with the file and line of one that goes up. The only way up is a trait that
//! the lower room owns. Files do not name each other in a circle either, but for a file that is a part of another.
//!
//! - [`cli`]: the command line, one file per subcommand.
//! - [`config`]: flags, environment and walpost.toml become [`pipeline::settings::PipelineSettings`].
//! - [`import`]: another tool's configuration becomes walpost.toml. Beside [`config`], which it does not know: `cli` tests
//!   that what the one writes, the other reads.
//! - [`supervisor`]: builds sinks and pipelines, and runs these side by side, each on its thread; signals; what systemd
//!   is told. It starts, stops and replaces single ones as their definitions change, or as the control socket asks.
//! - [`observe`]: what a person sees while it runs. It reads what [`delivery::stats`] counts: [`observe::status`] is that at one
//!   moment, and metrics, readiness, `walpost status` and the page are made of it. [`observe::watchdog`] looks at it once a
//!   second, and [`observe::problem`] has the words for what is wrong. No stage names it.
//! - [`replay`]: sends rows of the outbox table again, beside the pipeline. [`verify`]: the table compared with the topics,
//!   after the fact. [`skip`]: moves a slot over what a person leaves out.
//! - [`retention`]: makes partitions ahead and drops those that are delivered. Below replay, which asks it for the partitions
//!   that it has taken off.
//! - [`pipeline`]: the loop of one pipeline. [`pipeline::session`] starts and streams over one connection,
//!   [`pipeline::decode`] turns frames into records (pure): [`pipeline::decode::delivery`] is the way of every row, also of one
//!   that a replay sends. Each stage has a file `error.rs` with what it can end with; [`pipeline::error`] joins them where
//!   stages come together, and [`pipeline::recovery`] has the remedy of each.
//!   Features have rooms of their own: [`pipeline::snapshot`] copies rows that are older than the slot,
//!   [`pipeline::exactly_once`] leaves out what is in Kafka already and commits with a checkpoint, [`pipeline::wal_budget`] says
//!   what follows from the WAL that the slot retains. `pipeline::sim`, of the tests alone, runs all of it against simulated
//!   servers.
//! - [`postgres`]: everything that knows PostgreSQL. [`postgres::connect`] opens connections, [`postgres::wire`] has pure
//!   codecs, [`postgres::replication`] is the replication socket, [`postgres::catalog`] asks SQL questions and never streams,
//!   [`postgres::provision`] runs the files in `sql/`. Nobody else names tokio-postgres and postgres-protocol.
//! - [`kafka`]: everything that knows rdkafka. [`kafka::producer`] is the sink, [`kafka::transaction`] ends its transactions with
//!   a checkpoint, [`kafka::limits`] keeps its batches within what topics take.
//! - [`sink`]: where records go: the trait, its errors, the sink that is standard output, and one that makes another when it is
//!   needed. It is below [`kafka`], so that Kafka's sink is the trait's implementation there, and its errors need no second form.
//! - [`delivery`]: what was read and how far it is durable. [`delivery::watermark`] turns deliveries into confirmed LSNs (pure),
//!   [`delivery::checkpoint`] says how far the records in Kafka reach and whether a server's WAL continues it (pure),
//!   [`delivery::stats`] counts, without a word per row.
//! - [`outbox`]: what an event is. Pure: knows neither PostgreSQL's wire nor Kafka.
//! - [`model`]: values that all rooms speak of.
//! - [`escape`]: text from outside, made fit to be shown: logs, output and answers are written through
//!   it. Pure. [`progress`]: how far a long job is, on a terminal or in the log. [`program`]: runs a program that prints a
//!   password or a token. [`authorities`]: the certificate authorities of this machine. [`file_error`]: what to do about a file
//!   that can't be written. [`trusted_path`]: opens files that only root and this user could have written. They import
//!   nothing but each other.
//! - [`facade`]: what the program, its tests and its benchmarks name. All else is seen by this crate alone, so that the
//!   compiler finds what nobody uses.
//! - `fuzz`, of the tests and cargo-fuzz alone: what bytes from outside are held to. Each function
//!   stands in a file `fuzz.rs` beside the code that reads the bytes.
//!
//! # To change something
//!
//! - A format of keys, values or headers: [`outbox::settings::Format`] names it, `outbox/converted.rs` lays it out,
//!   and what Debezium makes of a column's type is in [`outbox::connect`]. `tests/golden/debezium` has its real bytes.
//! - Several tables on a slot: [`postgres::table_pattern`] says which, `pipeline::decode::table_source` has a mapping for each,
//!   and `sql/tables.sql` with `pipeline::decode::older_rows` brings the rows of one that is added.
//! - A topic template: [`outbox::template`] has its syntax, [`outbox::route`] fills it in for a row.
//! - A PostgreSQL version: `postgres_versions` in `./dev` and `tests/support/`, so that the tests run on it; what it answers
//!   otherwise is asked in [`postgres::catalog`], what it sends otherwise is read in [`postgres::wire`].
//! - A sink: [`sink::Sink`] is what it does. It is a room beside [`kafka`]; [`pipeline::settings::SinkSettings`] names it,
//!   [`config`] reads that, [`supervisor`] builds it.
//! - A metric: [`delivery::stats`] counts it, [`observe::status`] and [`observe::metrics`] show it.
//! - An alert: [`observe::watchdog`] finds it, [`observe::problem`] words it; `deploy/prometheus/` has those that are made of
//!   metrics.
//! - A configuration key: [`config::file`] and, where it is a flag too, [`config::args`]; [`config`] checks it and
//!   [`pipeline::settings`] carries it. Whether a pipeline goes on when it changes follows from `config::Definition`.
//! - A property of Debezium: a file of [`import`], if it makes a line of walpost.toml; else `import::known`.
//! - A remedy: [`pipeline::recovery`], for every error of every stage.
//!
//! # One event's way
//!
//! [`postgres::replication::Connection::fill`] reads from the socket, or takes what a thread has read ahead of it while rows
//! come fast ([`postgres::replication::Connection::read_ahead`]),
//! [`postgres::replication::Connection::peek`] finds a whole frame in the buffer,
//! [`pipeline::decode::Core::frame`] decodes it ([`postgres::wire::pgoutput::Message::decode`]), lays its
//! values out ([`outbox::columns::Mapping`]) and gives them to [`pipeline::decode::delivery::Delivery`], which makes a record
//! of them ([`outbox::route::Router::route_with`]), counts it ([`delivery::watermark::Watermark::reserve`]) and
//! hands it over ([`sink::Sink::produce`]). Where no record can be made, or the sink finds
//! it too large, that is an error, or by the settings a dead letter
//! ([`outbox::dead_letter::Writer::write`]) that goes the same way. librdkafka copies it, sends it, and calls
//! [`delivery::watermark::Deliveries::delivered`]. When every record of a transaction and of all
//! before it is delivered, [`delivery::watermark::Watermark::confirmed`] rises, and
//! [`postgres::replication::Connection::confirm`] tells PostgreSQL.
//!
//! # Invariants
//!
//! 1. An LSN is confirmed only when every record of every transaction that ends at or before it is
//!    durable in the sink, and for exactly-once a checkpoint that covers it is too. `Confirmed` has
//!    no constructor outside `watermark`.
//! 2. On one connection, the confirmed LSN never goes back and is never beyond what was received;
//!    a new connection starts from the slot's own word. Asserted in release builds.
//! 3. What can't be decoded, mapped, routed or produced stops the pipeline with an error that names
//!    it. Where the settings say so, an event that can't be routed, or whose record is too large, has
//!    a dead letter in its place instead: a record as any other to these invariants. Nothing is ever
//!    skipped.
//! 4. Within a partition, records appear in commit order, and in insert order inside a transaction.
//! 5. Memory is bounded by configuration (`window_bytes`, `window_records`, `max_row_bytes`),
//!    whatever the backlog, the transaction or the outage.
//! 6. Payload bytes are copied once, into the producer (a bytea payload is decoded once before; another format than
//!    the column's text is written once before), are never parsed unless `expand_payload` asks, and never reach a log.
//! 7. A slot, a publication or a topic is never dropped or moved without the word of a person: on
//!    the command line, or for a slot that retains more WAL than it may, in the configuration.
//!    What goes with that slot is in the journal before, is listed until it is sent again, and
//!    nothing of the table is removed until then.

// The pages are for those who change the crate: made with --document-private-items.
#![allow(rustdoc::private_intra_doc_links)]
// Text from outside is printed and logged by `cli::out` and `observe::logging`, which escape it.
#![cfg_attr(
    not(test),
    warn(clippy::disallowed_methods, clippy::print_stderr, clippy::print_stdout)
)]

mod authorities;
mod cli;
mod config;
mod delivery;
mod escape;
mod file_error;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod import;
mod kafka;
mod model;
mod observe;
mod outbox;
mod pipeline;
mod postgres;
mod program;
mod progress;
mod replay;
mod retention;
mod sink;
mod skip;
mod supervisor;
mod trusted_path;
mod verify;

/// What the program, its tests and its benchmarks take from here. It promises nothing to others: the crate is a program.
#[doc(hidden)]
pub mod facade {
    pub use crate::cli::main;
    pub use crate::delivery::watermark::{Deliveries, Tag, Watermark};
    pub use crate::kafka::credentials::Credentials;
    pub use crate::kafka::producer::KafkaSink;
    pub use crate::kafka::properties::{Properties, PropertyError, check, client_config};
    pub use crate::kafka::unknown_codes::replace_unknown;
    pub use crate::model::lsn::{Lsn, Position};
    pub use crate::model::time::unix_micros;
    pub use crate::model::window::Window;
    pub use crate::observe::metrics::{METRICS, MetricType};
    pub use crate::outbox::columns::{COLUMNS_MAX, Mapping, Row, TableColumn};
    pub use crate::outbox::route::Router;
    pub use crate::outbox::settings::{Format, HeaderFormat, OutboxSettings};
    pub use crate::outbox::{Record, dead_letter};
    pub use crate::pipeline::decode::{Core, Step};
    pub use crate::postgres::connect::conninfo::Conninfo;
    pub use crate::postgres::replication::Connection;
    pub use crate::postgres::table::identifier;
    pub use crate::postgres::target::Outbox;
    pub use crate::postgres::wire::frame::Frame;
    pub use crate::postgres::wire::pgoutput::{Message, Value};
    pub use crate::sink::{Produced, Sink, SinkError};
}
