//! The pipeline that a slot belongs to, according to `walpost.slot_state`.
//!
//! Rows of a query can define pipelines, and anyone who can write such a row chooses the pipeline's
//! slot. A pipeline that is defined by a row may therefore use only a slot that is recorded as its
//! own. The owner is recorded in the slot's database, so the check does not depend on how the
//! server's address is written in a row, or on which sources could be read.

use super::own_table::{OwnTable, Use};
use super::{Catalog, CatalogError};
use crate::postgres::sql::text_literal;
use crate::postgres::target::Target;

/// How a pipeline is defined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefinedBy {
    /// The pipeline is defined by an operator, in a file or on the command line. It may use any
    /// slot, because an operator may rename a pipeline.
    Operator,
    /// The pipeline is defined by a row of a query's result.
    Row,
}

/// Whether a pipeline is allowed to use a slot if Walpost can't determine which pipeline the slot
/// belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnknownOwner {
    Allowed,
    Rejected,
}

/// The pipeline that a slot belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SlotOwner {
    /// The pipeline that last used the slot, or the pipeline for which `walpost init` created the
    /// slot.
    Pipeline(String),
    /// `walpost.slot_state` has no row for the slot.
    Unrecorded,
    /// `walpost.slot_state` can't be used, for the given reason.
    Unknown(String),
}

impl SlotOwner {
    /// Checks that the slot belongs to the pipeline.
    fn check(
        &self,
        pipeline: &str,
        target: &Target,
        unknown: UnknownOwner,
    ) -> Result<(), CatalogError> {
        let slot = &target.slot;
        let found = match self {
            Self::Pipeline(owner) if owner == pipeline => return Ok(()),
            Self::Pipeline(owner) => {
                format!(
                    "slot {slot:?} belongs to pipeline {owner:?} according to walpost.slot_state"
                )
            }
            _ if unknown == UnknownOwner::Allowed => return Ok(()),
            Self::Unrecorded => {
                format!(
                    "walpost.slot_state does not record which pipeline slot {slot:?} belongs to"
                )
            }
            Self::Unknown(why) => {
                format!("Walpost can't find out which pipeline slot {slot:?} belongs to ({why})")
            }
        };
        Err(CatalogError::ForeignSlot {
            found,
            pipeline: pipeline.to_owned(),
            take: target.init(&["--take-slot"]),
        })
    }
}

impl Catalog {
    /// If the pipeline is defined by a row, checks that the slot belongs to the pipeline.
    ///
    /// # Errors
    /// Returns an error if the check or a query fails, or if `sql/examine.sql` rejects the table.
    pub(crate) async fn check_slot_owner(
        &self,
        pipeline: &str,
        defined_by: DefinedBy,
        target: &Target,
        unknown: UnknownOwner,
    ) -> Result<(), CatalogError> {
        if defined_by == DefinedBy::Operator {
            return Ok(());
        }
        let owner = self.slot_owner(target).await?;
        owner.check(pipeline, target, unknown)
    }

    /// Returns the pipeline that the slot belongs to. Considers rows of all versions, clusters and
    /// timelines, because a failover or a restored dump does not change which pipeline a slot
    /// belongs to.
    async fn slot_owner(&self, target: &Target) -> Result<SlotOwner, CatalogError> {
        if let Some(reason) = self
            .unusable(target, OwnTable::SlotState, Use::Read)
            .await?
        {
            return Ok(SlotOwner::Unknown(reason));
        }
        let select = format!(
            "SELECT pipeline FROM walpost.slot_state WHERE slot = {}",
            text_literal(&target.slot)
        );
        let rows = self
            .run_on_own_table(OwnTable::SlotState, target, "", &select)
            .await
            .map_err(|error| self.with_slot_state_grant(error))?;
        let owner = rows.first().and_then(|row| row.get("pipeline"));
        Ok(owner.map_or(SlotOwner::Unrecorded, |owner| {
            SlotOwner::Pipeline(owner.to_owned())
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::commands::Commands;
    use crate::postgres::target::Outbox;

    fn check(owner: &SlotOwner, unknown: UnknownOwner) -> Result<(), String> {
        let target = Target {
            outbox: Outbox::Table("public.outbox".parse().expect("table")),
            publication: "p".to_owned(),
            slot: "s".to_owned(),
            commands: Commands::for_pipeline("row"),
        };
        let checked = owner.check("row", &target, unknown);
        checked.map_err(|error| error.to_string())
    }

    #[test]
    fn rejects_slots_of_other_pipelines_and_optionally_slots_with_an_unknown_owner() {
        let own = SlotOwner::Pipeline("row".to_owned());
        let other = SlotOwner::Pipeline("other".to_owned());
        let unreadable = SlotOwner::Unknown("the reason".to_owned());
        for unknown in [UnknownOwner::Allowed, UnknownOwner::Rejected] {
            assert_eq!(check(&own, unknown), Ok(()));
            let error = check(&other, unknown).expect_err("another pipeline");
            for text in [
                "slot \"s\" belongs to pipeline \"other\"",
                "pipeline \"row\"",
            ] {
                assert!(error.contains(text), "{text} in {error}");
            }
            assert!(
                error.ends_with("walpost init --take-slot --pipeline row"),
                "{error}"
            );
        }
        for (owner, expected) in [
            (SlotOwner::Unrecorded, "does not record"),
            (unreadable, "the reason"),
        ] {
            assert_eq!(check(&owner, UnknownOwner::Allowed), Ok(()));
            let error = check(&owner, UnknownOwner::Rejected).expect_err("no known owner");
            assert!(error.contains(expected), "{error}");
        }
    }
}
