//! Errors that a frame or a copied row can cause.

use crate::delivery::checkpoint::HistoryError;
use crate::delivery::chunks::KeyError;
use crate::delivery::failure::RefusalCause;
use crate::delivery::watermark::OrderError;
use crate::model::lsn::Position;
use crate::outbox::columns::MappingError;
use crate::outbox::envelope::EnvelopeError;
use crate::outbox::route::RouteError;
use crate::pipeline::exactly_once::error::HistoryConflict;
use crate::postgres::replication::{ConnectionError, UnsendableCause};
use crate::postgres::table::TableName;
use crate::postgres::target::Outbox;
use crate::postgres::wire::copy_text::TextError;
use crate::postgres::wire::pgoutput::DecodeError;
use crate::sink::SinkError;

/// Why [`Core`](super::Core) can't process its input.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// A message of the output plugin can't be decoded.
    #[error("{error}, at {at}")]
    Decode {
        /// Position of the message.
        at: String,
        /// The decoding error.
        error: DecodeError,
    },
    /// The stream violates the protocol.
    #[error("replication protocol violation: {0}")]
    Order(#[from] OrderError),
    /// The table lacks the columns that the settings require.
    #[error("{error}{hint}", hint = columns_hint(error, at))]
    Mapping {
        /// Position of the first row for which the table has these columns.
        at: String,
        error: Box<MappingError>,
    },
    #[error(transparent)]
    History(HistoryConflict),
    /// The publication contains rows of another table.
    #[error(
        "the publication sent a row of table {found} at {at}, but the outbox is {expected}. Change the publication so that it \
         contains only {expected}, with publish_via_partition_root = true if the table is partitioned. The change does not apply \
         to rows that were written before it"
    )]
    ForeignTable {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
        /// The configured outbox.
        expected: Box<Outbox>,
    },
    /// The publication contains a table, but the outbox uses messages.
    #[error(
        "the publication sent a change to table {found} at {at}, but the outbox uses logical decoding messages. Remove the tables \
         from the publication: ALTER PUBLICATION ... DROP TABLE ONLY {found}"
    )]
    UnexpectedRow {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
    },
    /// A message with the outbox's prefix is not an event.
    #[error(
        "the message with prefix {prefix:?} at {at} is not a valid event: {error}. Write events with walpost.publish, and use \
         a different prefix for all other messages. To send such messages to the topic for dead letters, set on_malformed = \
         \"dead-letter\""
    )]
    Envelope {
        /// Position of the message.
        at: Position,
        prefix: String,
        /// Why the message is not an event.
        error: EnvelopeError,
    },
    /// A row is larger than the configuration allows.
    #[error(
        "the row at {at} arrived in a message of {bytes} bytes, but max_row_bytes allows {max}. Raise max_row_bytes, and \
         message.max.bytes in [kafka] accordingly. To reject such events when they are written, see sql/outbox.sql and \
         sql/publish.sql"
    )]
    RowTooLarge {
        /// Position of the row.
        at: String,
        /// Size of the message.
        bytes: usize,
        /// `max_row_bytes`
        max: usize,
    },
    /// PostgreSQL can't send a row.
    #[error(
        "PostgreSQL can't send the row at {at}, because {}: {error}. {}{}",
        describe_unsendable(*cause),
        table.as_ref().map(|table| format!("The row belongs to table {table}. ")).unwrap_or_default(),
        prevention(*cause)
    )]
    Unsendable {
        /// Position of the row.
        at: Position,
        /// The table of the row, if it could be determined.
        table: Option<String>,
        /// Why PostgreSQL can't send the row.
        cause: UnsendableCause,
        /// The server's error.
        error: String,
    },
    /// A row of a table that the stream has not described.
    #[error("the row at {at} belongs to unknown relation {oid}")]
    UnknownRelation {
        /// Position of the row.
        at: Position,
        /// OID of the row's table.
        oid: u32,
    },
    /// The server has described more tables than Walpost supports for one connection.
    #[error(
        "the server has described {max} outbox tables since Walpost connected, and describes another one at {at}; a new connection \
         is required"
    )]
    TooManyTables {
        /// Position of the first row of the table.
        at: String,
        /// Maximum number of tables.
        max: usize,
    },
    /// A row that violates the protocol.
    #[error("{table}: the stream contains {found} at {at}")]
    BadTuple {
        /// Position of the row.
        at: Position,
        table: TableName,
        /// Describes the violation.
        found: &'static str,
    },
    /// A row can't be copied, or Walpost can't determine whether the row was copied.
    #[error("{table}: can't copy the row at {at}, or determine whether it was copied: {error}")]
    BadLine {
        /// Position of the row.
        at: Position,
        table: String,
        /// Why the row can't be read or compared.
        error: LineError,
    },
    /// A row that can't be converted to a record.
    #[error(
        "{row} at {at} can't be converted to a record: {error}. To send such events to the topic for dead letters, set \
         on_unroutable = \"dead-letter\""
    )]
    Route {
        /// Position of the row.
        at: Position,
        /// A description of the row.
        row: String,
        /// The routing error.
        error: RouteError,
    },
    /// A record that the sink does not accept.
    #[error("{row} at {at}: {error}{hint}", hint = dead_letter_hint(error))]
    Produce {
        /// Position of the row.
        at: Position,
        /// A description of the row.
        row: String,
        /// The sink's error.
        error: Box<SinkError>,
    },
    /// A dead letter that the sink does not accept.
    #[error(
        "the dead letter for {row} at {at} can't be delivered either: {error}. Reason for the dead letter: {reason}"
    )]
    DeadLetter {
        /// Position of the row.
        at: Position,
        /// A description of the row.
        row: String,
        /// The sink's error.
        error: Box<SinkError>,
        /// Why the row can't be converted to a record.
        reason: String,
    },
}

