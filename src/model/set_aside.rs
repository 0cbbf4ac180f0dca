//! A table that is set aside: its rows are not delivered from a position on.

use serde::{Deserialize, Serialize};

use super::commands::Commands;
use super::lsn::{Lsn, Position};

/// A table that was set aside, as the journal has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAside {
    /// The entry of the journal.
    pub id: i64,
    /// When it was written, as the server prints it.
    pub at: String,
    /// The table, as it was called then.
    pub table: String,
    /// Its OID.
    #[serde(skip)]
    pub(crate) relation: u32,
    /// The first row that is not delivered.
    pub position: Position,
    /// The error that this row led to.
    pub reason: String,
    /// A replay has sent the rows, and the stream has not taken over yet.
    #[serde(skip)]
    pub(crate) replayed: Option<Replayed>,
    /// Rows whose commit LSN is at or after this are delivered again. `None` while the entry is open.
    #[serde(skip)]
    pub(crate) until: Option<Lsn>,
    /// The first transaction whose rows may be missing; `None` if any row may be.
    #[serde(skip)]
    pub(crate) since: Option<u64>,
    /// The cluster that transaction and OID belong to.
    #[serde(skip)]
    pub(crate) cluster: Option<String>,
}

/// The rows that a replay has sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replayed {
    /// All rows whose commit LSN is before this.
    pub before: Lsn,
    /// All rows of transactions before this one; it is from the snapshot that the rows were read with.
    pub snapshot_xmin: Option<u64>,
}

impl SetAside {
    /// The table has this name, or had it when it was set aside, or has this OID in this cluster.
    #[must_use]
    pub(crate) fn is_of(&self, table: &str, relation: u32, cluster: &str) -> bool {
        self.table == table || self.relation == relation && self.cluster.as_deref() == Some(cluster)
    }

    /// The table and what is missing, for people.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "table {} is set aside: its events from position {} on are not delivered (entry {} of the journal, {})",
            self.table, self.position, self.id, self.at
        )
    }
}

/// The command that sends the rows of a table again that is set aside.
#[must_use]
pub(crate) fn replay_set_aside(commands: &Commands, table: &str) -> String {
    commands.print(["replay", "--set-aside", "--table", table])
}
