//! For exactly-once delivery: commits Kafka transactions, each together with a checkpoint.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::schedule::CommitSchedule;
use crate::delivery::checkpoint::{Checkpoint, Delivered, Resume, ServerState};
use crate::delivery::chunks::CopyProgress;
use crate::delivery::stats::PipelineStats;
use crate::model::lsn::Lsn;
use crate::model::window::Window;
use crate::pipeline::decode::Core;
use crate::sink::{Commit, Sink, SinkError};

/// Commits the Kafka transactions of one session.
pub(crate) struct TransactionCommitter {
    /// The last checkpoint, from which the next checkpoint is derived.
    checkpoint: Checkpoint,
    schedule: CommitSchedule,
    in_progress: Option<CommitInProgress>,
    stats: Arc<PipelineStats>,
}

/// A commit in progress.
struct CommitInProgress {
    safe: Lsn,
    since: Instant,
    in_flight: Window,
    commit: Commit,
}

/// A commit that succeeded.
pub(crate) struct Committed {
    /// The LSN that may be confirmed after the commit.
    pub(crate) safe: Lsn,
    /// Number and size of the records that were in flight when the commit started.
    pub(crate) in_flight: Window,
    /// How long the commit took.
    pub(crate) took: Duration,
}

impl TransactionCommitter {
    /// Creates a committer that continues from `checkpoint`. `server` is the server's current
    /// state, and `resume` describes where delivery continues on that server.
    pub(crate) fn resume(
        checkpoint: &Checkpoint,
        server: &ServerState,
        resume: &Resume,
        core: &mut Core,
        now: Instant,
    ) -> Self {
        let delivered = resume.delivered.clone();
        core.omit_delivered(delivered, resume.safe_lsn, server.confirmed);
        // The checkpoint's LSN must not be confirmed until the WAL has been verified to contain the
        // events that are already in Kafka.
        core.delivery
            .watermark
            .record_checkpoint(match core.is_verified() {
                true => resume.safe_lsn,
                false => server.confirmed,
            });
        if let Some(copied) = resume.snapshot.clone().filter(CopyProgress::is_complete) {
            core.omit_copied(copied);
        }
        Self {
            checkpoint: checkpoint.resumed(server, resume),
            schedule: CommitSchedule::new(now, core.delivery.watermark.sent()),
            in_progress: None,
            stats: Arc::clone(core.delivery.watermark.stats()),
        }
    }

    /// Records that the server has requested a status update, so that the next checkpoint is
    /// written soon.
    pub(crate) fn request_checkpoint(&mut self) {
        self.schedule.request_checkpoint();
    }

    /// Returns whether a commit is in progress. Records can't be produced during a commit.
    pub(crate) fn is_committing(&self) -> bool {
        self.in_progress.is_some()
    }

    /// Starts a commit if one is due. Otherwise, returns the time at which the next commit will be
    /// due, if there is anything to commit.
    pub(crate) fn commit_if_due(
        &mut self,
        core: &Core,
        sink: &mut impl Sink,
        now: Instant,
        busy: bool,
    ) -> Option<Instant> {
        if self.is_committing() {
            return None;
        }
        let has_advanced = self.has_advanced(core);
        let due = self
            .schedule
            .due(now, core.delivery.watermark.sent(), has_advanced, busy)?;
        if due > now {
            return Some(due);
        }
        self.begin(core, sink, now);
        None
    }

    /// Starts a commit that covers everything received so far.
    pub(crate) fn begin(&mut self, core: &Core, sink: &mut impl Sink, now: Instant) {
        self.schedule.begin(now, core.delivery.watermark.sent());
        let received = core.delivery.watermark.received();
        // After a reconnect, the stream may still be behind the last checkpoint, and `safe_lsn`
        // must not decrease.
        self.checkpoint.safe_lsn = received.max(self.checkpoint.safe_lsn);
        let last = core.last_delivered().map(Delivered::UpTo);
        self.checkpoint.delivered = last.or(self.checkpoint.delivered.take());
        self.checkpoint.snapshot = core.copied();
        self.update_copied();
        let commit = sink.commit(&mut self.checkpoint);
        self.in_progress = Some(CommitInProgress {
            safe: self.checkpoint.safe_lsn,
            since: now,
            in_flight: core.delivery.watermark.in_flight(),
            commit,
        });
    }

    /// Updates the checkpoint after a copy of older rows, so that copied rows are not delivered
    /// again. Transactions whose commit record precedes the first snapshot's LSN were copied, so a
    /// stream that resumes from this checkpoint skips them. After the stream has passed the last
    /// snapshot's LSN, a stream that resumes from the checkpoint also skips all transactions that
    /// precede the last snapshot's LSN.
    fn update_copied(&mut self) {
        let Some(copied) = &self.checkpoint.snapshot else {
            return;
        };
        let is_past =
            copied.is_complete() && self.checkpoint.safe_lsn >= copied.last_snapshot_lsn();
        let floor = match is_past {
            true => copied.last_snapshot_lsn(),
            false => copied.first_snapshot_lsn(),
        };
        let is_above_floor = match &self.checkpoint.delivered {
            Some(Delivered::UpTo(last)) => last.commit_lsn >= floor,
            Some(Delivered::Before(lsn)) => *lsn >= floor,
            None => false,
        };
        if !is_above_floor {
            self.checkpoint.delivered = Some(Delivered::Before(floor));
        }
        if is_past {
            self.checkpoint.snapshot = None;
        }
    }

    /// Returns whether anything remains to be committed: records, or a higher position.
    pub(crate) fn has_uncommitted(&self, core: &Core) -> bool {
        self.has_advanced(core) || self.schedule.has_records(core.delivery.watermark.sent())
    }

    /// Returns whether a new checkpoint would allow a higher LSN to be confirmed than the last
    /// checkpoint did. Always false until the WAL has been verified.
    fn has_advanced(&self, core: &Core) -> bool {
        core.is_verified() && core.delivery.watermark.received() > self.checkpoint.safe_lsn
    }

    /// Waits until the commit in progress has succeeded. Never completes if no commit is in
    /// progress.
    ///
    /// # Errors
    /// Returns an error if the commit failed or its outcome is unknown. In the latter case, the
    /// checkpoint in Kafka shows whether the records were committed.
    pub(crate) async fn wait_for_commit(&mut self) -> Result<Committed, SinkError> {
        let Some(in_progress) = &mut self.in_progress else {
            return std::future::pending().await;
        };
        let result = (&mut in_progress.commit).await;
        let committed = Committed {
            safe: in_progress.safe,
            in_flight: in_progress.in_flight,
            took: in_progress.since.elapsed(),
        };
        self.in_progress = None;
        result.map(|()| {
            self.stats.checkpointed(committed.took);
            committed
        })
    }
}
