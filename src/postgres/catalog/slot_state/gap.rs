//! Events that may be missing because a slot has replaced another one.

use crate::model::dropped_slot::{replay_command, settle_command};
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::target::{Outbox, Target};

/// Events that may be missing because a slot has replaced another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    /// The position that the earlier slot had confirmed; `None` if that slot was in another
    /// database or cluster.
    pub(super) from: Option<Lsn>,
    pub(super) reason: &'static str,
    /// The slot that may not have delivered the events, if there was one.
    pub(super) former: Option<FormerSlot>,
    /// What the first start with the slot delivers of a single table, if it copies the table.
    pub(super) copied: Option<Copied>,
    /// Tables of which the former slot did not send all rows, because their copy was not complete.
    pub(super) uncopied: Vec<String>,
}

/// Rows that are not part of a gap because they are copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copied {
    /// Every row of the outbox table.
    Table,
    /// Every row except those of partitions that have been detached since, which the catalog does
    /// not record.
    Partitions,
}

/// A slot that was replaced by another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::postgres::catalog) struct FormerSlot {
    pub(in crate::postgres::catalog) slot: String,
    /// The last position that Walpost may have confirmed for it, in its own history.
    pub(in crate::postgres::catalog) confirmed: Lsn,
}

/// A table whose events may be missing.
pub(super) struct GapTable {
    /// `None` stands for messages, which are in no table.
    pub(super) name: Option<String>,
    /// Whether commands have to name the table, because it is one of several, or not that of the
    /// outbox.
    pub(super) is_named: bool,
    /// Whether the table is in the publication, or will be once that exists.
    pub(super) is_published: bool,
}

impl GapTable {
    /// Returns the position after which its events may be missing; zero if its copy was not
    /// complete, so that all events may be.
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

    /// Describes how an operator can have the events delivered.
    pub(super) fn remedy(&self, target: &Target, gap: &Gap) -> String {
        let Some(table) = &self.name else {
            return target.resend();
        };
        let published = match self.is_published {
            true => "is published",
            false => "is no longer in the publication",
        };
        let is_other = self.is_named && !is_outbox(target, table);
        let first = match &target.outbox {
            Outbox::Table(_) if is_other => {
                format!("The pipeline is about another table than {table}. ")
            }
            _ if is_other => format!(
                "No pattern in tables stands for {table}, which {published}: add it to tables. "
            ),
            _ if self.is_published => String::new(),
            _ => format!("Table {table} {published}. "),
        };
        let table = self.is_named.then_some(table.as_str());
        let command = replay_command(&target.commands, table);
        let settle = match gap.from {
            Some(_) => String::new(),
            None => format!(
                ". If all of them were delivered before the database was moved: {}",
                settle_command(&target.commands, table)
            ),
        };
        format!("{first}Send them again: {command}{settle}")
    }
}

/// The reason for a gap after a slot that the configuration no longer names.
pub(super) const FORMER_SLOT: &str = "the pipeline had another slot before";

impl Gap {
    /// Describes how the gap is recorded in the journal.
    #[must_use]
    pub(crate) fn next_step(&self, target: &Target) -> String {
        match self.reason == FORMER_SLOT {
            true => "walpost run records it, and logs the command that sends these events again"
                .to_owned(),
            false => format!(
                "walpost.slot_state describes a slot in another history of the database. Record it: {}",
                target.init(&[])
            ),
        }
    }

    /// Limits the gap to tables other than that of the outbox, which the first start with the slot
    /// copies. Returns `None` if nothing else can be missing.
    pub(super) fn without_copied_table(self) -> Option<Self> {
        // On the same cluster, a table that was renamed is recognized by its OID.
        self.from.is_none().then_some(Self {
            copied: Some(Copied::Table),
            ..self
        })
    }

    /// Describes which table the first start copies, if no other table is known that may contain
    /// events of the gap.
    pub(super) fn describe_copied(&self, outbox: &TableName) -> String {
        format!(
            "{}, where no start had copied the older rows of {outbox} yet. The first start copies the table that is now {outbox}: \
             events may be missing in Kafka if another table had that name before the database was moved",
            self.reason
        )
    }

    /// Describes why and which events may be missing if the slot is at `found`.
    #[must_use]
    pub(crate) fn describe(&self, found: Lsn) -> String {
        self.describe_after(self.from, found)
    }

    pub(super) fn describe_after(&self, from: Option<Lsn>, found: Lsn) -> String {
        let after = match from {
            Some(from) if from > Lsn::ZERO => format!("after {from} and "),
            _ => String::new(),
        };
        format!(
            "{}: events committed {after}before {found} may be missing in Kafka{}",
            self.reason,
            match self.copied {
                Some(Copied::Partitions) => {
                    ", if a partition was detached that has them: those that the table has are copied. Attach it first"
                }
                Some(Copied::Table) => {
                    ", if they are in another table than the one that is copied"
                }
                None => "",
            }
        )
    }
}

/// Returns whether an outbox includes the table of this name.
fn is_outbox(target: &Target, table: &str) -> bool {
    let table: Result<TableName, _> = table.parse();
    table.is_ok_and(|table| target.outbox.includes(&table.schema, &table.name))
}
