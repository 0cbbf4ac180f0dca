//! Checkpoints, which record the events that are already in Kafka. This module also determines
//! whether the available WAL continues from the last of these events.
//!
//! With exactly-once delivery, a checkpoint is written in the same Kafka transaction as the records
//! that it describes, so neither can exist without the other. A pipeline resumes from the last
//! checkpoint, in which [`Delivered`] describes exactly the row messages whose records are in
//! Kafka. This module performs no I/O.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::chunks::CopyProgress;
use crate::model::lsn::{Lsn, Position};

/// Version of the checkpoint's text format.
const VERSION: u32 = 1;

/// Size of an entry in [`Checkpoint::partitions`], excluding the topic's name: quotes, a colon, a
/// number and a comma.
const PARTITION_ENTRY_BYTES: usize = 16;

/// The state of a pipeline at one point in the replication stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Checkpoint {
    version: u32,
    /// Identifies the WAL history that the events come from. Incremented whenever the pipeline
    /// continues with a different history, for example after a failover that lost transactions.
    pub epoch: u32,
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
    pub slot: String,
    /// All transactions that end at or before this LSN are in Kafka, so this LSN may be confirmed
    /// to PostgreSQL.
    pub safe_lsn: Lsn,
    /// The row messages that have been processed; `None` if no row message has been processed.
    pub delivered: Option<Delivered>,
    /// Each topic's number of partitions when its first record was sent. If there are too many
    /// topics to store, some are omitted: see [`Checkpoint::record_partitions`].
    pub partitions: BTreeMap<String, usize>,
    /// Progress of the copy of existing rows. `None` if no rows were copied, or once the copy is
    /// complete and `safe_lsn` has reached the LSN of the copy's last snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<CopyProgress>,
}

/// The row messages that are already in Kafka but may be resent by the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Delivered {
    /// All row messages up to and including this message.
    UpTo(Last),
    /// All row messages of transactions whose commit record precedes this LSN.
    Before(Lsn),
}

/// The last row message that was processed, with the data needed to recognize it when the server
/// resends it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Last {
    /// LSN of the commit record of the message's transaction.
    pub commit_lsn: Lsn,
    /// Index of the message among all row messages of the transaction, including those that
    /// produced no record.
    pub index: u64,
    /// ID of the message's transaction.
    pub xid: u32,
    /// Commit time of the transaction, in microseconds since 2000-01-01 UTC.
    pub commit_time: i64,
    /// ID of the event, if it has one.
    pub event_id: Option<String>,
}

impl Last {
    /// Returns the message's position in the WAL.
    #[must_use]
    pub fn position(&self) -> Position {
        Position {
            commit: self.commit_lsn,
            index: self.index,
        }
    }
}

/// The server state to compare with a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerState {
    /// The cluster's system identifier.
    pub system_id: String,
    pub timeline: u32,
    /// The earlier timelines, each with the LSN at which it ended.
    pub history: Vec<Switch>,
    pub slot: String,
    /// The slot's confirmed LSN.
    pub confirmed: Lsn,
    /// The end of the WAL on disk, which is also the limit for what a walsender sends. Must be
    /// queried after the checkpoint is read, because the checkpoint could otherwise cover WAL that
    /// was written after the query.
    pub flushed: Lsn,
}

/// The switch from a timeline to a later timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Switch {
    pub timeline: u32,
    /// The LSN at which the timeline ended. WAL that was written on this timeline after this LSN is
    /// not part of later timelines.
    pub at: Lsn,
}

/// How to continue from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resume {
    /// The epoch of the events that will be delivered next.
    pub epoch: u32,
    /// The LSN that may be confirmed immediately.
    pub safe_lsn: Lsn,
    /// The row messages that are already in Kafka.
    pub delivered: Option<Delivered>,
    /// The copied rows that are already in Kafka.
    pub snapshot: Option<CopyProgress>,
    /// Records in Kafka whose transactions are no longer in the WAL.
    pub phantom: Option<Phantom>,
}

