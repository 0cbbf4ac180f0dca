//! Reads and writes the journal entries about tables that were set aside. A table is set aside
//! after an error, and its rows are then no longer delivered. Later entries record that the omitted
//! rows were replayed.
//!
//! When a row can't be delivered, its table is set aside: an entry is written before any part of
//! the row's transaction is confirmed, and no rows of the table are delivered from the row's
//! position onward. A replay reads the omitted rows from the table, sends them, and records the LSN
//! before which all rows have been sent. The pipeline then adds an entry that closes the old entry.
//! If the stream has already omitted rows after this LSN, the new entry sets the table aside again,
//! from this LSN onward; otherwise, the stream resumes delivering the table.

use serde_json::{Value, json};

use super::journal::{Action, Entry, SET_ASIDE, Written};
use super::{Catalog, CatalogError, synchronous};
use crate::model::lsn::{Lsn, Position};
use crate::model::set_aside::{Replayed, SetAside};
use crate::postgres::sql::text_literal;
use crate::postgres::table::TableName;
use crate::postgres::target::Target;

/// The states of a journal entry about a set-aside table, stored in the entry's `detail`.
const BEGUN: &str = "begun";
const RESUMED: &str = "resumed";

/// A change that a pipeline records in the journal: delivery of a table was stopped, or the omitted
/// rows were replayed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableNote {
    /// The table was set aside: its rows are not delivered from `position` onward.
    Begun {
        table: String,
        relation: u32,
        position: Position,
        reason: String,
    },
    /// A replay sent the rows that the journal entries in `entries` cover. The stream resumes
    /// delivering the table at `before`.
    Resumed { entries: Vec<SetAside>, before: Lsn },
    /// A replay sent the rows that the journal entries in `entries` cover, but the stream has
    /// omitted later rows in the meantime.
    Missed {
        entries: Vec<SetAside>,
        replayed: Replayed,
        reason: String,
    },
}

impl Catalog {
    /// Returns the journal entries that record that tables of this slot were set aside, oldest
    /// first. Includes entries that are no longer in effect because a later entry closed them.
    ///
    /// # Errors
    /// Returns an error if the query fails, the journal does not exist, or the role is not allowed
    /// to read it.
    pub(crate) async fn set_aside(&self, target: &Target) -> Result<Vec<SetAside>, CatalogError> {
        let condition = format!(
            "j.slot = {} AND (j.action = {} OR j.action = 'replay'::text AND j.detail ->> 'state'::text = 'done'::text AND j.detail ? '{SET_ASIDE}'::text)",
            text_literal(&target.slot),
            text_literal(Action::SetAside.name()),
        );
        let mut found = collect_set_aside(self.entries(target, &condition).await?)?;
        let oids: Vec<_> = found.iter().map(|entry| entry.relation).collect();
        let names = self.recorded_names(target, &oids).await?;
        for entry in &mut found {
            let names = names.get(&entry.relation).map_or(&[][..], Vec::as_slice);
            entry.is_accepted_name = names.iter().any(|name| name.to_string() == entry.table);
        }
        Ok(found)
    }

    /// If the table with this name or OID is still set aside, returns the journal entries of this
    /// slot according to which the table was set aside. Returns no entries if the journal does not
    /// exist.
    ///
    /// # Errors
    /// Same as [`Catalog::set_aside`].
    pub(crate) async fn set_aside_of_table(
        &self,
        target: &Target,
        table: &str,
        relation: u32,
    ) -> Result<Vec<SetAside>, CatalogError> {
        let mut entries = match self.set_aside(target).await {
            Err(CatalogError::NoJournal { .. }) => Vec::new(),
            entries => entries?,
        };
        if entries.iter().any(|entry| entry.until.is_none()) {
            let cluster = self.cluster().await?;
            entries
                .retain(|entry| entry.until.is_none() && entry.is_about(table, relation, &cluster));
        } else {
            entries.clear();
        }
        Ok(entries)
    }

