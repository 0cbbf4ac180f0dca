//! Reads and writes the journal entries about a replay: its start, its progress and its end.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};
use tracing::warn;
use uuid::Uuid;

use super::ReplayError;
use super::selection::Selected;
use crate::model::lsn::Lsn;
use crate::pipeline::settings::PipelineSettings;
use crate::postgres::catalog::journal::Action;
use crate::postgres::catalog::{AdvisoryLockHolder, Catalog, CatalogError};

/// How long to wait for the server to detect that an earlier process of the replay has ended.
const DEAD_RUN_TIMEOUT: Duration = Duration::from_secs(3);
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The contents of a journal entry about a replay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RunNote {
    pub(super) run: Uuid,
    pub(super) state: RunState,
    /// The number of rows that Kafka has acknowledged.
    pub(super) sent: u64,
    /// The rows of the replay. Present only in the entry that is written when the replay starts.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) plan: Option<PlannedRows>,
    /// The key of a row. Kafka has acknowledged this row and all rows that precede it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) last: Option<Vec<String>>,
    /// The IDs of the journal entries about dropped slots that the replay closes. Present only in
    /// the entry that is written when the replay ends.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(super) dropped_slots: Vec<i64>,
    /// The IDs of the journal entries that record that the table was set aside. The replay has sent
    /// the rows that these entries cover. Present only in the entry that is written when the replay
    /// ends.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(super) set_aside: Vec<i64>,
    /// See [`SentRows::snapshot_xmin`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) snapshot_xmin: Option<String>,
}

/// The rows of a set-aside table that have been sent when a replay ends, identified by an LSN and a
/// transaction ID.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SentRows {
    /// All rows with a commit LSN lower than this have been sent.
    pub(super) before: Lsn,
    /// All rows of transactions with an ID lower than this have been sent. The ID is stored as
    /// text.
    pub(super) snapshot_xmin: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum RunState {
    Begun,
    Going,
    Done,
}

/// The rows of a replay, as recorded when the replay starts. Any role that can add entries to the
/// journal may have written the entry, so the role that resumes the replay uses only values from
/// the entry, and never runs SQL from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PlannedRows {
    pub(super) table: String,
    /// The selected rows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) selected: Option<Selected>,
    /// The columns by which rows are ordered.
    pub(super) order: Vec<String>,
    /// The key of the last row of the replay.
    pub(super) until: Option<Vec<String>>,
    pub(super) topic: String,
    pub(super) rows: u64,
    /// The IDs of journal entries about dropped slots.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(super) dropped_slots: Vec<i64>,
    /// The IDs of the journal entries that record that the table was set aside.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(super) set_aside: Vec<i64>,
    /// The rows of a set-aside table that have been sent when the replay ends.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub(super) sent_rows: Option<SentRows>,
}

impl PlannedRows {
    /// Returns the selection of rows, or `None` if the journal entry does not contain a selection.
    pub(super) fn selected(&self) -> Option<Selected> {
        // If the replay is for dropped slots or a set-aside table, the journal entries determine
        // the rows, so the selection is empty.
        if !self.dropped_slots.is_empty() || !self.set_aside.is_empty() {
            return Some(Selected::default());
        }
        self.selected.clone()
    }
}

/// A replay as recorded in the journal.
pub(super) struct RecordedRun {
    /// The journal entry that was written when the replay started.
    pub(super) entry: EntryId,
    pub(super) begun: Begun,
    pub(super) planned: PlannedRows,
    pub(super) last: Option<Vec<String>>,
    pub(super) sent: u64,
}

#[derive(Clone, Copy)]
pub(super) struct EntryId(i64);

impl EntryId {
    pub(super) fn unreadable(self, reason: String) -> ReplayError {
        ReplayError::Entry { id: self.0, reason }
    }
}

/// The role that started a replay, and the start time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Begun {
    /// The role, as recorded by the server.
    pub by_role: String,
    /// The time, as formatted by the server.
    pub at: String,
    /// Whether the role of the current session started the replay.
    pub is_ours: bool,
}

impl RecordedRun {
    /// Finds the replay in the journal. Uses only entries written by the role that started the
    /// replay or by this session's role, so that other roles that can add entries to the journal
    /// can't change the rows that a replay sends, or make the replay look complete.
    pub(super) async fn find(
        writer: &Catalog,
        settings: &PipelineSettings,
        run: Uuid,
    ) -> Result<Self, ReplayError> {
        let row = writer
            .client()
            .query_one("SELECT session_user::text", &[])
            .await;
        let session_user: String = row
            .and_then(|row| row.try_get(0))
            .map_err(CatalogError::from)?;
        let mut found: Option<Self> = None;
        let id = run.to_string();
        for entry in writer.journal(&settings.name, &settings.target).await? {
            let entry_run = entry.detail.get("run").and_then(|run| run.as_str());
            if entry.action != Action::Replay || entry_run != Some(&id) {
                continue;
            }
            if let Some(found) = &found
                && ![&found.begun.by_role, &session_user].contains(&&entry.by_role)
            {
                warn!(
                    entry = entry.id,
                    by_role = entry.by_role,
                    "ignored a journal entry about this replay: it was not written by role {}, which started the replay",
                    found.begun.by_role
                );
                continue;
            }
            let entry_id = EntryId(entry.id);
            let note: RunNote = serde_json::from_value(entry.detail)
                .map_err(|error| entry_id.unreadable(error.to_string()))?;
            match &mut found {
                None => {
                    let Some(planned) = note.plan else { continue };
                    found = Some(Self {
                        entry: entry_id,
                        begun: Begun {
                            is_ours: entry.by_role == session_user,
                            by_role: entry.by_role,
                            at: entry.at,
                        },
                        planned,
                        last: note.last,
                        sent: note.sent,
                    });
                }
                Some(_) if note.state == RunState::Done => return Err(ReplayError::Complete(run)),
                Some(found) => {
                    found.last = note.last.or(found.last.take());
                    found.sent = note.sent;
                }
            }
        }
        found.ok_or_else(|| ReplayError::NoRun {
            pipeline: settings.name.clone(),
            run,
        })
    }
}

