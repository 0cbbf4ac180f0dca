//! Errors that can occur while a frame or a copied row is processed.

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

/// An error that prevents [`Core`](super::Core) from processing its input.
#[derive(Debug, thiserror::Error)]
pub enum CoreError {
    /// A message from the output plugin can't be decoded.
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
    /// The table's columns don't match the settings.
    #[error("{error}{hint}", hint = columns_hint(error, at))]
    Mapping {
        /// Position of the first row that has the mismatched columns.
        at: String,
        error: Box<MappingError>,
    },
    #[error(transparent)]
    History(HistoryConflict),
    /// The publication sent a row of a table that is not the outbox.
    #[error(
        "the publication sent a row of table {found} at {at}, but the outbox is {expected}. Change the publication so that it \
         contains only {expected}, with publish_via_partition_root = true if the table is partitioned. The change does not apply \
         to rows that were written before it"
    )]
    ForeignTable {
        /// Position of the row.
        at: Position,
        /// The row's table.
        found: String,
        /// The configured outbox.
        expected: Box<Outbox>,
    },
    /// The publication sent a change to a table, although the outbox consists of logical decoding
    /// messages.
    #[error(
        "the publication sent a change to table {found} at {at}, but the outbox uses logical decoding messages. Remove the tables \
         from the publication: ALTER PUBLICATION ... DROP TABLE ONLY {found}"
    )]
    UnexpectedRow {
        /// Position of the row.
        at: Position,
        /// The row's table.
        found: String,
    },
    /// A message with the outbox's prefix is not a valid event.
    #[error(
        "the message with prefix {prefix:?} at {at} is not a valid event: {error}. Write events with walpost.publish, \
         and use a different prefix for all other messages. To send such messages to the dead-letter topic, set \
         on_malformed = \"dead-letter\""
    )]
    Envelope {
        /// Position of the message.
        at: Position,
        prefix: String,
        /// Why the message is not an event.
        error: EnvelopeError,
    },
    /// A row is larger than `max_row_bytes`.
    #[error(
        "the row at {at} arrived in a message of {bytes} bytes, but max_row_bytes allows {max}. Raise max_row_bytes, and \
         message.max.bytes in [kafka] accordingly. To reject such events when they are written, see sql/outbox.sql and \
         sql/publish.sql"
    )]
    RowTooLarge {
        /// Position of the row.
        at: String,
        /// Size of the message that contains the row.
        bytes: usize,
        /// The value of `max_row_bytes`.
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
        /// The row's table, if it could be determined.
        table: Option<String>,
        /// Why PostgreSQL can't send the row.
        cause: UnsendableCause,
        /// The server's error.
        error: String,
    },
    /// A row belongs to a relation that the stream has not described.
    #[error("the row at {at} belongs to unknown relation {oid}")]
    UnknownRelation {
        /// Position of the row.
        at: Position,
        /// OID of the row's table.
        oid: u32,
    },
    /// The server has described more tables than Walpost keeps track of per connection.
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
    /// A row's contents violate the replication protocol.
    #[error("{table}: the stream contains {found} at {at}")]
    BadTuple {
        /// Position of the row.
        at: Position,
        table: TableName,
        /// Describes the violation.
        found: &'static str,
    },
    /// A row can't be copied, or Walpost can't determine whether the row was already copied.
    #[error("{table}: can't copy the row at {at}, or determine whether it was copied: {error}")]
    BadLine {
        /// Position of the row.
        at: Position,
        table: String,
        /// Why the row can't be copied, or can't be compared with the rows that were already
        /// copied.
        error: LineError,
    },
    /// A row can't be converted to a record.
    #[error(
        "{row} at {at} can't be converted to a record: {error}. To send such events to the dead-letter topic, set \
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
    /// The sink did not accept the record for a row.
    #[error("{row} at {at}: {error}{hint}", hint = dead_letter_hint(error))]
    Produce {
        /// Position of the row.
        at: Position,
        /// A description of the row.
        row: String,
        /// The sink's error.
        error: Box<SinkError>,
    },
    /// The sink did not accept the dead letter for a row.
    #[error(
        "the dead letter for {row} at {at} can't be delivered: {error}. Reason for the dead letter: {reason}"
    )]
    DeadLetter {
        /// Position of the row.
        at: Position,
        /// A description of the row.
        row: String,
        /// The sink's error.
        error: Box<SinkError>,
        /// Why the row could not be delivered as a normal record.
        reason: String,
    },
}

impl CoreError {
    /// Returns the position to pass to `walpost skip` in order to skip the transaction, or `None`
    /// if skipping it would not resolve the error.
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

    /// If `error` means that the server can't send the row at `position`, returns an error about
    /// that row. Returns `None` if `error` has another cause or no transaction is being received.
    pub(crate) fn unsendable(error: &ConnectionError, position: Option<Position>) -> Option<Self> {
        Some(Self::Unsendable {
            at: position?,
            table: None,
            cause: error.unsendable_cause()?,
            error: error.to_string(),
        })
    }

    /// Returns a function that converts a [`MappingError`] for the row at position `at`, for use
    /// with `map_err`.
    pub(crate) fn mapping(at: impl ToString) -> impl FnOnce(MappingError) -> Self {
        let at = at.to_string();
        |error| Self::Mapping {
            at,
            error: Box::new(error),
        }
    }
}

/// Returns a hint that altering the table won't resolve `error`, because a row that is already in
/// the WAL keeps the columns it was written with.
fn columns_hint(error: &MappingError, at: &str) -> String {
    match error {
        // The message for `Renamed` already contains instructions.
        MappingError::Renamed { .. } => String::new(),
        _ => format!(
            ". The rows at {at} have the columns that were in the table and the publication when the rows were written; later \
             changes do not affect these rows"
        ),
    }
}

fn describe_unsendable(cause: UnsendableCause) -> &'static str {
    match cause {
        UnsendableCause::Encoding => "one of the row's values has no equivalent in UTF-8",
        UnsendableCause::Size => "the row contains more than 1 GB of text",
        UnsendableCause::Value => {
            "one of the row's values can't be converted to text, or the publication's row filter fails"
        }
    }
}

/// Returns advice on how to avoid writing rows that PostgreSQL can't send.
fn prevention(cause: UnsendableCause) -> &'static str {
    match cause {
        UnsendableCause::Encoding => {
            "Fix the program that writes values without an equivalent in UTF-8, or move the outbox to a database with the encoding UTF8"
        }
        UnsendableCause::Size => {
            "To reject oversized events when they are written, see sql/outbox.sql and sql/publish.sql"
        }
        UnsendableCause::Value => "Fix the program that wrote the row",
    }
}

/// Returns a hint about the setting that sends events with this error to the dead-letter topic. The
/// hint is empty if no setting applies to `error`.
fn dead_letter_hint(error: &SinkError) -> String {
    let setting = match error {
        SinkError::TooLarge { .. }
        | SinkError::RecordRejected {
            cause: RefusalCause::Size,
            ..
        } => {
            "To send oversized events to the dead-letter topic without their payload (only if the outbox is a table), set \
             on_oversize = \"dead-letter\""
        }
        SinkError::RecordRejected { .. } | SinkError::NoPartition { .. } => {
            "To send unroutable events to the dead-letter topic, set on_unroutable = \"dead-letter\""
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

/// Why a line of `COPY` output can't be processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineError {
    /// The line is not in `COPY` text format.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The key in the line is invalid, so a later copy could not resume after this line.
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

    /// Returns whether `walpost skip` can resolve the error because it concerns a single row. Every
    /// new variant must be added here.
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