impl Resume {
    /// Returns the LSN up to which WAL has already been read. If the server's WAL ends before this
    /// LSN, the server was restored to an earlier state.
    #[must_use]
    pub fn reach(&self) -> Lsn {
        let delivered = match &self.delivered {
            // The commit record itself was read, so the WAL must extend past its LSN.
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
    /// The LSN at which the timeline of these transactions ended.
    pub from: Lsn,
    /// The position up to which events may have been published.
    pub to: Position,
}

/// A hint for errors that can also occur if the same pipeline runs on two servers. In that case,
/// the two processes overwrite each other's checkpoints, so the WAL appears to have diverged.
const SECOND_SERVER_HINT: &str = "If a second server, for example one started from a copy of the disk, delivers events of this \
     pipeline to the same brokers, stop one of the two servers";

/// The reason why a pipeline can't resume from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// The checkpoint belongs to a different cluster.
    #[error(
        "the checkpoint belongs to the PostgreSQL cluster with system identifier {expected}, but this cluster has {found}: \
         Walpost can't tell which of its events are in Kafka"
    )]
    OtherCluster {
        /// System identifier of this cluster.
        found: String,
        /// System identifier in the checkpoint.
        expected: String,
    },
    /// The checkpoint belongs to a different slot.
    #[error("the checkpoint belongs to slot {expected:?}, but the configured slot is {found:?}")]
    OtherSlot {
        /// The configured slot.
        found: String,
        /// The slot in the checkpoint.
        expected: String,
    },
    /// The checkpoint's timeline is not in the cluster's history.
    #[error(
        "the checkpoint was written on timeline {expected}, but the cluster is on timeline {found}, which does not descend \
         from it: the cluster was restored, or a standby that did not follow timeline {expected} was promoted"
    )]
    OtherTimeline {
        /// The cluster's current timeline.
        found: u32,
        /// The timeline in the checkpoint.
        expected: u32,
    },
    /// The slot's confirmed LSN is higher than the LSN up to which the checkpoint covers all
    /// events.
    #[error(
        "slot {slot:?} was confirmed up to {confirmed}, but the checkpoint covers only events up to {safe}: something else \
         moved the slot, or dropped and re-created it. Events committed between {safe} and {confirmed} may be missing from \
         Kafka"
    )]
    SlotAhead {
        slot: String,
        /// The slot's confirmed LSN.
        confirmed: Lsn,
        /// The LSN in the checkpoint up to which all events have been delivered.
        safe: Lsn,
    },
    /// The server's WAL ends before a position up to which Walpost has already read WAL.
    #[error(
        "the server's WAL ends at {flushed}, but Walpost has already read WAL up to {reach} on the same timeline: the \
         database was restored to an earlier state (a snapshot of its disk or machine, or a base backup that was \
         started without recovery). New events have the same positions as other events that are already in Kafka. Slot \
         {slot:?} is at {confirmed}. {SECOND_SERVER_HINT}"
    )]
    LogEndsBefore {
        /// The LSN at which the WAL ends.
        flushed: Lsn,
        /// The LSN to which the WAL must extend.
        reach: Lsn,
        slot: String,
        /// The slot's confirmed LSN.
        confirmed: Lsn,
    },
    /// The last published transaction differs from the transaction that the WAL contains at the
    /// same commit LSN.
    #[error(
        "the transaction with commit LSN {commit} has {what} {found}, but had {expected} when it was published: the WAL \
         of this server has diverged from the delivered WAL. {SECOND_SERVER_HINT}"
    )]
    OtherTransaction {
        /// LSN of the commit record of both transactions.
        commit: Lsn,
        /// The property that differs, such as the transaction's commit time.
        what: &'static str,
        /// The value of the property according to the WAL.
        found: String,
        /// The value of the property according to the checkpoint.
        expected: String,
    },
    /// The server should have resent the checkpoint's last transaction, but did not.
    #[error(
        "the last published transaction, with commit LSN {commit}, is missing from the WAL, which continues at {next}: the \
         WAL of this server has diverged from the delivered WAL. {SECOND_SERVER_HINT}"
    )]
    TransactionMissing {
        /// LSN of the missing commit record.
        commit: Lsn,
        /// Commit LSN of the transaction that was sent instead.
        next: Lsn,
    },
    /// The WAL contains an event that was never published, at a position up to which all events
    /// should have been published.
    #[error(
        "the transaction with commit LSN {commit} has an event that is not in Kafka, although all WAL up to {safe} was \
         delivered: the WAL of this server has diverged from the delivered WAL. {SECOND_SERVER_HINT}"
    )]
    NotPublished {
        /// LSN of the commit record of the event's transaction.
        commit: Lsn,
        /// The LSN in the checkpoint up to which all events have been delivered.
        safe: Lsn,
    },
}

