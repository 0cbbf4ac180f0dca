//! What a pipeline uses in its database.

use std::fmt;

use super::table::TableName;

/// What a pipeline uses in its database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Where its events are.
    pub outbox: Outbox,
    /// The publication: of the table's inserts, or of nothing.
    pub publication: String,
    /// The logical replication slot.
    pub slot: String,
}

/// Where events are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outbox {
    /// They are the rows inserted into a table.
    Table(TableName),
    /// They are messages in WAL alone, written by `walpost.publish`.
    Messages {
        /// The prefix of the messages that are this outbox's.
        prefix: String,
    },
}

impl Outbox {
    /// The table, where there is one.
    #[must_use]
    pub fn table(&self) -> Option<&TableName> {
        match self {
            Self::Table(table) => Some(table),
            Self::Messages { .. } => None,
        }
    }

    /// The command that makes what such an outbox needs.
    #[must_use]
    pub fn init(&self) -> &'static str {
        match self {
            Self::Table(_) => "walpost init",
            Self::Messages { .. } => "walpost init --outbox messages",
        }
    }

    /// How a person gets events delivered that the slot has passed or lost.
    #[must_use]
    pub fn resend(&self) -> &'static str {
        match self {
            Self::Table(_) => "Send them again from the table: walpost replay --from TIME",
            Self::Messages { .. } => {
                "They are in no table: whoever published them has to publish them again"
            }
        }
    }
}

impl fmt::Display for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(table) => write!(f, "table {table}"),
            Self::Messages { prefix } => write!(f, "messages with prefix {prefix:?}"),
        }
    }
}