    /// Returns the OID of a table, or zero if the table does not exist.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn relation(&self, table: &TableName) -> Result<u32, CatalogError> {
        let sql = "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                   WHERE n.nspname = $1 AND c.relname = $2";
        let client = self.client();
        let row = client.query_opt(sql, &[&table.schema, &table.name]).await?;
        let oid = row.map(|row| row.try_get(0)).transpose()?;
        Ok(oid.unwrap_or_default())
    }

    /// Adds an entry to the journal. Returns the entry if it records that a table was set aside.
    /// The entry is durable when this function returns.
    ///
    /// # Errors
    /// Returns an error if the query fails, the journal does not exist, or the role is not allowed
    /// to write to it.
    pub(crate) async fn write_set_aside(
        &self,
        pipeline: &str,
        target: &Target,
        note: &TableNote,
    ) -> Result<Option<SetAside>, CatalogError> {
        self.client()
            .batch_execute(&synchronous::wait_for_standbys())
            .await?;
        let (from, to, detail) = match note {
            TableNote::Begun {
                table,
                relation,
                position,
                reason,
            } => {
                // Only rows of transactions that the slot has not confirmed yet can be missing.
                let slot = self.slot_position(&target.slot).await?;
                let since = slot.as_ref().and_then(|slot| slot.catalog_xmin);
                let cluster = match slot {
                    Some(slot) => slot.cluster,
                    None => self.cluster().await?,
                };
                let since = since.map(|id| id.to_string());
                let detail = json!({
                    "state": BEGUN, "table": table, "relation": relation, "position": position, "reason": reason,
                    "catalog_xmin": since, "system_id": cluster,
                });
                (position.commit, None, detail)
            }
            TableNote::Resumed { entries, before } => {
                let detail = json!({
                    "state": RESUMED, "table": entries.first().map(|entry| &entry.table), "closes": ids(entries),
                });
                (first_position(entries), Some(*before), detail)
            }
            TableNote::Missed {
                entries,
                replayed,
                reason,
            } => {
                let last = entries.last();
                let position = Position {
                    commit: replayed.before,
                    index: 0,
                };
                let detail = json!({
                    "state": BEGUN, "table": last.map(|entry| &entry.table), "relation": last.map(|entry| entry.relation),
                    "position": position, "reason": reason, "closes": ids(entries),
                    "catalog_xmin": replayed.snapshot_xmin.map(|id| id.to_string()), "system_id": self.cluster().await?,
                });
                (replayed.before, Some(replayed.before), detail)
            }
        };
        let entry = Entry {
            pipeline,
            target,
            action: Action::SetAside,
            from: Some(from),
            to,
            detail,
        };
        let id = self.write_journal(&entry).await?;
        let entries = self.set_aside(target).await?;
        Ok(entries.into_iter().find(|entry| entry.id == id))
    }
}

fn ids(entries: &[SetAside]) -> Vec<i64> {
    entries.iter().map(|entry| entry.id).collect()
}

fn first_position(entries: &[SetAside]) -> Lsn {
    let first = entries.iter().map(|entry| entry.position.commit).min();
    first.unwrap_or_default()
}

/// Returns the journal entries that record that a table was set aside, with information from later
/// entries: the latest replay of the table, and the position from which delivery of the table was
/// resumed or from which the table was set aside again.
fn collect_set_aside(written: Vec<Written>) -> Result<Vec<SetAside>, CatalogError> {
    let mut found: Vec<SetAside> = Vec::new();
    for entry in written {
        let is_listed = |list: &Value, id: i64| {
            let ids = list.as_array().map(Vec::as_slice).unwrap_or_default();
            ids.iter().any(|listed| listed.as_i64() == Some(id))
        };
        let detail = &entry.detail;
        if entry.action == Action::Replay {
            let Some(before) = entry.to else { continue };
            let replayed = Replayed {
                before,
                snapshot_xmin: parse_id(&detail["snapshot_xmin"]),
            };
            for open in &mut found {
                let is_later = open.replayed.is_none_or(|last| last.before < before);
                if is_listed(&detail[SET_ASIDE], open.id) && is_later {
                    open.replayed = Some(replayed);
                }
            }
            continue;
        }
        for open in &mut found {
            if open.until.is_none() && is_listed(&detail["closes"], open.id) {
                open.until = entry.to;
            }
        }
        if detail["state"] == BEGUN {
            found.push(parse_begun(entry)?);
        }
    }
    Ok(found)
}

