//! How far the records in Kafka reach, and whether the WAL that is there now continues it.
//!
//! In exactly-once mode a checkpoint is written in the same Kafka transaction as the records it
//! tells of, so that one can't be there without the other. It is what a start goes on from: the
//! records in Kafka are exactly those of the row messages that it calls [`Delivered`]. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::chunks::CopyProgress;
use crate::model::lsn::{Lsn, Position};

/// The version of the text form.
const VERSION: u32 = 1;

/// What a topic takes of the room in [`Checkpoint::partitions`] beside its name: quotes, colon, number, comma.
const TOPIC_BYTES: usize = 16;

/// One checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    version: u32,
    /// Rises with every history that was adopted in another's place.
    pub epoch: u32,
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
    pub slot: String,
    /// Everything that ends at or before this is in Kafka: what may be confirmed to PostgreSQL.
    pub safe_lsn: Lsn,
    /// The row messages that were dealt with; none before the first.
    pub delivered: Option<Delivered>,
    /// Partitions of each topic, as they were when its first record was sent. Not of every topic where
    /// there are very many: see [`Checkpoint::note_partitions`].
    pub partitions: BTreeMap<String, usize>,
    /// The rows older than the stream that were copied, until the stream is past them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<CopyProgress>,
}

/// The row messages that Kafka has, as far as the log can still send them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivered {
    /// Those up to one that is known.
    UpTo(Last),
    /// Those of transactions whose commit record is before an LSN.
    Before(Lsn),
}

/// The last row message that was dealt with, and what it is recognised by when it comes again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Last {
    /// LSN of its transaction's commit record.
    pub commit_lsn: Lsn,
    /// Its index among the row messages of the transaction, whatever became of them.
    pub index: u64,
    /// Its transaction's number.
    pub xid: u32,
    /// When that was committed, in microseconds since 2000-01-01 UTC.
    pub commit_time: i64,
    /// The event's id, where it has one.
    pub event_id: Option<String>,
}

impl Last {
    /// Where it is in WAL.
    #[must_use]
    pub fn position(&self) -> Position {
        Position {
            commit: self.commit_lsn,
            index: self.index,
        }
    }
}

/// The state of a server: what a checkpoint is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerState {
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
    /// The timelines before it, and where each was left.
    pub history: Vec<Switch>,
    pub slot: String,
    /// What was confirmed to it.
    pub confirmed: Lsn,
    /// The end of the WAL that is on disk, queried after the checkpoint was read. A walsender sends
    /// nothing beyond it.
    pub flushed: Lsn,
}

/// A timeline that was left for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    pub timeline: u32,
    /// Where it was left: the log of the timelines after it has nothing of it from here on.
    pub at: Lsn,
}

/// How to go on from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The epoch from now on.
    pub epoch: u32,
    /// What may be confirmed already.
    pub safe_lsn: Lsn,
    /// What Kafka has.
    pub delivered: Option<Delivered>,
    /// What it has of older rows.
    pub snapshot: Option<CopyProgress>,
    /// Records in Kafka whose transactions the log does not have any more.
    pub phantom: Option<Phantom>,
}

impl Resume {
    /// The WAL that this resumes from ends there or later: it was read so far.
    #[must_use]
    pub fn reach(&self) -> Lsn {
        let delivered = match &self.delivered {
            // The commit record was read to its end.
            Some(Delivered::UpTo(last)) => Lsn(last.commit_lsn.0.saturating_add(1)),
            Some(Delivered::Before(lsn)) => *lsn,
            None => Lsn::ZERO,
        };
        let copied = self.snapshot.as_ref();
        let copied = copied.map_or(Lsn::ZERO, CopyProgress::last_snapshot_lsn);
        delivered.max(self.safe_lsn).max(copied)
    }
}

/// Transactions that were published and then lost by a failover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phantom {
    /// Where the log was left.
    pub from: Lsn,
    /// The last position that was published.
    pub to: Position,
}

/// Two servers with one pipeline overtake each other's checkpoints, which looks like a change of history.
const SECOND_SERVER: &str = "If a second server delivers to the same brokers for this pipeline, such as a clone of the disk, stop one of them";

