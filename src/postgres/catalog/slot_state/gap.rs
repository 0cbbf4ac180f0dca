//! Describes events that may be missing because one slot was replaced by another.

use crate::model::dropped_slot::{replay_command, settle_command};
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// Events that may be missing because one slot was replaced by another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    /// The last confirmed position of the former slot. `None` if there was no former slot, or if
    /// its position can't be compared with positions on this server.
    pub(super) from: Option<Lsn>,
    pub(super) reason: &'static str,
    /// The slot that may not have delivered the events; `None` if there was no earlier slot.
    pub(super) former: Option<FormerSlot>,
    /// The rows that are not missing, because the pipeline's first run with the new slot copies
    /// them; `None` if that run copies no table.
    pub(super) copied: Option<Copied>,
    /// Tables whose existing rows were not copied completely while the former slot was in use.
    pub(super) uncopied: Vec<String>,
}

/// The rows that are not missing, because the pipeline's first run copies these rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copied {
    /// Every row of the outbox table.
    Table,
    /// Every row except those in partitions that have been detached in the meantime. The catalog
    /// does not record which partitions were detached.
    Partitions,
}

/// A slot that was replaced by another slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::postgres::catalog) struct FormerSlot {
    pub(in crate::postgres::catalog) slot: String,
    /// The highest position that Walpost may have confirmed for the slot, possibly on a different
    /// timeline or in a different cluster.
    pub(in crate::postgres::catalog) confirmed: Lsn,
}

/// A table whose events may be missing.
pub(super) struct GapTable {
    /// The table's name. `None` for an outbox that uses logical messages, which are not stored in a
    /// table.
    pub(super) name: Option<String>,
    /// Whether commands must name the table, because the outbox has several tables or because the
    /// table is not the outbox table.
    pub(super) is_named: bool,
    /// Whether the table is in the publication, or will be once the publication exists.
    pub(super) is_published: bool,
}

impl GapTable {
    /// Returns the position after which the table's events may be missing. If the table was not
    /// copied completely, all of its events may be missing, and the result is zero.
    pub(super) fn from(&self, gap: &Gap) -> Option<Lsn> {
        let is_uncopied = self
            .name
            .as_ref()
            .is_some_and(|name| gap.uncopied.contains(name));
        gap.from.map(|from| match is_uncopied {
            true => Lsn::ZERO,
            false => from,
        })
    }

    /// Describes how an operator can deliver the events that may be missing.
    pub(super) fn remedy(&self, target: &Target, gap: &Gap) -> String {
        let Some(table) = &self.name else {
            return target.resend();
        };
        let is_other = self.is_named && !is_outbox(target, table);
        let first = match &target.outbox {
            Outbox::Table(_) if is_other => {
                format!("The pipeline delivers events from a table other than {table}. ")
            }
            _ if is_other && self.is_published => format!(
                "No pattern in the tables setting matches {table}, which is published: add the table to this setting. "
            ),
            _ if is_other => format!(
                "No pattern in the tables setting matches {table}, which is no longer in the publication: add the table \
                 to this setting. "
            ),
            _ if self.is_published => String::new(),
            _ => format!("Table {table} is no longer in the publication. "),
        };
        let table = self.is_named.then_some(table.as_str());
        let command = replay_command(&target.commands, table);
        match gap.from {
            Some(_) => format!("{first}Send these events again: {command}"),
            None => format!(
                "{first}Send these events again: {command}. If all of these events were delivered before the database \
                 was moved: {}",
                settle_command(&target.commands, table)
            ),
        }
    }
}

/// The recorded reason for missing events if the pipeline was previously configured with a
/// different slot.
pub(super) const FORMER_SLOT: &str = "the pipeline previously used a different slot";

impl Gap {
    /// Describes how `walpost run` or the operator records in the journal that the events may be
    /// missing.
    #[must_use]
    pub(crate) fn next_step(&self, target: &Target) -> String {
        match self.reason == FORMER_SLOT {
            true => {
                "walpost run records the gap, and logs the command that sends these events again"
                    .to_owned()
            }
            false => format!(
                "walpost.slot_state describes a slot from a different history of the database. To record the missing \
                 events in the journal: {}",
                target.init(&[])
            ),
        }
    }

    /// Removes the outbox table from this gap, because the pipeline's first run will copy the
    /// table. Returns `None` if no events of other tables can be missing.
    pub(super) fn without_copied_table(self) -> Option<Self> {
        // If the former slot was in the same database, no events of other tables can be missing,
        // because Walpost recognizes a renamed table by its OID.
        self.from.is_none().then_some(Self {
            copied: Some(Copied::Table),
            ..self
        })
    }

    /// Describes which table the pipeline's first run copies. Used if Walpost finds no other table
    /// whose events may be missing.
    pub(super) fn describe_copied(&self, outbox: &TableName) -> String {
        format!(
            "{}: the older rows of {outbox} had not been copied before the database was moved. The first run copies the \
             table that is now named {outbox}, so events may be missing from Kafka if a different table had this name then",
            self.reason
        )
    }

    /// Describes which events may be missing, and why. `found` is the slot's position.
    #[must_use]
    pub(crate) fn describe(&self, found: Lsn) -> String {
        self.describe_after(self.from, found)
    }

    pub(super) fn describe_after(&self, from: Option<Lsn>, found: Lsn) -> String {
        let after = match from {
            Some(from) if from > Lsn::ZERO => format!("after {from} and "),
            _ => String::new(),
        };
        let reason = self.reason;
        match self.copied {
            Some(Copied::Partitions) => format!(
                "{reason}: events committed {after}before {found} may be missing from Kafka if they are in a detached \
                 partition. Only attached partitions are copied, so attach the partition first"
            ),
            Some(Copied::Table) => format!(
                "{reason}: events committed {after}before {found} may be missing from Kafka if they are in a table \
                 other than the one that is copied"
            ),
            None => {
                format!(
                    "{reason}: events committed {after}before {found} may be missing from Kafka"
                )
            }
        }
    }
}

/// Returns whether the outbox includes the table with this name.
fn is_outbox(target: &Target, table: &str) -> bool {
    let table: Result<TableName, _> = table.parse();
    table.is_ok_and(|table| target.outbox.includes(&table.schema, &table.name))
}
