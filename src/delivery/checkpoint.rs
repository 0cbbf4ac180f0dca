//! Which events are in Kafka, and whether the available WAL continues from there.
//!
//! In exactly-once mode, a checkpoint is written in the same Kafka transaction as the records it
//! describes, so neither can exist without the other. A pipeline starts from the last checkpoint:
//! the records in Kafka are exactly those of the row messages described by [`Delivered`]. This
//! module does no I/O.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::chunks::CopyProgress;
use crate::model::lsn::{Lsn, Position};

/// Version of the text format.
const VERSION: u32 = 1;

/// Size of an entry of [`Checkpoint::partitions`] besides the topic's name: quotes, colon, number,
/// comma.
const PARTITION_ENTRY_BYTES: usize = 16;

/// The state of a pipeline at one point in its stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    version: u32,
    /// Incremented each time another history is adopted.
    pub epoch: u32,
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
    pub slot: String,
    /// Everything that ends at or before this LSN is in Kafka, so it may be confirmed to
    /// PostgreSQL.
    pub safe_lsn: Lsn,
    /// The row messages that have been processed; `None` before the first.
    pub delivered: Option<Delivered>,
    /// Number of partitions of each topic, when its first record was sent. Incomplete if there are
    /// very many topics: see [`Checkpoint::record_partitions`].
    pub partitions: BTreeMap<String, usize>,
    /// The rows older than the stream that have been copied; `None` once the stream has passed
    /// their snapshots.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<CopyProgress>,
}

/// The row messages in Kafka, among those that the WAL may send again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivered {
    /// Row messages up to and including a known one.
    UpTo(Last),
    /// Row messages of transactions whose commit record is before this LSN.
    Before(Lsn),
}

/// The last row message that was processed, with the data that identifies it when it is sent again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Last {
    /// LSN of its transaction's commit record.
    pub commit_lsn: Lsn,
    /// Its index among all row messages of the transaction, including those that became no record.
    pub index: u64,
    /// Its transaction ID.
    pub xid: u32,
    /// Commit time of the transaction, in microseconds since 2000-01-01 UTC.
    pub commit_time: i64,
    /// ID of the event, if it has one.
    pub event_id: Option<String>,
}

impl Last {
    /// Returns the position in the WAL.
    #[must_use]
    pub fn position(&self) -> Position {
        Position {
            commit: self.commit_lsn,
            index: self.index,
        }
    }
}

/// The state of a server, with which a checkpoint is compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerState {
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
    /// The earlier timelines, and where each ended.
    pub history: Vec<Switch>,
    pub slot: String,
    /// The slot's confirmed LSN.
    pub confirmed: Lsn,
    /// The end of the WAL on disk, queried after the checkpoint was read. A walsender sends nothing
    /// after it.
    pub flushed: Lsn,
}

/// The switch from a timeline to a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    pub timeline: u32,
    /// Where the timeline ended: later timelines share none of its WAL from here on.
    pub at: Lsn,
}

/// How to continue from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The epoch from now on.
    pub epoch: u32,
    /// The LSN that may be confirmed already.
    pub safe_lsn: Lsn,
    /// The row messages that are in Kafka.
    pub delivered: Option<Delivered>,
    /// The copied rows that are in Kafka.
    pub snapshot: Option<CopyProgress>,
    /// Records in Kafka whose transactions are no longer in the WAL.
    pub phantom: Option<Phantom>,
}

impl Resume {
    /// Returns how far the WAL was read before: the WAL to resume from must extend at least to this
    /// LSN.
    #[must_use]
    pub fn reach(&self) -> Lsn {
        let delivered = match &self.delivered {
            // The commit record was read completely.
            Some(Delivered::UpTo(last)) => Lsn(last.commit_lsn.0.saturating_add(1)),
            Some(Delivered::Before(lsn)) => *lsn,
            None => Lsn::ZERO,
        };
        let copied = self.snapshot.as_ref();
        let copied = copied.map_or(Lsn::ZERO, CopyProgress::last_snapshot_lsn);
        delivered.max(self.safe_lsn).max(copied)
    }
}

/// Transactions that were published and then lost in a failover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phantom {
    /// Where the timeline ended.
    pub from: Lsn,
    /// The last position that was published.
    pub to: Position,
}

/// Hint for errors that also occur if two servers run the same pipeline: each overwrites the
/// other's checkpoint, which looks like a change of history.
const SECOND_SERVER_HINT: &str = "If a second server delivers to the same brokers for this pipeline, such as a clone of the disk, stop one of them";

