//! Walpost delivers the events in a PostgreSQL transactional outbox to Apache Kafka by reading the
//! write-ahead log.
//!
//! ```text
//! socket ──frame──▶ pgoutput ──message──▶ decode ──row──▶ route ──record──▶ producer ──▶ Kafka
//!    ▲                                                                       │
//!    └────────── status update: confirmed LSN ◀── watermark ◀── delivery ────┘
//! ```
//!
//! Data flows in one direction. The only value that flows back is the confirmed LSN, which only [`delivery::watermark`] can
//! create.
//!
//! # Modules
//!
//! The modules are listed from the highest layer to the lowest. A module may refer only to modules in lower layers.
//! `tests/layers.rs` checks every path in `src/`, including those in tests, and reports the file and line of each violation.
//! A lower layer can call a higher one only through a trait that the lower layer owns. Files must not refer to each other in
//! a cycle either, unless one is a submodule of the other.
//!
//! - [`cli`]: the command line, with one file per subcommand.
//! - [`config`]: converts flags, environment variables and walpost.toml to [`pipeline::settings::PipelineSettings`].
//! - [`import`]: converts another tool's configuration to walpost.toml. This module is in the same layer as [`config`]
//!   and independent of it; tests in `cli` check that [`config`] can read the output of [`import`].
//! - [`supervisor`]: creates sinks and pipelines, and runs each pipeline on its own thread. Handles signals and notifies
//!   systemd. Starts, stops and replaces individual pipelines when their definitions change or on requests from the control
//!   socket.
//! - [`observe`]: monitors a running process. [`observe::status`] is a snapshot of the counters in [`delivery::stats`];
//!   metrics, readiness, `walpost status` and the status page are derived from it. [`observe::watchdog`] checks each
//!   pipeline once a second, and [`observe::problem`] contains the messages about problems. No pipeline stage depends
//!   on this module.
//! - [`replay`]: resends rows of the outbox table while the pipeline runs. [`verify`]: compares the table with the
//!   topics after delivery. [`skip`]: advances a slot past events that the operator chooses to skip.
//! - [`retention`]: creates partitions in advance and drops partitions whose rows have been delivered. This layer is
//!   below [`replay`], which needs the list of detached partitions.
//! - [`pipeline`]: the loop of one pipeline. [`pipeline::session`] starts a session and streams over one connection.
//!   [`pipeline::decode`] turns frames into records (pure); every row passes through [`pipeline::decode::delivery`],
//!   including rows sent by a replay. Each stage defines its errors in its own `error.rs`. [`pipeline::error`] combines
//!   these errors where stages meet, and [`pipeline::recovery`] maps each error to a remedy. Features have their own
//!   modules: [`pipeline::snapshot`] copies rows that are older than the slot, [`pipeline::exactly_once`] omits events
//!   that are already in Kafka and commits transactions with a checkpoint, and [`pipeline::wal_budget`] limits the WAL
//!   that the slot retains. `pipeline::sim`, which exists only in tests, runs the whole pipeline against simulated
//!   servers.
//! - [`postgres`]: all code specific to PostgreSQL. [`postgres::connect`] opens connections, [`postgres::wire`] contains
//!   pure codecs, [`postgres::replication`] is the replication connection, [`postgres::catalog`] runs SQL queries and never
//!   streams, and [`postgres::provision`] runs the files in `sql/`. No other module uses tokio-postgres or
//!   postgres-protocol.
//! - [`kafka`]: all code specific to rdkafka. [`kafka::producer`] is the sink, [`kafka::transaction`] commits its
//!   transactions with a checkpoint, and [`kafka::limits`] keeps its batches within the size limits of topics.
//! - [`sink`]: the trait for destinations of records, its errors, the sink for standard output, and a sink that creates
//!   the actual sink on demand. This layer is below [`kafka`], so that [`kafka::producer`] can implement the trait and
//!   return its errors without conversion.
//! - [`delivery`]: tracks which events were read and up to which position they are durable. [`delivery::watermark`]
//!   turns deliveries into confirmed LSNs (pure). [`delivery::checkpoint`] determines which events are in Kafka and
//!   whether a server's WAL is the continuation of the WAL that contained them (pure). [`delivery::stats`] contains
//!   counters that are cheap to update for every row.
//! - [`outbox`]: turns rows of the outbox table into records. Performs no I/O, and is independent of PostgreSQL's
//!   protocol and of Kafka's client library.
//! - [`model`]: plain values that all modules share.
//! - [`escape`]: escapes untrusted text before it is displayed; logs, output and responses are written through it.
//!   [`progress`]: shows the progress of a long operation on a terminal or in the log. [`program`]: runs a program that
//!   prints a password or a token. [`authorities`]: loads the system's certificate authorities. [`file_error`]: suggests how
//!   to fix a file that can't be written. [`trusted_path`]: opens files that only root and the current user could have
//!   written. These modules import only each other.
//! - [`facade`]: everything that the program, its tests and its benchmarks use. All other items are visible only within the
//!   crate, so that the compiler detects unused code.
//! - `fuzz`, which exists only in tests and for cargo-fuzz: checks that certain properties hold for any untrusted
//!   input. The functions are in files named `fuzz.rs` next to the code that reads the input.
//!
//! # Where to make changes
//!
//! The following list shows which code to change in order to add a feature of a certain kind.
//!
//! - A format for keys, values or headers: [`outbox::settings::Format`] lists the formats, `outbox/converted.rs`
//!   encodes them, and [`outbox::connect`] maps column types to Debezium's types. `tests/golden/debezium` contains
//!   bytes recorded from Debezium.
//! - Several tables on one slot: [`postgres::table_pattern`] matches table names,
//!   `pipeline::decode::table_source` has a mapping for each table, and `sql/tables.sql` and
//!   `pipeline::decode::older_rows` copy the rows of a newly added table.
//! - A topic template: [`outbox::template`] parses it and [`outbox::route`] expands it for a row.
//! - A PostgreSQL version: add it to `postgres_versions` in `./dev` and to `tests/support/`, so that the tests run on it.
//!   Differences in the catalogs are handled in [`postgres::catalog`], and differences in the protocol in
//!   [`postgres::wire`].
//! - A sink: implement [`sink::Sink`] in a new module in the same layer as [`kafka`], add it to
//!   [`pipeline::settings::SinkSettings`], parse its settings in [`config`] and create it in [`supervisor`].
//! - A metric: count it in [`delivery::stats`], and export it in [`observe::status`] and [`observe::metrics`].
//! - An alert: detect the problem in [`observe::watchdog`] and describe it in [`observe::problem`]. Alerts based on metrics
//!   are in `deploy/prometheus/`.
//! - A configuration key: add it to [`config::file`] and, if it is also a flag, to [`config::args`]. [`config`] validates it
//!   and [`pipeline::settings`] contains the result. `config::Definition` determines whether a pipeline keeps running when
//!   the value changes.
//! - A Debezium property: add it to a file in [`import`] if it corresponds to a line in walpost.toml, or else to
//!   `import::known`.
//! - A remedy: [`pipeline::recovery`] maps every error of every stage to its remedy.
//!
//! # The path of an event
//!
//! [`postgres::replication::Connection::receive`] reads from the socket or, if rows arrive quickly, uses data that a
//! thread has read ahead ([`postgres::replication::Connection::read_ahead`]).
//! [`postgres::replication::Connection::peek`] finds a complete frame in the buffer. [`pipeline::decode::Core::frame`]
//! decodes the frame ([`postgres::wire::pgoutput::Message::decode`]), maps its values to columns
//! ([`outbox::columns::Mapping`]) and passes them to [`pipeline::decode::delivery::Delivery`]. `Delivery` creates a
//! record ([`outbox::route::Router::route_with`]), counts it ([`delivery::watermark::Watermark::reserve`]) and passes
//! it to the sink ([`sink::Sink::produce`]). If no record can be created, or the record is too large for the sink, the
//! result is an error or, depending on the settings, a dead letter ([`outbox::dead_letter::Writer::write`]), which
//! takes the same path. librdkafka copies the record, sends it, and calls
//! [`delivery::watermark::Deliveries::delivered`]. Once every record of a transaction and of all earlier transactions
//! is delivered, [`delivery::watermark::Watermark::confirmed`] advances and
//! [`postgres::replication::Connection::confirm`] reports the position to PostgreSQL.
//!
//! # Invariants
//!
//! 1. An LSN is confirmed only when every record of every transaction that ends at or before this LSN is durable in the
//!    sink and, for exactly-once delivery, a checkpoint that covers the LSN is durable too. `Confirmed` has no
//!    constructor outside `watermark`.
//! 2. On one connection, the confirmed LSN never decreases and never exceeds the position received. A new connection
//!    starts from the position that the slot reports. Release builds check these conditions, too.
//! 3. Data that can't be decoded, mapped, routed or produced stops the pipeline with an error that identifies the data.
//!    If the settings allow it, an event that can't be routed, or whose record is too large, is replaced by a dead
//!    letter, which is subject to these invariants like any other record. Nothing is skipped silently.
//! 4. Within a partition, records appear in commit order, and within a transaction in insert order.
//! 5. Memory is bounded by configuration (`window_bytes`, `window_records`, `max_row_bytes`), regardless of the size of the
//!    backlog, the size of a transaction or the duration of an outage.
//! 6. Payload bytes are copied once, into the producer. Before that copy is made, a bytea payload is decoded once, and
//!    a payload whose format is not the column's text is encoded once. Payloads are never parsed unless
//!    `expand_payload` requires it, and are never logged.
//! 7. A slot, a publication or a topic is never dropped or moved unless the operator asked for it, on the command line
//!    or, for a slot that retains more WAL than allowed, in the configuration. The events that are lost when a slot is
//!    dropped are recorded in the journal beforehand and listed until they are resent, and no rows are removed from the
//!    table until then.

// This documentation is for contributors and is built with --document-private-items.
#![allow(rustdoc::private_intra_doc_links)]
// Untrusted text is printed and logged through `cli::out` and `observe::logging`, which escape it.
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

/// The items that are used by the program, its tests and its benchmarks. These items are not a
/// stable API, because the crate is not meant to be used as a library.
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
