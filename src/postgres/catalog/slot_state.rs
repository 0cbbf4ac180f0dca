//! What Walpost has confirmed of its slots, at rest: the table `walpost.slot_state`, which
//! `sql/journal.sql` makes. It is written before PostgreSQL is told, so a slot that stands beyond it was
//! moved, or dropped and made again, by somebody else.

use postgres_protocol::escape::escape_literal;
use serde_json::json;
use tokio_postgres::SimpleQueryRow;
use tracing::{debug, warn};

use super::journal::{Action, DROP_SLOT_NAMES, Entry};
use super::own_table::OwnTable;
use super::{Catalog, CatalogError, SnapshotRecord};
use crate::model::lsn::Lsn;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// Of the rows' format. Rows of other versions say nothing to us.
pub(super) const VERSION: i32 = 1;

/// A slot, and the history that its LSNs are of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SlotOf {
    pub pipeline: String,
    /// Its outbox and slot.
    pub target: Target,
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
}

/// What the table says of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotState {
    /// Where `walpost init` made it, if that did.
    pub created: Option<Lsn>,
    /// Something was read from it.
    pub begun: bool,
    /// Nothing beyond this was confirmed.
    pub confirmed: Lsn,
}

impl SlotState {
    /// `walpost init` has made the slot, it is at `confirmed` where it was made, and nothing was read
    /// from it.
    #[must_use]
    pub(crate) fn is_untouched(self, confirmed: Lsn) -> bool {
        let untouched = Self {
            created: Some(confirmed),
            begun: false,
            confirmed,
        };
        self == untouched
    }
}

/// What is to be done with the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Read,
    Write,
}

/// A slot that stands beyond what was confirmed of it, and nothing says why.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "slot {slot:?} is at {found}, but was confirmed up to {confirmed} only: it was moved or dropped and re-created by \
     someone else. Events committed between {confirmed} and {found} may be missing in Kafka. {resend}; then say that this \
     is known: walpost skip --to {found}"
)]
pub(crate) struct Moved {
    pub slot: String,
    /// Where it stands.
    pub found: Lsn,
    /// What was confirmed.
    pub confirmed: Lsn,
    /// How the events between are delivered.
    pub resend: &'static str,
    /// Something was read from it before.
    pub begun: bool,
}

/// The table, as this role finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FoundState {
    /// It can't be used, for this reason: nobody notices who else moves the slot.
    Unusable(String),
    /// What it says of the slot, in this history; nothing where it has no row of it.
    State(Option<SlotState>),
}

impl Catalog {
    /// What the table says of a slot, after it was examined (`sql/examine.sql`).
    ///
    /// # Errors
    /// The server can't be asked, or the table may not be trusted.
    pub(crate) async fn slot_state(&self, of: &SlotOf) -> Result<FoundState, CatalogError> {
        self.found_state(of, Use::Write).await
    }

    /// That a slot which is at `found` was moved, or re-created, by somebody else, as far as the table and
    /// the journal know. `found` was looked up before.
    ///
    /// # Errors
    /// The server can't be asked, or lets us not read the table, or table or journal may not be trusted.
    pub(crate) async fn moved(
        &self,
        of: &SlotOf,
        found: Lsn,
    ) -> Result<Option<Moved>, CatalogError> {
        let SlotState {
            confirmed, begun, ..
        } = match self.found_state(of, Use::Read).await? {
            FoundState::State(Some(state)) if state.confirmed < found => state,
            FoundState::State(_) | FoundState::Unusable(_) => return Ok(None),
        };
        if self.is_accounted_for(&of.target, confirmed, found).await? {
            return Ok(None);
        }
        Ok(Some(Moved {
            slot: of.target.slot.clone(),
            found,
            confirmed,
            resend: of.target.outbox.resend(),
            begun,
        }))
    }

