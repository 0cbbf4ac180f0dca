//! Walpost carries a PostgreSQL transactional outbox to Apache Kafka by reading the write-ahead
//! log.
//!
//! ```text
//! socket ──frame──▶ pgoutput ──message──▶ core ──row──▶ route ──record──▶ producer ──▶ Kafka
//!    ▲                                                                       │
//!    └────────── status update: confirmed LSN ◀── watermark ◀── delivery ────┘
//! ```
//!
//! Data flows one way. One value travels back, the confirmed LSN, and only
//! [`pipeline::watermark`] can make one.
//!
//! # The rooms
//!
//! - [`cli`]: the command line, one file per subcommand. [`config`]: flags, environment and
//!   walpost.toml become [`pipeline::settings::PipelineSettings`].
//! - [`supervisor`]: pipelines side by side, each on its thread; signals; what systemd is told.
//! - [`pipeline`]: the loop of one pipeline. [`pipeline::session`] streams over one connection,
//!   [`pipeline::core`] turns frames into records (pure), [`pipeline::watermark`] turns deliveries
//!   into confirmed LSNs (pure), [`pipeline::recovery`] maps every error to its remedy,
//!   [`pipeline::sink`] is the border to Kafka. For exactly-once, [`pipeline::checkpoint`] says how
//!   far the records in Kafka reach and whether a server's log goes on from there, and
//!   [`pipeline::dedup`] leaves out what is there already (both pure). [`pipeline::budget`] says what
//!   follows from the log that the slot keeps (pure). `pipeline::sim`, of the
//!   tests alone, runs all of it against simulated servers.
//! - [`postgres`]: everything that knows PostgreSQL. [`postgres::frame`] and [`postgres::pgoutput`]
//!   are pure codecs, [`postgres::connection`] is the replication socket, [`postgres::catalog`]
//!   asks SQL questions and never streams, [`postgres::provision`] runs the files in `sql/`,
//!   [`postgres::retention`] makes partitions ahead and drops those that are delivered. Beside
//!   the stream, [`postgres::copy`] reads the outbox table, [`postgres::peek`] looks ahead in a slot,
//!   [`postgres::let_go`] gives one up, and [`postgres::journal`] keeps what was done that the log can't
//!   tell.
//! - [`replay`]: sends rows of the outbox table again, beside the pipeline.
//! - [`outbox`]: what an event is. Pure: knows neither PostgreSQL's wire nor Kafka.
//! - [`kafka`]: everything that knows rdkafka. [`kafka::producer`] is the sink,
//!   [`kafka::transaction`] ends its transactions with a checkpoint, [`kafka::limits`] keeps its batches within
//!   what topics take.
//! - [`verify`]: the table held against the topics, after the fact.
//! - [`observe`]: what a person sees while it runs. A pipeline writes what it does into its
//!   [`observe::stats`], without a word per row; [`observe::status`] is that at one moment, and metrics,
//!   readiness, `walpost status` and the page are made of it. [`observe::watchdog`] looks at it once a second,
//!   and [`observe::problem`] has the words for what is wrong.
//! - [`escape`]: text from outside, made fit to be shown: logs, output and answers are written through
//!   it. Pure, and imports nothing of ours.
//! - `fuzz`, of the tests and cargo-fuzz alone: what bytes from outside are held to. Each function
//!   stands in a file `fuzz.rs` beside the code that reads the bytes.
//!
//! # One event's way
//!
//! [`postgres::connection::Connection::fill`] reads from the socket,
//! [`postgres::connection::Connection::peek`] finds a whole frame in the buffer,
//! [`pipeline::core::Core::frame`] decodes it ([`postgres::pgoutput::Message::decode`]), lays its
//! values out ([`outbox::columns::Mapping`]), makes a record of them
//! ([`outbox::route::Router::route`]), counts it ([`pipeline::watermark::Watermark::reserve`]) and
//! hands it over ([`pipeline::sink::Sink::produce`]). Where no record can be made, or the sink finds
//! it too large, that is an error, or by the settings a dead letter
//! ([`outbox::dead_letter::Writer::write`]) that goes the same way. librdkafka copies it, sends it, and calls
//! [`pipeline::watermark::Deliveries::delivered`]. When every record of a transaction and of all
//! before it is delivered, [`pipeline::watermark::Watermark::confirmed`] rises, and
//! [`postgres::connection::Connection::confirm`] tells PostgreSQL.
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
//! 6. Payload bytes are copied once, into the producer (a bytea payload is decoded once before),
//!    are never parsed, and never reach a log.
//! 7. A slot, a publication or a topic is never dropped or moved without the word of a person: on
//!    the command line, or for a slot that keeps more of the log than it may, in the configuration.
//!    What goes with that slot is in the journal before, is listed until it is sent again, and
//!    nothing of the table is removed until then.

// Text from outside is printed and logged by `cli::out` and `observe::logging`, which escape it.
#![cfg_attr(
    not(test),
    warn(clippy::disallowed_methods, clippy::print_stderr, clippy::print_stdout)
)]

pub mod cli;
pub mod config;
pub mod escape;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod kafka;
pub mod observe;
pub mod outbox;
pub mod pipeline;
pub mod postgres;
pub mod replay;
pub mod supervisor;
pub mod verify;
