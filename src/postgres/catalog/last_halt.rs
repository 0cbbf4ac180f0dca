//! Stores the reason for a pipeline's last halt in its slot's row in `walpost.slot_state`. The
//! reason becomes obsolete once a later position is confirmed.

use serde::{Deserialize, Serialize};

use super::own_table::{OwnTable, Use};
use super::slot_owner::DefinedBy;
use super::slot_state::IN_THIS_DATABASE;
use super::{Catalog, CatalogError};
use crate::model::last_halt::LastHalt;
use crate::model::lsn::Lsn;
use crate::postgres::sql::text_literal;
use crate::postgres::target::Target;

/// The contents of the column `halt` of `walpost.slot_state`.
#[derive(Serialize, Deserialize)]
struct StoredHalt {
    /// The confirmed position of the slot when the pipeline halted.
    confirmed: Lsn,
    halt: LastHalt,
}

impl Catalog {
    /// Records a halt. If the table is not writable, returns the reason why. Does nothing if the
    /// slot has no row, or if the pipeline is defined by a row and the slot belongs to another
    /// pipeline.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects the table.
    pub(crate) async fn record_halt(
        &self,
        pipeline: &str,
        defined_by: DefinedBy,
        target: &Target,
        halt: &LastHalt,
    ) -> Result<Option<String>, CatalogError> {
        if let Some(reason) = self
            .unusable(target, OwnTable::SlotState, Use::Write)
            .await?
        {
            return Ok(Some(reason));
        }
        let halt = serde_json::to_string(halt)
            .map_err(|error| CatalogError::Unexpected(error.to_string()))?;
        let condition = match defined_by {
            DefinedBy::Operator => String::new(),
            DefinedBy::Row => format!(" AND pipeline = {}", text_literal(pipeline)),
        };
        let update = format!(
            "UPDATE walpost.slot_state SET halt = jsonb_build_object('confirmed'::text, confirmed_lsn, 'halt'::text, {}::jsonb)::text \
             WHERE slot = {} AND {IN_THIS_DATABASE}{condition}",
            text_literal(&halt),
            text_literal(&target.slot),
        );
        let settings = "SET LOCAL synchronous_commit = local; ";
        self.run_on_own_table(OwnTable::SlotState, target, settings, &update)
            .await?;
        Ok(None)
    }

    /// Returns the last halt, or `None` if a later position has been confirmed since.
    ///
    /// # Errors
    /// Returns an error if a query fails, or if `sql/examine.sql` rejects the table.
    pub(crate) async fn last_halt(
        &self,
        target: &Target,
    ) -> Result<Option<LastHalt>, CatalogError> {
        let is_unusable = self
            .unusable(target, OwnTable::SlotState, Use::Read)
            .await?;
        if is_unusable.is_some() {
            return Ok(None);
        }
        let select = format!(
            "SELECT halt, confirmed_lsn FROM walpost.slot_state WHERE slot = {} AND octet_length(halt) < 65536 AND {IN_THIS_DATABASE}",
            text_literal(&target.slot),
        );
        let rows = self
            .run_on_own_table(OwnTable::SlotState, target, "", &select)
            .await?;
        let Some(row) = rows.first() else {
            return Ok(None);
        };
        let stored = row
            .try_get("halt")?
            .and_then(|text| serde_json::from_str(text).ok());
        let confirmed: Option<Lsn> = row
            .try_get("confirmed_lsn")?
            .and_then(|lsn| lsn.parse().ok());
        Ok(stored
            .filter(|stored: &StoredHalt| confirmed <= Some(stored.confirmed))
            .map(|stored| stored.halt))
    }
}