    async fn found_state(&self, of: &SlotOf, to: Use) -> Result<FoundState, CatalogError> {
        let found = self
            .client()
            .query_opt(
                "SELECT $1 OR has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') \
                 AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE'), \
                 quote_ident(current_user), pg_is_in_recovery() \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE n.nspname = 'walpost' AND c.relname = 'slot_state'",
                &[&(to == Use::Read)],
            )
            .await?;
        let Some(found) = found else {
            let why = "table walpost.slot_state does not exist. Create it: walpost init, or sql/journal.sql and sql/role.sql";
            return Ok(FoundState::Unusable(why.to_owned()));
        };
        if found.try_get(2)? {
            // A row there is about the primary's slot of this name.
            let why = "the server is a standby in recovery, where nothing can be written";
            return Ok(FoundState::Unusable(why.to_owned()));
        }
        if !found.try_get::<_, bool>(0)? {
            let role: String = found.try_get(1)?;
            return Ok(FoundState::Unusable(format!(
                "permission denied for table walpost.slot_state. Grant it: GRANT USAGE ON SCHEMA walpost TO {role}; GRANT \
                 SELECT, INSERT, UPDATE ON walpost.slot_state TO {role}"
            )));
        }
        let select = format!(
            "SELECT created_lsn, begun, confirmed_lsn FROM walpost.slot_state WHERE slot = {} AND version = {VERSION} \
             AND system_id = {} AND timeline = {} \
             AND database_oid = (SELECT oid FROM pg_database WHERE datname = current_database())",
            escape_literal(&of.target.slot),
            escape_literal(&of.system_id),
            of.timeline,
        );
        let rows = self
            .run_on_own_table(OwnTable::SlotState, &of.target, "", &select)
            .await
            .map_err(|error| {
                self.with_grant(error, |role| {
                    format!(
                        "GRANT USAGE ON SCHEMA walpost TO {role}; GRANT SELECT ON walpost.slot_state TO {role}"
                    )
                })
            })?;
        let state = rows.first().map(state).transpose()?;
        Ok(FoundState::State(state))
    }

    /// Writes down that nothing beyond `confirmed` is confirmed of a slot; when this returns, that is on
    /// the server's disk. Cancel safe.
    ///
    /// # Errors
    /// The server can't be asked, or refuses.
    pub(crate) async fn write_slot_state(
        &self,
        of: &SlotOf,
        confirmed: Lsn,
    ) -> Result<(), CatalogError> {
        // Of two instances, the one that lags must not take back what the other has written.
        let same = "s.version = excluded.version AND s.system_id = excluded.system_id AND s.timeline = excluded.timeline \
             AND s.database_oid = excluded.database_oid";
        self.upsert(
            of,
            None,
            true,
            confirmed,
            &format!(
                "begun = true, confirmed_lsn = CASE WHEN {same} THEN greatest(s.confirmed_lsn, excluded.confirmed_lsn) \
                 ELSE excluded.confirmed_lsn END, created_lsn = CASE WHEN {same} THEN s.created_lsn END"
            ),
        )
        .await
    }

    /// Writes down that a slot was just made, and that nothing was read from it.
    ///
    /// # Errors
    /// The server can't be asked, or refuses.
    pub(crate) async fn write_new_slot_state(
        &self,
        of: &SlotOf,
        created: Lsn,
    ) -> Result<(), CatalogError> {
        let set = "begun = false, confirmed_lsn = excluded.confirmed_lsn, created_lsn = excluded.created_lsn";
        self.upsert(of, Some(created), false, created, set).await
    }

    async fn upsert(
        &self,
        of: &SlotOf,
        created: Option<Lsn>,
        begun: bool,
        confirmed: Lsn,
        set: &str,
    ) -> Result<(), CatalogError> {
        let created = created.map_or("NULL".to_owned(), |lsn| format!("'{lsn}'"));
        // Not waiting for standbys is safe: one that is promoted without the row has another timeline.
        let settings = "SET LOCAL synchronous_commit = local; ";
        let sql = format!(
            "INSERT INTO walpost.slot_state AS s \
             (slot, pipeline, version, system_id, database_oid, timeline, created_lsn, begun, confirmed_lsn, at) \
             SELECT {}, {}, {VERSION}, {}, oid, {}, {created}, \
             {begun}, '{confirmed}', now() FROM pg_database WHERE datname = current_database() ON CONFLICT (slot) DO UPDATE \
             SET pipeline = excluded.pipeline, version = excluded.version, system_id = excluded.system_id, \
             database_oid = excluded.database_oid, timeline = excluded.timeline, at = excluded.at, {set}",
            escape_literal(&of.target.slot),
            escape_literal(&of.pipeline),
            escape_literal(&of.system_id),
            of.timeline,
        );
        self.run_on_own_table(OwnTable::SlotState, &of.target, settings, &sql)
            .await?;
        Ok(())
    }