fn parse_begun(entry: Written) -> Result<SetAside, CatalogError> {
    let detail = &entry.detail;
    let unexpected = |member: &str| {
        let (id, found) = (entry.id, &detail[member]);
        CatalogError::Unexpected(format!(
            "entry {id} of walpost.journal has {member} = {found} in its detail column"
        ))
    };
    let text = |member: &str| detail[member].as_str().map(str::to_owned);
    let position = text("position").and_then(|text| text.parse().ok());
    let relation = detail["relation"].as_u64();
    let relation = relation.and_then(|oid| u32::try_from(oid).ok());
    Ok(SetAside {
        table: text("table").ok_or_else(|| unexpected("table"))?,
        relation: relation.ok_or_else(|| unexpected("relation"))?,
        position: position.ok_or_else(|| unexpected("position"))?,
        reason: text("reason").unwrap_or_default(),
        since: parse_id(&detail["catalog_xmin"]),
        cluster: text("system_id"),
        replayed: None,
        until: None,
        is_accepted_name: false,
        id: entry.id,
        at: entry.at,
    })
}

/// Parses a transaction ID. The ID is stored as text, because some JSON parsers can't represent
/// numbers this large.
fn parse_id(value: &Value) -> Option<u64> {
    value.as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(id: i64, action: Action, to: Option<u64>, detail: Value) -> Written {
        Written {
            id,
            at: String::new(),
            action,
            from: None,
            to: to.map(Lsn),
            by_role: String::new(),
            detail,
        }
    }

    fn begin(id: i64, table: &str, closes: &[i64], to: Option<u64>) -> Written {
        let detail = json!({
            "state": "begun", "table": table, "relation": 5, "position": "00000000/00000100:0000000002",
            "reason": "why", "catalog_xmin": "7", "system_id": "here", "closes": closes,
        });
        entry(id, Action::SetAside, to, detail)
    }

    fn replay(id: i64, entries: &[i64], to: u64) -> Written {
        let detail = json!({ "state": "done", "set_aside": entries, "snapshot_xmin": "9" });
        entry(id, Action::Replay, Some(to), detail)
    }

    #[test]
    fn table_stays_set_aside_after_a_replay_until_the_stream_resumes_delivering_it() {
        let resumed = json!({ "state": "resumed", "closes": [1] });
        let all = [
            begin(1, "a.outbox", &[], None),
            begin(2, "b.outbox", &[], None),
            replay(3, &[1], 0x300),
            entry(4, Action::SetAside, Some(0x300), resumed),
        ];
        let states = |count| {
            let found = collect_set_aside(all[..count].to_vec()).expect("entries");
            let state = |entry: &SetAside| (entry.replayed.map(|r| r.before.0), entry.until);
            found.iter().map(state).collect::<Vec<_>>()
        };
        assert_eq!(states(2), [(None, None), (None, None)]);
        assert_eq!(states(3), [(Some(0x300), None), (None, None)]);
        let last = [(Some(0x300), Some(Lsn(0x300))), (None, None)];
        assert_eq!(states(4), last);
    }

    #[test]
    fn replaces_a_journal_entry_if_the_stream_omits_rows_during_the_replay() {
        let all = [
            begin(1, "a.outbox", &[], None),
            replay(2, &[1], 0x300),
            begin(3, "a.outbox", &[1], Some(0x300)),
        ];
        let found = collect_set_aside(all.to_vec()).expect("entries");
        assert_eq!(found[0].until, Some(Lsn(0x300)));
        assert_eq!((found[1].until, found[1].replayed), (None, None));
        assert_eq!(found[1].since, Some(7));
    }

    #[test]
    fn rejects_a_journal_entry_with_an_invalid_position() {
        let mut broken = begin(1, "a.outbox", &[], None);
        broken.detail["position"] = json!("here");
        let error = collect_set_aside(vec![broken])
            .expect_err("no position")
            .to_string();
        assert!(error.contains("position"), "{error}");
    }
}
