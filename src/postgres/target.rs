//! The database objects that a pipeline uses.

use std::fmt;

use super::table::TableName;
use super::table_pattern::TablePatterns;
use crate::model::commands::Commands;
use crate::model::set_aside::replay_set_aside;

/// The schema and name of the table `walpost.outbox_row`, which `sql/tables.sql` creates. If
/// several outbox tables share a slot, `walpost.add_outbox` uses this table to send the existing
/// rows of an added table.
pub(crate) const OUTBOX_ROW: [&str; 2] = ["walpost", "outbox_row"];

/// The database objects that a pipeline uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// Where the pipeline's events are stored.
    pub outbox: Outbox,
    /// The publication, which publishes inserts into the outbox's tables. For an outbox that uses
    /// logical messages, it contains no tables.
    pub publication: String,
    /// The logical replication slot.
    pub slot: String,
    /// A formatter for the commands that messages suggest for this pipeline.
    pub commands: Commands,
}

impl Target {
    /// Returns the `init` command for this type of outbox, with `words` as additional arguments.
    #[must_use]
    pub(crate) fn init(&self, words: &[&str]) -> String {
        let outbox: &[&str] = match self.outbox {
            Outbox::Messages { .. } => &["--outbox", "messages"],
            Outbox::Table(_) | Outbox::Tables(_) | Outbox::OneOf { .. } => &[],
        };
        let words = [&["init"], outbox, words].concat();
        self.commands.print_words(&words)
    }

    /// Returns the command that creates the table.
    #[must_use]
    pub(crate) fn init_table(&self, table: &TableName) -> String {
        self.init(&["--table", &table.to_string()])
    }

    /// Returns the table if the target is one of several outbox tables that share a slot.
    #[must_use]
    pub(crate) fn table_of_several(&self) -> Option<String> {
        match &self.outbox {
            Outbox::OneOf { table, .. } => Some(table.to_string()),
            Outbox::Table(_) | Outbox::Tables(_) | Outbox::Messages { .. } => None,
        }
    }

    /// Returns the command that resends the table's rows, starting at a time that the operator has
    /// to fill in.
    #[must_use]
    pub(crate) fn replay_from(&self) -> String {
        let table = match &self.outbox {
            Outbox::Tables(_) => Some("TABLE".to_owned()),
            _ => self.table_of_several(),
        };
        match table {
            Some(table) => {
                let words = ["replay", "--table", &table, "--from", "TIME"];
                self.commands.print(words)
            }
            None => self.commands.print(["replay", "--from", "TIME"]),
        }
    }

    /// Returns the command that skips the events before the given position.
    #[must_use]
    pub(crate) fn skip(&self, to: &str) -> String {
        self.commands.print(["skip", "--to", to])
    }

    /// Returns the command that resends the rows of a set-aside table.
    #[must_use]
    pub(crate) fn replay_set_aside(&self, table: &str) -> String {
        replay_set_aside(&self.commands, table)
    }

    /// Returns the command that creates the slot.
    #[must_use]
    pub(crate) fn init_slot(&self) -> String {
        self.init(&["--slot", &self.slot])
    }

    /// Describes how an operator can resend events that the slot skipped or lost.
    #[must_use]
    pub(crate) fn resend(&self) -> String {
        match &self.outbox {
            Outbox::Table(_) => {
                format!(
                    "Send these events again from the table: {}",
                    self.replay_from()
                )
            }
            Outbox::Tables(_) | Outbox::OneOf { .. } => {
                let words = ["replay", "--table", "TABLE", "--from", "TIME"];
                let replay = self.commands.print(words);
                format!("Send these events again from each table: {replay}")
            }
            Outbox::Messages { .. } => {
                "These events are not stored in a table, so the application must publish them again"
                    .to_owned()
            }
        }
    }
}

/// Where a pipeline's events are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outbox {
    /// Events are the rows inserted into a table.
    Table(TableName),
    /// Events are the rows inserted into any of these tables.
    Tables(TablePatterns),
    /// One table of an outbox with several tables, for a command that concerns only this table.
    OneOf { table: TableName, of: TablePatterns },
    /// Events are logical decoding messages. `walpost.publish` writes them, and they exist only in
    /// WAL.
    Messages {
        /// The prefix of this outbox's messages.
        prefix: String,
    },
}

impl Outbox {
    /// Returns the table if this outbox consists of, or has been narrowed to, a single table.
    #[must_use]
    pub fn table(&self) -> Option<&TableName> {
        match self {
            Self::Table(table) | Self::OneOf { table, .. } => Some(table),
            Self::Tables(_) | Self::Messages { .. } => None,
        }
    }

    /// Narrows an outbox that consists of several tables to `table`. Returns other outboxes
    /// unchanged.
    #[must_use]
    pub(crate) fn narrow_to(&self, table: &TableName) -> Self {
        match self {
            Self::Tables(of) | Self::OneOf { of, .. } => Self::OneOf {
                table: table.clone(),
                of: of.clone(),
            },
            Self::Table(_) | Self::Messages { .. } => self.clone(),
        }
    }

    /// Returns whether several tables share the publication and the slot.
    #[must_use]
    pub(crate) fn is_several(&self) -> bool {
        matches!(self, Self::Tables(_) | Self::OneOf { .. })
    }

    /// Returns whether events are logical decoding messages, which are not stored in a table.
    #[must_use]
    pub fn is_messages(&self) -> bool {
        matches!(self, Self::Messages { .. })
    }

    /// Returns whether the table with this schema and name, as stored in the catalog, belongs to
    /// the outbox.
    #[must_use]
    pub(crate) fn includes(&self, schema: &str, name: &str) -> bool {
        match self {
            Self::Table(table) => table.is(schema, name),
            Self::Tables(tables) | Self::OneOf { of: tables, .. } => tables.matches(schema, name),
            Self::Messages { .. } => false,
        }
    }
}

impl fmt::Display for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Table(table) | Self::OneOf { table, .. } => write!(f, "table {table}"),
            Self::Tables(tables) => write!(f, "tables {tables}"),
            Self::Messages { prefix } => write!(f, "messages with prefix {prefix:?}"),
        }
    }
}