    /// Writes down that a slot was made just now. Where there was another of its name, with what it had
    /// not delivered, the journal says that this was given up; but not where the first start is still to come,
    /// which delivers the rows that are there.
    ///
    /// # Errors
    /// The server can't be asked, or refuses.
    pub(crate) async fn slot_was_made(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<(), CatalogError> {
        let Some(slot) = self.slot(&target.slot).await? else {
            return Ok(());
        };
        let created = slot.confirmed;
        let of = self.slot_of(pipeline, target).await?;
        let is_first = self.snapshot_record(target).await? == SnapshotRecord::Nothing;
        let before = match self.slot_state(&of).await? {
            FoundState::State(before) => before
                .filter(|before| before.begun || !is_first)
                .map(|before| before.confirmed),
            FoundState::Unusable(why) => {
                debug!(pipeline, "{why}");
                return Ok(());
            }
        };
        if let (Some(before), Some(table)) = (before, target.outbox.table())
            && before < created
            && !self.is_accounted_for(target, before, created).await?
        {
            let entry = Entry {
                pipeline,
                target,
                action: Action::DropSlot,
                from: Some(before),
                to: Some(created),
                detail: json!({
                    "reason": "slot re-created",
                    "table": TableName::to_string(table),
                    "system_id": of.system_id,
                }),
            };
            let id = self.write_journal(&entry).await?;
            warn!(
                pipeline,
                slot = target.slot,
                journal = id,
                "an earlier slot of this name was dropped: events committed between {before} and {created} may be \
                 missing in Kafka. Send them again: walpost replay --dropped-slots --pipeline {pipeline}"
            );
        }
        self.write_new_slot_state(&of, created).await
    }

    /// The slot, on the server that this connection is to.
    ///
    /// # Errors
    /// The server can't be asked.
    pub(crate) async fn slot_of(
        &self,
        pipeline: &str,
        target: &Target,
    ) -> Result<SlotOf, CatalogError> {
        // The control file has the timeline of the last checkpoint, which a promotion does not wait for.
        let row = self
            .client()
            .query_one(
                "SELECT system_identifier::text, \
                 CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint()) \
                 ELSE ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int8 END FROM pg_control_system()",
                &[],
            )
            .await?;
        let timeline: i64 = row.try_get(1)?;
        Ok(SlotOf {
            pipeline: pipeline.to_owned(),
            target: target.clone(),
            system_id: row.try_get(0)?,
            timeline: u32::try_from(timeline)
                .map_err(|error| CatalogError::Unexpected(format!("a timeline: {error}")))?,
        })
    }

    /// The journal says why a slot is at `found`, beyond `confirmed`: what is between was skipped, or
    /// given up with the slot before it.
    ///
    /// # Errors
    /// The server can't be asked, or the journal may not be trusted or has something else in it.
    pub(crate) async fn is_accounted_for(
        &self,
        target: &Target,
        confirmed: Lsn,
        found: Lsn,
    ) -> Result<bool, CatalogError> {
        let condition = format!(
            "j.slot = {} AND j.from_lsn <= '{confirmed}' AND (j.action = '{}' AND j.to_lsn >= '{found}' \
             OR j.action IN {DROP_SLOT_NAMES} AND j.to_lsn >= '{confirmed}')",
            escape_literal(&target.slot),
            Action::Skip.name(),
        );
        match self.entries(target, &condition).await {
            Ok(entries) => Ok(!entries.is_empty()),
            Err(CatalogError::NoJournal) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn state(row: &SimpleQueryRow) -> Result<SlotState, CatalogError> {
    let unexpected =
        |column: &str| CatalogError::Unexpected(format!("walpost.slot_state.{column}"));
    let lsn = |column: &str| -> Result<Option<Lsn>, CatalogError> {
        let read = row.try_get(column)?.map(str::parse).transpose();
        read.map_err(|_| unexpected(column))
    };
    Ok(SlotState {
        created: lsn("created_lsn")?,
        begun: row.try_get("begun")? == Some("t"),
        confirmed: lsn("confirmed_lsn")?.ok_or_else(|| unexpected("confirmed_lsn"))?,
    })
}