impl CoreError {
    /// Returns the position to pass to `walpost skip` in order to omit the transaction, or `None`
    /// if omitting the transaction does not resolve the error.
    pub(crate) fn skip_to(&self) -> Option<String> {
        match self {
            Self::Mapping { at, .. } | Self::RowTooLarge { at, .. } => Some(at.clone()),
            Self::Unsendable { at, .. } => Some(at.to_string()),
            Self::ForeignTable { at, .. }
            | Self::UnexpectedRow { at, .. }
            | Self::Envelope { at, .. }
            | Self::Route { at, .. } => Some(at.to_string()),
            Self::DeadLetter { at, .. } => Some(at.to_string()),
            Self::Produce { at, error, .. } => match error.as_ref() {
                SinkError::TooLarge { .. }
                | SinkError::RecordRejected { .. }
                | SinkError::NoPartition { .. } => Some(at.to_string()),
                _ => None,
            },
            Self::Decode { .. }
            | Self::Order(_)
            | Self::History(_)
            | Self::UnknownRelation { .. }
            | Self::TooManyTables { .. }
            | Self::BadTuple { .. }
            | Self::BadLine { .. } => None,
        }
    }

    /// Returns an error about the row at `position` if the server can't send this row, according to
    /// `error`. Returns `None` if the error has another cause, or outside a transaction.
    pub(crate) fn unsendable(error: &ConnectionError, position: Option<Position>) -> Option<Self> {
        Some(Self::Unsendable {
            at: position?,
            table: None,
            cause: error.unsendable_cause()?,
            error: error.to_string(),
        })
    }

    /// Returns a function that converts a mapping error for a row at this position.
    pub(crate) fn mapping(at: impl ToString) -> impl FnOnce(MappingError) -> Self {
        let at = at.to_string();
        |error| Self::Mapping {
            at,
            error: Box::new(error),
        }
    }
}

/// Returns a hint that altering the table does not affect the row that `error` concerns, because
/// the columns of a row in the WAL do not change.
fn columns_hint(error: &MappingError, at: &str) -> String {
    match error {
        // The message already contains the explanation.
        MappingError::Renamed { .. } => String::new(),
        _ => format!(
            ". The rows at {at} have the columns that the table and the publication had when the rows were written; later changes \
             do not affect these rows"
        ),
    }
}

fn describe_unsendable(cause: UnsendableCause) -> &'static str {
    match cause {
        UnsendableCause::Encoding => "one of its values has no equivalent in UTF-8",
        UnsendableCause::Size => "its values have more than 1 GB of text",
    }
}

