//! What a frame or a copied row can end with.

use crate::delivery::checkpoint::HistoryError;
use crate::delivery::chunks::KeyError;
use crate::delivery::watermark::OrderError;
use crate::model::lsn::Position;
use crate::outbox::columns::MappingError;
use crate::outbox::envelope::EnvelopeError;
use crate::outbox::route::RouteError;
use crate::pipeline::exactly_once::error::HistoryConflict;
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::copy_text::TextError;
use crate::postgres::wire::pgoutput::DecodeError;
use crate::sink::SinkError;

/// Why [`Core`](super::Core) can't take what has come.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// A message of the plugin can't be decoded.
    #[error("{error}, at {at}")]
    Decode {
        /// Position of the message.
        at: String,
        /// What is wrong with it.
        error: DecodeError,
    },
    /// The stream violates the protocol.
    #[error("replication protocol violation: {0}")]
    Order(#[from] OrderError),
    /// The outbox has not the columns that the settings expect.
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    History(HistoryConflict),
    /// The publication has another table's rows.
    #[error(
        "the publication sends a row of table {found} at {at}, but the outbox is {expected}. Let it contain {expected} alone, \
         with publish_via_partition_root = true if that is partitioned"
    )]
    ForeignTable {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
        /// The outbox of the settings.
        expected: Box<Outbox>,
    },
    /// The publication has a table's rows, and the outbox is no table.
    #[error(
        "the publication sends a change to table {found} at {at}, but the outbox is of messages. Take its tables out \
         of the publication: ALTER PUBLICATION ... DROP TABLE {found}"
    )]
    RowBesideMessages {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
    },
    /// A message with the outbox's prefix is no event.
    #[error(
        "the message with prefix {prefix:?} at {at} can't be read: {error}. Events have to be written with \
         walpost.publish, and everything else with another prefix. on_malformed = \"dead-letter\" sends such messages to the \
         topic for dead letters. To leave out the transaction that has it: walpost skip --to {at}"
    )]
    Envelope {
        /// Position of the message.
        at: Position,
        prefix: String,
        /// What is wrong with it.
        error: EnvelopeError,
    },
    /// A row is larger than the configuration allows.
    #[error(
        "the row at {at} comes in a message of {bytes} bytes, and max_row_bytes allows {max}. Raise \
         max_row_bytes, and message.max.bytes in [kafka] with it; keep such events out as \
         sql/outbox.sql and sql/publish.sql do"
    )]
    RowTooLarge {
        /// Position of the row.
        at: String,
        /// Length of the message.
        bytes: usize,
        /// `max_row_bytes`
        max: usize,
    },
    /// A row of a table that was not described before.
    #[error("the row at {at} is of the unknown relation {oid}")]
    UnknownRelation {
        /// Position of the row.
        at: Position,
        /// OID of its table.
        oid: u32,
    },
    /// A row that the protocol doesn't allow.
    #[error("{table}: the stream has {found} at {at}")]
    BadTuple {
        /// Position of the row.
        at: Position,
        table: TableName,
        /// What is there.
        found: &'static str,
    },
    /// A row that can't be copied, or not be told from one that was.
    #[error("{table}: the row at {at} can't be copied, or told from those that were: {error}")]
    BadLine {
        /// Position of the row.
        at: Position,
        table: String,
        /// What is wrong with it.
        error: LineError,
    },
    /// A row that can't become a record.
    #[error("{row} at {at} can't become a record: {error}")]
    Route {
        /// Position of the row.
        at: Position,
        /// The row, for a person.
        row: String,
        /// Why.
        error: RouteError,
    },
    /// A record that the sink doesn't take.
    #[error("{row} at {at}: {error}")]
    Produce {
        /// Position of the row.
        at: Position,
        /// The row, for a person.
        row: String,
        /// Why.
        error: Box<SinkError>,
    },
    /// A dead letter that the sink doesn't take.
    #[error(
        "the dead letter of {row} at {at} can't be delivered either: {error}. It was to be one because: {reason}"
    )]
    DeadLetter {
        /// Position of the row.
        at: Position,
        /// The row, for a person.
        row: String,
        /// Why.
        error: Box<SinkError>,
        /// Why the row can't become a record.
        reason: String,
    },
}

impl From<HistoryError> for CoreError {
    fn from(error: HistoryError) -> Self {
        Self::History(error.into())
    }
}

/// A line that can't be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// It is none of COPY's.
    #[error(transparent)]
    Text(#[from] TextError),
    /// It could not be gone on behind it.
    #[error(transparent)]
    Key(#[from] KeyError),
}
