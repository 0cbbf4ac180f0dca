//! Slots that were dropped.

use serde::{Deserialize, Serialize};

use super::commands::Commands;
use super::lsn::Lsn;

/// A journal entry about events that may be missing because a slot was dropped or a table was
/// unpublished for a while. The events have not been replayed yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedSlot {
    /// The ID of the journal entry.
    pub id: i64,
    /// When the slot was dropped, as formatted by the server.
    pub at: String,
    /// The slot's confirmed position. Every event up to that position was delivered. The position
    /// is 0/0 if older rows were still being copied, and `None` if the slot belonged to a different
    /// history of the database, for example because the database has been restored from a backup.
    pub from: Option<Lsn>,
    /// The end of the WAL when the slot was dropped. Events that were committed after this position, but before a new
    /// slot existed, are missing too.
    pub to: Option<Lsn>,
    /// The table whose events may be missing, if several tables shared the slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table: Option<String>,
    /// True if no slot was dropped, but the table was absent from the publication for a while.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub left_publication: bool,
    /// True if no slot was dropped, but this table was replaced with another table.
    #[serde(
        default,
        rename = "replaced",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub is_replaced: bool,
    /// True if the only missing rows are in partitions that have since been detached.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detached_partitions: bool,
    /// True if no slot was dropped, but partitions were detached before their older rows were copied.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub uncopied_partitions: bool,
    /// The first transaction whose rows may be missing. If `None`, any row may be missing.
    #[serde(skip)]
    pub(crate) since: Option<u64>,
    /// The system identifier of the cluster to which the transaction ID in `since` belongs.
    #[serde(skip)]
    pub(crate) cluster: Option<String>,
}

impl DroppedSlot {
    /// Describes the journal entry and the events that may be missing, for use in messages.
    #[must_use]
    pub fn describe(&self) -> String {
        let of_table = match &self.table {
            Some(table) => format!(" of table {table}"),
            None => String::new(),
        };
        let when = match (self.from, self.to) {
            (None | Some(Lsn::ZERO), Some(to)) => format!("before {to}"),
            (from, _) => format!("after {}", from.unwrap_or_default()),
        };
        format!(
            "events{of_table} committed {when} (journal entry {}, written at {})",
            self.id, self.at
        )
    }

    /// Returns the reason why the events may be missing.
    #[must_use]
    pub fn cause(&self) -> &'static str {
        match self.left_publication {
            true if self.is_replaced => "the table was replaced by another table",
            true => "the table was temporarily missing from the publication",
            false if self.uncopied_partitions => {
                "partitions were detached before their older rows were copied. Only attached partitions are read, so \
                 reattach these partitions first"
            }
            false if self.detached_partitions => {
                "a different slot was used before, and its undelivered events may be in detached partitions. Walpost reads only attached \
                 partitions: if a detached partition contains such events, attach it first"
            }
            false => "a slot was dropped",
        }
    }

    /// Returns the command that resends the missing events.
    #[must_use]
    pub(crate) fn replay(&self, commands: &Commands) -> String {
        replay_command(commands, self.table.as_deref())
    }
}

/// Returns the command that marks the events of dropped slots as already delivered, without
/// resending them.
#[must_use]
pub(crate) fn settle_command(commands: &Commands, table: Option<&str>) -> String {
    match table {
        Some(table) => commands.print([
            "replay",
            "--dropped-slots",
            "--already-delivered",
            "--table",
            table,
        ]),
        None => commands.print(["replay", "--dropped-slots", "--already-delivered"]),
    }
}

/// Returns the command that resends the events of dropped slots. `table` is `None` unless several tables shared the
/// slot.
#[must_use]
pub(crate) fn replay_command(commands: &Commands, table: Option<&str>) -> String {
    match table {
        Some(table) => commands.print(["replay", "--dropped-slots", "--table", table]),
        None => commands.print(["replay", "--dropped-slots"]),
    }
}