/// Returns how to prevent rows that PostgreSQL can't send.
fn prevention(cause: UnsendableCause) -> &'static str {
    match cause {
        UnsendableCause::Encoding => {
            "Fix the program that writes such values, or move the outbox to a database with the encoding UTF8"
        }
        UnsendableCause::Size => {
            "To reject such events when they are written, see sql/outbox.sql and sql/publish.sql"
        }
    }
}

/// Returns a hint about the setting that replaces an event with a dead letter if the sink rejects
/// its record. Empty if the error has a different cause.
fn dead_letter_hint(error: &SinkError) -> String {
    let setting = match error {
        SinkError::TooLarge { .. }
        | SinkError::RecordRejected {
            cause: RefusalCause::Size,
            ..
        } => {
            "To send such events of a table to the topic for dead letters without their payload, set on_oversize = \"dead-letter\""
        }
        SinkError::RecordRejected { .. } | SinkError::NoPartition { .. } => {
            "To send such events to the topic for dead letters, set on_unroutable = \"dead-letter\""
        }
        _ => return String::new(),
    };
    format!(". {setting}")
}

impl From<HistoryError> for CoreError {
    fn from(error: HistoryError) -> Self {
        Self::History(error.into())
    }
}

/// A line of `COPY` that can't be processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line does not have the format of COPY.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The line's key is invalid, so a copy could not be resumed after this line.
    #[error(transparent)]
    Key(#[from] KeyError),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::lsn::Lsn;
    use crate::postgres::wire::pgoutput::Message;

    const AT: Position = Position {
        commit: Lsn(0x200),
        index: 7,
    };

    /// Returns whether the error concerns a row, so that `walpost skip` applies. Each new variant
    /// must be added here.
    fn is_about_a_row(error: &CoreError) -> bool {
        match error {
            CoreError::Order(_) | CoreError::History(_) => false,
            CoreError::Decode { .. }
            | CoreError::Mapping { .. }
            | CoreError::ForeignTable { .. }
            | CoreError::UnexpectedRow { .. }
            | CoreError::Envelope { .. }
            | CoreError::RowTooLarge { .. }
            | CoreError::Unsendable { .. }
            | CoreError::UnknownRelation { .. }
            | CoreError::TooManyTables { .. }
            | CoreError::BadTuple { .. }
            | CoreError::BadLine { .. }
            | CoreError::Route { .. }
            | CoreError::Produce { .. }
            | CoreError::DeadLetter { .. } => true,
        }
    }

    fn errors() -> Vec<CoreError> {
        let (at, place) = (AT, || AT.to_string());
        let outbox = || "t".to_owned();
        let broken = || Box::new(SinkError::Broken(String::new()));
        vec![
            CoreError::Decode {
                at: place(),
                error: Message::decode(b"").expect_err("nothing"),
            },
            CoreError::mapping(at)(MappingError::TooManyColumns(outbox())),
            CoreError::ForeignTable {
                at,
                found: outbox(),
                expected: Box::new(Outbox::Table(TableName::from_catalog("public", "t"))),
            },
            CoreError::UnexpectedRow {
                at,
                found: outbox(),
            },
            CoreError::Envelope {
                at,
                prefix: outbox(),
                error: EnvelopeError::Large(1),
            },
            CoreError::RowTooLarge {
                at: place(),
                bytes: 2,
                max: 1,
            },
            CoreError::Unsendable {
                at,
                table: Some(outbox()),
                cause: UnsendableCause::Size,
                error: String::new(),
            },
            CoreError::UnknownRelation { at, oid: 1 },
            CoreError::TooManyTables {
                at: place(),
                max: 1,
            },
            CoreError::BadTuple {
                at,
                table: TableName::from_catalog("public", "t"),
                found: "nothing",
            },
            CoreError::BadLine {
                at,
                table: outbox(),
                error: KeyError.into(),
            },
            CoreError::Route {
                at,
                row: outbox(),
                error: RouteError::TopicNull,
            },
            CoreError::Produce {
                at,
                row: outbox(),
                error: broken(),
            },
            CoreError::DeadLetter {
                at,
                row: outbox(),
                error: broken(),
                reason: String::new(),
            },
        ]
    }

    #[test]
    fn includes_the_position_in_every_error_about_a_row() {
        for error in errors() {
            assert!(is_about_a_row(&error), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(&AT.to_string()), "{text}");
        }
    }
}
