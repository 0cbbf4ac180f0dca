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
    #[error("{error}{hint}", hint = form_hint(error, at))]
    Mapping {
        /// Position of the first row for which the table has these columns.
        at: String,
        error: Box<MappingError>,
    },
    #[error(transparent)]
    History(HistoryConflict),
    /// The publication contains rows of another table.
    #[error(
        "the publication sends a row of table {found} at {at}, but the outbox is {expected}. Let it contain {expected} alone, \
         with publish_via_partition_root = true if that is partitioned. The publication of the time decides about rows that were \
         written before"
    )]
    ForeignTable {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
        /// The configured outbox.
        expected: Box<Outbox>,
    },
    /// The publication contains rows of a table, but the outbox consists of messages.
    #[error(
        "the publication sends a change to table {found} at {at}, but the outbox is of messages. Take its tables out \
         of the publication: ALTER PUBLICATION ... DROP TABLE ONLY {found}"
    )]
    RowBesideMessages {
        /// Position of the row.
        at: Position,
        /// The table of the row.
        found: String,
    },
    /// A message with the outbox's prefix is not an event.
    #[error(
        "the message with prefix {prefix:?} at {at} can't be read: {error}. Events have to be written with \
         walpost.publish, and everything else with another prefix. on_malformed = \"dead-letter\" sends such messages to the \
         topic for dead letters"
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
        "the row at {at} comes in a message of {bytes} bytes, and max_row_bytes allows {max}. Raise \
         max_row_bytes, and message.max.bytes in [kafka] with it; keep such events out as \
         sql/outbox.sql and sql/publish.sql do"
    )]
    RowTooLarge {
        /// Position of the row.
        at: String,
        /// Size of the message.
        bytes: usize,
        /// `max_row_bytes`
        max: usize,
    },
    /// PostgreSQL can't convert a row.
    #[error(
        "PostgreSQL can't send the row at {at}, because a value of it has no equivalent in UTF-8: {error}. {}Correct what writes \
         such values, or have the outbox in a database with the encoding UTF8",
        table.as_ref().map(|table| format!("The row is of table {table}. ")).unwrap_or_default()
    )]
    Unconvertible {
        /// Position of the row.
        at: String,
        /// The table of the row, if it could be determined.
        table: Option<String>,
        /// The server's error.
        error: String,
    },
    /// A row of a table that the stream has not described.
    #[error("the row at {at} is of the unknown relation {oid}")]
    UnknownRelation {
        /// Position of the row.
        at: Position,
        /// OID of the row's table.
        oid: u32,
    },
    /// More tables than Walpost keeps for one connection.
    #[error(
        "the server has described {max} tables of the outbox since Walpost connected, and describes another one at {at}: this needs a \
         new connection"
    )]
    TooManyTables {
        /// Position of the first row of the table.
        at: String,
        /// Maximum number of tables.
        max: usize,
    },
    /// A row that violates the protocol.
    #[error("{table}: the stream has {found} at {at}")]
    BadTuple {
        /// Position of the row.
        at: Position,
        table: TableName,
        /// Describes the violation.
        found: &'static str,
    },
    /// A row that can't be copied, or for which it can't be determined whether it was copied.
    #[error("{table}: the row at {at} can't be copied, or told from those that were: {error}")]
    BadLine {
        /// Position of the row.
        at: Position,
        table: String,
        /// Why the row can't be read or compared.
        error: LineError,
    },
    /// A row that can't be converted to a record.
    #[error(
        "{row} at {at} can't become a record: {error}. on_unroutable = \"dead-letter\" sends such events to the topic for dead \
         letters"
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
        "the dead letter of {row} at {at} can't be delivered either: {error}. It was to be one because: {reason}"
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
    /// Returns the position to pass to `walpost skip` in order to omit the transaction, if that
    /// resolves the error and nothing else is wrong.
    pub(crate) fn skip_to(&self) -> Option<String> {
        match self {
            Self::Mapping { at, .. }
            | Self::RowTooLarge { at, .. }
            | Self::Unconvertible { at, .. } => Some(at.clone()),
            Self::ForeignTable { at, .. }
            | Self::RowBesideMessages { at, .. }
            | Self::Envelope { at, .. }
            | Self::Route { at, .. } => Some(at.to_string()),
            Self::DeadLetter { at, .. } => Some(at.to_string()),
            Self::Produce { at, error, .. } => match error.as_ref() {
                SinkError::TooLarge { .. }
                | SinkError::RecordRefused { .. }
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

    /// Returns a function that converts a mapping error for a row at this position.
    pub(crate) fn mapping(at: impl ToString) -> impl FnOnce(MappingError) -> Self {
        let at = at.to_string();
        |error| Self::Mapping {
            at,
            error: Box::new(error),
        }
    }
}

/// Explains why altering the table does not change the row that `error` concerns: the columns of a
/// row in the WAL do not change afterwards.
fn form_hint(error: &MappingError, at: &str) -> String {
    match error {
        // The message already contains the explanation.
        MappingError::Renamed { .. } => String::new(),
        _ => format!(
            ". The rows at {at} have the table's form of the time when they were written, and the publication's, which nothing \
             changes afterwards"
        ),
    }
}

/// Explains how to deliver the events that follow one whose record is rejected. Empty if the record
/// is not the reason.
fn dead_letter_hint(error: &SinkError) -> String {
    let setting = match error {
        SinkError::TooLarge { .. }
        | SinkError::RecordRefused {
            cause: RefusalCause::Size,
            ..
        } => {
            "Or set on_oversize = \"dead-letter\", which sends such events of a table to the topic for dead letters without their \
             payload"
        }
        SinkError::RecordRefused { .. } | SinkError::NoPartition { .. } => {
            "Or set on_unroutable = \"dead-letter\", which sends such events to the topic for dead letters"
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
    /// A copy could not be resumed after the line.
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
            | CoreError::RowBesideMessages { .. }
            | CoreError::Envelope { .. }
            | CoreError::RowTooLarge { .. }
            | CoreError::Unconvertible { .. }
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
            CoreError::RowBesideMessages {
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
            CoreError::Unconvertible {
                at: place(),
                table: Some(outbox()),
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
    fn every_error_about_a_row_names_its_position() {
        for error in errors() {
            assert!(is_about_a_row(&error), "{error:?}");
            let text = error.to_string();
            assert!(text.contains(&AT.to_string()), "{text}");
        }
    }
}