/// Why a pipeline can't resume from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// The checkpoint belongs to another cluster.
    #[error(
        "the checkpoint is of the PostgreSQL cluster with system identifier {expected}, and this one is {found}: what of \
         its events is in Kafka is not known"
    )]
    OtherCluster {
        /// System identifier of this cluster.
        found: String,
        /// System identifier in the checkpoint.
        expected: String,
    },
    /// The checkpoint belongs to another slot.
    #[error("the checkpoint is of slot {expected:?}, and the configuration says {found:?}")]
    OtherSlot {
        /// The configured slot.
        found: String,
        /// The slot in the checkpoint.
        expected: String,
    },
    /// The checkpoint's timeline is not in the cluster's history.
    #[error(
        "the checkpoint was made on timeline {expected}, and the cluster is on timeline {found}, which does not come \
         from it: it was restored, or a standby that was left behind was promoted"
    )]
    OtherTimeline {
        /// Current timeline of the cluster.
        found: u32,
        /// The timeline in the checkpoint.
        expected: u32,
    },
    /// The slot is ahead of the checkpoint.
    #[error(
        "slot {slot:?} was confirmed up to {confirmed}, and the checkpoint is safe up to {safe} only: the slot was \
         dropped and re-created, or moved, by someone else. Events committed between {safe} and {confirmed} may be \
         missing in Kafka"
    )]
    SlotAhead {
        slot: String,
        /// Confirmed LSN of the slot.
        confirmed: Lsn,
        /// Safe LSN of the checkpoint.
        safe: Lsn,
    },
    /// The WAL ends before a position that was already published.
    #[error(
        "WAL of the server ends at {flushed}, and what is in Kafka was read from it up to {reach}, on the same timeline: \
         the database was put back to an earlier state (a snapshot of its disk or machine, a base backup that was started \
         without recovery). Events that are committed now take the places of others that are in Kafka. Slot {slot:?} is at \
         {confirmed}. {SECOND_SERVER_HINT}"
    )]
    LogEndsBefore {
        /// End of the WAL.
        flushed: Lsn,
        /// How far the WAL must extend.
        reach: Lsn,
        slot: String,
        /// Confirmed LSN of the slot.
        confirmed: Lsn,
    },
    /// The transaction at the checkpoint's position is a different one.
    #[error(
        "the transaction with commit LSN {commit} has {what} {found}, and had {expected} when it was published: this is \
         another history of the cluster. {SECOND_SERVER_HINT}"
    )]
    OtherTransaction {
        /// LSN of the commit record.
        commit: Lsn,
        /// The property that differs.
        what: &'static str,
        /// Its value in the WAL.
        found: String,
        /// Its value in the checkpoint.
        expected: String,
    },
    /// The checkpoint's last transaction should have been sent again, but was not.
    #[error(
        "the transaction with commit LSN {commit}, the last that was published, is not in WAL any more, which \
         continues at {next} without it. This is another history of the cluster. {SECOND_SERVER_HINT}"
    )]
    TransactionMissing {
        /// LSN of its commit record.
        commit: Lsn,
        /// Commit LSN of the transaction that was sent instead.
        next: Lsn,
    },
    /// The WAL contains an event that was not published, although everything up to that position
    /// was.
    #[error(
        "the transaction with commit LSN {commit} has an event that is not in Kafka, and WAL was delivered up to {safe}: \
         this is another history of the cluster. {SECOND_SERVER_HINT}"
    )]
    NotPublished {
        /// LSN of the commit record.
        commit: Lsn,
        /// Safe LSN of the checkpoint.
        safe: Lsn,
    },
}

/// Why a text is not a valid checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The checkpoint was written by another version of Walpost.
    #[error(
        "it has version {0}, and version {VERSION} was expected; run the Walpost that wrote it"
    )]
    Version(u64),
    /// The text is malformed.
    #[error("it can't be read: {0}")]
    Unreadable(String),
}

impl Checkpoint {
    /// Creates the first checkpoint of a history: nothing has been published, and everything that
    /// ends at or before the slot's confirmed LSN counts as processed.
    #[must_use]
    pub fn first(epoch: u32, server: &ServerState) -> Self {
        Self {
            version: VERSION,
            epoch,
            system_id: server.system_id.clone(),
            timeline: server.timeline,
            slot: server.slot.clone(),
            safe_lsn: server.confirmed,
            delivered: None,
            partitions: BTreeMap::new(),
            snapshot: None,
        }
    }