/// A checkpoint that can't be gone on from.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// Another cluster.
    #[error(
        "the checkpoint is of the PostgreSQL cluster with system identifier {expected}, and this one is {found}: what of \
         its events is in Kafka is not known"
    )]
    OtherCluster {
        /// Here.
        found: String,
        /// In the checkpoint.
        expected: String,
    },
    /// Another slot.
    #[error("the checkpoint is of slot {expected:?}, and the configuration says {found:?}")]
    OtherSlot {
        /// Here.
        found: String,
        /// In the checkpoint.
        expected: String,
    },
    /// The cluster's history has not the checkpoint's timeline.
    #[error(
        "the checkpoint was made on timeline {expected}, and the cluster is on timeline {found}, which does not come \
         from it: it was restored, or a standby that was left behind was promoted"
    )]
    OtherTimeline {
        /// Here.
        found: u32,
        /// In the checkpoint.
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
        /// Where it stands.
        confirmed: Lsn,
        /// How far the checkpoint goes.
        safe: Lsn,
    },
    /// WAL ends before what was published of it.
    #[error(
        "WAL of the server ends at {flushed}, and what is in Kafka was read from it up to {reach}, on the same timeline: \
         the database was put back to an earlier state (a snapshot of its disk or machine, a base backup that was started \
         without recovery). Events that are committed now take the places of others that are in Kafka. Slot {slot:?} is at \
         {confirmed}. {SECOND_SERVER}"
    )]
    LogEndsBefore {
        /// Where it ends.
        flushed: Lsn,
        /// Where it ended at least.
        reach: Lsn,
        slot: String,
        /// Where it stands.
        confirmed: Lsn,
    },
    /// The transaction at the checkpoint's place is another one.
    #[error(
        "the transaction with commit LSN {commit} has {what} {found}, and had {expected} when it was published: this is \
         another history of the cluster. {SECOND_SERVER}"
    )]
    OtherTransaction {
        /// Its commit record.
        commit: Lsn,
        /// What differs.
        what: &'static str,
        /// In the log.
        found: String,
        /// In the checkpoint.
        expected: String,
    },
    /// The checkpoint's transaction should have come again and did not.
    #[error(
        "the transaction with commit LSN {commit}, the last that was published, is not in WAL any more, which \
         continues at {next} without it. This is another history of the cluster. {SECOND_SERVER}"
    )]
    TransactionMissing {
        /// Its commit record.
        commit: Lsn,
        /// What comes instead.
        next: Lsn,
    },
    /// An event is where nothing was that was not published.
    #[error(
        "the transaction with commit LSN {commit} has an event that is not in Kafka, and WAL was delivered up to {safe}: \
         this is another history of the cluster. {SECOND_SERVER}"
    )]
    NotPublished {
        /// Its commit record.
        commit: Lsn,
        /// How far the checkpoint goes.
        safe: Lsn,
    },
}

/// A text that is no checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// Written by another version of Walpost.
    #[error(
        "it has version {0}, and version {VERSION} was expected; run the Walpost that wrote it"
    )]
    Version(u64),
    /// Something else.
    #[error("it can't be read: {0}")]
    Unreadable(String),
}

impl Checkpoint {
    /// The first of a history: nothing was published of it, and everything that ends at or before
    /// the slot's place counts as dealt with.
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

    /// Reads the text form: a JSON object.
    ///
    /// # Errors
    /// Any other text, and that of another version.
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

    /// The text form.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("texts and numbers are JSON")
    }

    /// Notes how many partitions a topic has, and gives the number that was noted before. Names take at
    /// most `bytes_max`, for a checkpoint is one record, written with every commit: where that is not
    /// enough, topics are forgotten that are not `in_use`, and if all are, this one is. That partitions were
    /// added to one that is forgotten goes unnoticed; nothing else is lost.
    pub fn note_partitions(
        &mut self,
        topic: &str,
        found: usize,
        bytes_max: usize,
        in_use: impl Fn(&str) -> bool,
    ) -> Option<usize> {
        let before = self.partitions.insert(topic.to_owned(), found);
        let size = |topic: &str| topic.len() + TOPIC_BYTES;
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
        // Noted when there was more room.
        while bytes > bytes_max
            && let Some((known, _)) = self.partitions.pop_last()
        {
            bytes -= size(&known);
        }
        before
    }

    /// The epoch of a history that is adopted in this one's place.
    #[must_use]
    pub fn next_epoch(&self) -> u32 {
        self.epoch.saturating_add(1)
    }

    /// The checkpoint that says the same on a server that stands so, and is gone on from as `resume`
    /// says.
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

    /// The same, after a person has decided that transactions whose commit record is before `to` are
    /// not to be delivered.
    #[must_use]
    pub fn skipped(&self, to: Lsn) -> Self {
        let delivered = match &self.delivered {
            // It knows more.
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

    /// How to go on from here on a server that stands so.
    ///
    /// # Errors
    /// What Kafka has can't be told apart from what it lacks.
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
        let snapshot = self.copied(left);
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

    /// What Kafka has of older rows, on a server that stands so.
    ///
    /// # Errors
    /// Its history is another one.
    pub fn copied_on(&self, server: &ServerState) -> Result<Option<CopyProgress>, HistoryError> {
        match self.snapshot {
            Some(_) => Ok(self.copied(self.left_at(server)?)),
            None => Ok(None),
        }
    }

    fn copied(&self, left: Option<Lsn>) -> Option<CopyProgress> {
        let copied = self.snapshot.clone()?;
        Some(match left {
            Some(at) => copied.left_at(at),
            None => copied,
        })
    }

    /// Where the checkpoint's timeline was left, if it was.
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