/// Acquires a lock that prevents other processes from running the same replay while the connection
/// exists. Must be called before the journal is queried about the replay, because another process
/// may finish the replay before the lock is acquired.
pub(super) async fn lock(writer: &Catalog, run: Uuid) -> Result<(), ReplayError> {
    let name = format!("walpost replay {run}");
    let locked = try_lock(writer, &name).await?;
    locked.map_err(|holder| ReplayError::Running { run, holder })
}

/// Acquires a lock that prevents other replays from sending the events that `flag` selects for the
/// slot while the connection exists. Must be called before the journal is queried for open entries,
/// because another replay may close entries before the lock is acquired.
pub(super) async fn lock_entries(
    writer: &Catalog,
    slot: &str,
    flag: &'static str,
) -> Result<(), ReplayError> {
    let name = format!("walpost replay {flag} {slot}");
    let locked = try_lock(writer, &name).await?;
    locked.map_err(|holder| ReplayError::EntriesLocked {
        slot: slot.to_owned(),
        flag,
        holder,
    })
}

/// The holder of an advisory lock. Shown to the operator, because any role can acquire the lock,
/// even without running a replay.
#[derive(Debug)]
pub(crate) struct LockHolder {
    /// The session that holds the lock, or `None` if the lock has been released in the meantime.
    holder: Option<AdvisoryLockHolder>,
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.holder {
            Some(holder) => write!(
                f,
                "The advisory lock is held by {holder}. Unless the holder is a walpost replay process, release the lock: {}",
                holder.release()
            ),
            None => f.write_str("The session that held the advisory lock has since ended. Run the same command again"),
        }
    }
}

/// Acquires the lock. Returns the lock's holder if another session still holds the lock after
/// [`DEAD_RUN_TIMEOUT`].
async fn try_lock(writer: &Catalog, name: &str) -> Result<Result<(), LockHolder>, CatalogError> {
    let deadline = Instant::now() + DEAD_RUN_TIMEOUT;
    loop {
        let sql = "SELECT pg_try_advisory_lock(hashtextextended($1, 0))";
        let row = writer.client().query_one(sql, &[&name]).await;
        if row?.try_get(0)? {
            return Ok(Ok(()));
        }
        if Instant::now() >= deadline {
            return Ok(Err(lock_holder(writer, name).await?));
        }
        sleep(POLL_INTERVAL).await;
    }
}

async fn lock_holder(writer: &Catalog, name: &str) -> Result<LockHolder, CatalogError> {
    // PostgreSQL 18, 53.13 "pg_locks": classid and objid contain the halves of a bigint key, and
    // objsubid is 1.
    let is_lock = "objsubid = 1 AND (classid::int8 << 32) | objid::int8 = hashtextextended($1, 0)";
    let holder = writer.advisory_lock_holder(is_lock, &[&name]).await?;
    Ok(LockHolder { holder })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::catalog::journal::ALREADY_DELIVERED;

    #[test]
    fn reads_back_a_note_written_to_the_journal() {
        let note = RunNote {
            run: Uuid::nil(),
            state: RunState::Begun,
            sent: 3,
            plan: Some(PlannedRows {
                table: "public.outbox".to_owned(),
                selected: Some(Selected {
                    ids: vec!["1".to_owned()],
                    ..Selected::default()
                }),
                order: vec!["id".to_owned()],
                until: None,
                topic: "t".to_owned(),
                rows: 5,
                dropped_slots: vec![4],
                set_aside: Vec::new(),
                sent_rows: None,
            }),
            last: None,
            dropped_slots: Vec::new(),
            set_aside: Vec::new(),
            snapshot_xmin: None,
        };
        let json = serde_json::to_value(&note).expect("JSON");
        assert_eq!(json["state"], "begun");
        let read: RunNote = serde_json::from_value(json).expect("a note");
        assert_eq!(
            (read.run, read.sent, read.plan),
            (note.run, note.sent, note.plan)
        );
    }

    #[test]
    fn reads_replay_entries_from_the_golden_file() {
        #[derive(Deserialize)]
        struct Line {
            kind: String,
            value: serde_json::Value,
        }
        let golden = include_str!("../../tests/golden/at_rest.jsonl").lines();
        let lines = golden.map(|line| serde_json::from_str::<Line>(line).expect("a line"));
        let mut notes = 0;
        for line in lines.filter(|line| line.kind == "journal replay") {
            let detail = &line.value["detail"];
            // Skip entries that were written by --already-delivered, which does not send rows.
            if detail.get(ALREADY_DELIVERED).is_some() {
                continue;
            }
            let note: RunNote = serde_json::from_value(detail.clone()).expect("a note");
            let written = serde_json::to_value(&note).expect("JSON");
            assert_eq!(&written, detail);
            notes += 1;
        }
        assert!(notes >= 4, "{notes}");
    }
}