/// The reason why text is not a valid checkpoint.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckpointError {
    /// The checkpoint was written by a different version of Walpost.
    #[error(
        "checkpoint version {0} is not supported (expected version {VERSION}); run the version of Walpost that wrote the checkpoint"
    )]
    Version(u64),
    /// The text is malformed.
    #[error("invalid contents: {0}")]
    Unreadable(String),
}

impl Checkpoint {
    /// Creates the first checkpoint of an epoch. No events have been published yet, and all
    /// transactions that end at or before the slot's confirmed LSN are considered processed.
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

    /// Parses a checkpoint from its text format, which is a JSON object.
    ///
    /// # Errors
    /// Returns an error if the text is malformed or its version is not supported.
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

    /// Encodes the checkpoint in its text format.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers can be serialized as JSON")
    }

    /// Records a topic's number of partitions, and returns the previously recorded number.
    ///
    /// The total size of the recorded topics is limited to `bytes_max`, because a checkpoint is a
    /// single record that is written with every commit. If the limit is exceeded, topics that are
    /// not `in_use` are removed. If all topics are in use, the new topic is not recorded, so
    /// Walpost won't detect a change in its number of partitions.
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
            let is_kept = bytes <= bytes_max || known == topic || in_use(known);
            if !is_kept {
                bytes -= size(known);
            }
            is_kept
        });
        if bytes > bytes_max && self.partitions.remove(topic).is_some() {
            bytes -= size(topic);
        }
        // If the limit was lowered, removing unused topics may not be enough. Remove topics that
        // are in use, too.
        while bytes > bytes_max
            && let Some((known, _)) = self.partitions.pop_last()
        {
            bytes -= size(&known);
        }
        before
    }

    /// Returns the next epoch, which is used if the pipeline continues with a different WAL
    /// history.
    #[must_use]
    pub fn next_epoch(&self) -> u32 {
        self.epoch.saturating_add(1)
    }

    /// Returns a copy of this checkpoint that is updated with `resume`, which [`Self::resume`]
    /// returned for `server`.
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

    /// Returns the checkpoint to store when an operator skips all transactions whose commit record
    /// precedes `to`.
    #[must_use]
    pub fn skipped(&self, to: Lsn) -> Self {
        let delivered = match &self.delivered {
            // Keep `delivered`, because it already covers the skipped transactions, and possibly
            // later ones.
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

    /// Determines how to resume from this checkpoint on `server`.
    ///
    /// # Errors
    /// Returns an error if Walpost can't determine which events are already in Kafka.
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
        let timeline_end = self.timeline_end(server)?;
        let safe_lsn = timeline_end.map_or(self.safe_lsn, |end| end.min(self.safe_lsn));
        if server.confirmed > safe_lsn {
            return Err(HistoryError::SlotAhead {
                slot: self.slot.clone(),
                confirmed: server.confirmed,
                safe: safe_lsn,
            });
        }
        let phantom = match (timeline_end, &self.delivered) {
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
        let snapshot = self.copy_progress(timeline_end);
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

    /// Returns which copied rows are in Kafka. If `server` is on a later timeline than the
    /// checkpoint, the LSNs of the snapshots are lowered to the LSN at which the checkpoint's
    /// timeline ended.
    ///
    /// # Errors
    /// Returns an error if the server's WAL has diverged from the WAL whose events were delivered.
    pub fn copy_progress_on(
        &self,
        server: &ServerState,
    ) -> Result<Option<CopyProgress>, HistoryError> {
        match self.snapshot {
            Some(_) => Ok(self.copy_progress(self.timeline_end(server)?)),
            None => Ok(None),
        }
    }

    fn copy_progress(&self, timeline_end: Option<Lsn>) -> Option<CopyProgress> {
        let copied = self.snapshot.clone()?;
        Some(match timeline_end {
            Some(at) => copied.truncated_at(at),
            None => copied,
        })
    }

    /// Returns the LSN at which the checkpoint's timeline ended; `None` if that timeline is still
    /// current.
    fn timeline_end(&self, server: &ServerState) -> Result<Option<Lsn>, HistoryError> {
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