    /// Parses the text format, which is a JSON object.
    ///
    /// # Errors
    /// The text is malformed, or has another version.
    pub fn decode(text: &[u8]) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u64,
        }
        let unreadable = |error: serde_json::Error| CheckpointError::Unreadable(error.to_string());
        let Versioned { version } = serde_json::from_slice(text).map_err(unreadable)?;
        if version != u64::from(VERSION) {
            return Err(CheckpointError::Version(version));
        }
        serde_json::from_slice(text).map_err(unreadable)
    }

    /// Returns the text format.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts and numbers are JSON")
    }

    /// Records a topic's number of partitions, and returns the number recorded before.
    ///
    /// The topics may take at most `bytes_max`, because a checkpoint is a single record that is
    /// written with every commit. If this is exceeded, topics that are not `in_use` are removed; if
    /// all are in use, the new topic is not recorded. The only consequence is that a change in the
    /// number of partitions of such a topic goes unnoticed.
    pub fn record_partitions(
        &mut self,
        topic: &str,
        found: usize,
        bytes_max: usize,
        in_use: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        let before = self.partitions.insert(topic.to_owned(), found);
        let size = |topic: &str| topic.len() + PARTITION_ENTRY_BYTES;
        let mut bytes: usize = self.partitions.keys().map(|topic| size(topic)).sum();
        self.partitions.retain(|known, _| {
            let stays = bytes <= bytes_max || known == topic || in_use(known);
            if !stays {
                bytes -= size(known);
            }
            stays
        });
        if bytes > bytes_max && self.partitions.remove(topic).is_some() {
            bytes -= size(topic);
        }
        // The topics were recorded with a higher limit.
        while bytes > bytes_max
            && let Some((known, _)) = self.partitions.pop_last()
        {
            bytes -= size(&known);
        }
        before
    }

    /// Returns the epoch of a history that replaces this one.
    #[must_use]
    pub fn next_epoch(&self) -> u32 {
        self.epoch.saturating_add(1)
    }

    /// Returns the equivalent checkpoint for `server`, resumed as described by `resume`.
    #[must_use]
    pub fn resumed(&self, server: &ServerState, resume: &Resume) -> Self {
        Self {
            epoch: resume.epoch,
            timeline: server.timeline,
            safe_lsn: resume.safe_lsn,
            delivered: resume.delivered.clone(),
            snapshot: resume.snapshot.clone(),
            ..self.clone()
        }
    }

    /// Returns this checkpoint after an operator has decided not to deliver transactions whose
    /// commit record is before `to`.
    #[must_use]
    pub fn skipped(&self, to: Lsn) -> Self {
        let delivered = match &self.delivered {
            // The existing value is more precise.
            Some(Delivered::UpTo(last)) if last.commit_lsn >= to => self.delivered.clone(),
            Some(Delivered::Before(lsn)) if *lsn >= to => self.delivered.clone(),
            _ => Some(Delivered::Before(to)),
        };
        Self {
            safe_lsn: self.safe_lsn.max(to),
            delivered,
            ..self.clone()
        }
    }

    /// Returns how to continue from this checkpoint on `server`.
    ///
    /// # Errors
    /// It is impossible to determine which events are already in Kafka.
    pub fn resume(&self, server: &ServerState) -> Result<Resume, HistoryError> {
        if self.system_id != server.system_id {
            return Err(HistoryError::OtherCluster {
                found: server.system_id.clone(),
                expected: self.system_id.clone(),
            });
        }
        if self.slot != server.slot {
            return Err(HistoryError::OtherSlot {
                found: server.slot.clone(),
                expected: self.slot.clone(),
            });
        }
        let left = self.left_at(server)?;
        let safe_lsn = left.map_or(self.safe_lsn, |left| left.min(self.safe_lsn));
        if server.confirmed > safe_lsn {
            return Err(HistoryError::SlotAhead {
                slot: self.slot.clone(),
                confirmed: server.confirmed,
                safe: safe_lsn,
            });
        }
        let phantom = match (left, &self.delivered) {
            (Some(from), Some(Delivered::UpTo(last))) if last.commit_lsn >= from => Some(Phantom {
                from,
                to: last.position(),
            }),
            (Some(from), Some(Delivered::Before(lsn))) if *lsn > from => Some(Phantom {
                from,
                to: Position {
                    commit: *lsn,
                    index: 0,
                },
            }),
            _ => None,
        };
        let snapshot = self.copy_progress(left);
        let resume = match phantom {
            Some(Phantom { from, .. }) => Resume {
                epoch: self.next_epoch(),
                safe_lsn,
                delivered: Some(Delivered::Before(from)),
                snapshot,
                phantom,
            },
            None => Resume {
                epoch: self.epoch,
                safe_lsn,
                delivered: self.delivered.clone(),
                snapshot,
                phantom,
            },
        };
        let reach = resume.reach();
        if server.flushed < reach {
            return Err(HistoryError::LogEndsBefore {
                flushed: server.flushed,
                reach,
                slot: self.slot.clone(),
                confirmed: server.confirmed,
            });
        }
        Ok(resume)
    }

    /// Returns which copied rows are in Kafka, adjusted for the history of `server`.
    ///
    /// # Errors
    /// The server has a different history.
    pub fn copied_on(&self, server: &ServerState) -> Result<Option<CopyProgress>, HistoryError> {
        match self.snapshot {
            Some(_) => Ok(self.copy_progress(self.left_at(server)?)),
            None => Ok(None),
        }
    }

    fn copy_progress(&self, left: Option<Lsn>) -> Option<CopyProgress> {
        let copied = self.snapshot.clone()?;
        Some(match left {
            Some(at) => copied.left_at(at),
            None => copied,
        })
    }

    /// Returns where the checkpoint's timeline ended; `None` if it is the current one.
    fn left_at(&self, server: &ServerState) -> Result<Option<Lsn>, HistoryError> {
        if self.timeline == server.timeline {
            return Ok(None);
        }
        let switch = server
            .history
            .iter()
            .find(|switch| switch.timeline == self.timeline);
        match switch {
            Some(switch) => Ok(Some(switch.at)),
            None => Err(HistoryError::OtherTimeline {
                found: server.timeline,
                expected: self.timeline,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
