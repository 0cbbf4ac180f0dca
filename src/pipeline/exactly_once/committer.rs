//! Exactly-once: what the open Kafka transaction has, and the checkpoint it ends with.

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

/// The books of one connection.
pub(crate) struct TransactionCommitter {
    /// The last checkpoint, and what the next one has in common with it.
    checkpoint: Checkpoint,
    schedule: CommitSchedule,
    under_way: Option<UnderWay>,
    stats: Arc<PipelineStats>,
}

/// The commit that is under way.
struct UnderWay {
    safe: Lsn,
    since: Instant,
    in_flight: Window,
    commit: Commit,
}

/// A commit that has succeeded.
pub(crate) struct Committed {
    /// What may be confirmed after it.
    pub(crate) safe: Lsn,
    /// What was in flight when it began.
    pub(crate) in_flight: Window,
    /// How long it took from then on.
    pub(crate) took: Duration,
}

impl TransactionCommitter {
    /// Goes on from `checkpoint` on a server that stands so.
    pub(crate) fn open(
        checkpoint: &Checkpoint,
        server: &ServerState,
        resume: &Resume,
        core: &mut Core,
        now: Instant,
    ) -> Self {
        let delivered = resume.delivered.clone();
        core.leave_out(delivered, resume.safe_lsn, server.confirmed);
        // What the checkpoint covers counts when WAL has proved to be the one that was published.
        core.delivery
            .watermark
            .checkpointed(match core.is_proved() {
                true => resume.safe_lsn,
                false => server.confirmed,
            });
        if let Some(copied) = resume.snapshot.clone().filter(CopyProgress::is_complete) {
            core.leave_out_copied(copied);
        }
        Self {
            checkpoint: checkpoint.resumed(server, resume),
            schedule: CommitSchedule::new(now, core.delivery.watermark.sent()),
            under_way: None,
            stats: Arc::clone(core.delivery.watermark.stats()),
        }
    }

    /// The server wants to hear how far we are.
    pub(crate) fn ask(&mut self) {
        self.schedule.ask();
    }

    /// A commit is under way: nothing can be produced.
    pub(crate) fn is_committing(&self) -> bool {
        self.under_way.is_some()
    }

    /// Begins a commit if it is time for one; otherwise says when it will be.
    pub(crate) fn tend(
        &mut self,
        core: &Core,
        sink: &mut impl Sink,
        now: Instant,
        busy: bool,
    ) -> Option<Instant> {
        if self.is_committing() {
            return None;
        }
        let moved = self.has_moved(core);
        let due = self
            .schedule
            .due(now, core.delivery.watermark.sent(), moved, busy)?;
        if due > now {
            return Some(due);
        }
        self.begin(core, sink, now);
        None
    }

    /// Begins a commit of everything up to here.
    pub(crate) fn begin(&mut self, core: &Core, sink: &mut impl Sink, now: Instant) {
        self.schedule.begin(now, core.delivery.watermark.sent());
        let received = core.delivery.watermark.received();
        // What is sent again at first ends before that.
        self.checkpoint.safe_lsn = received.max(self.checkpoint.safe_lsn);
        let last = core.last().map(Delivered::UpTo);
        self.checkpoint.delivered = last.or(self.checkpoint.delivered.take());
        self.checkpoint.snapshot = core.copied();
        self.note_copied();
        let commit = sink.commit(&mut self.checkpoint);
        self.under_way = Some(UnderWay {
            safe: self.checkpoint.safe_lsn,
            since: now,
            in_flight: core.delivery.watermark.in_flight(),
            commit,
        });
    }

    /// Transactions whose commit record is before the stream's beginning were copied, and are left
    /// out; when the stream is past the copy's last snapshot, so are all before that.
    fn note_copied(&mut self) {
        let Some(copied) = &self.checkpoint.snapshot else {
            return;
        };
        let is_past =
            copied.is_complete() && self.checkpoint.safe_lsn >= copied.last_snapshot_lsn();
        let floor = match is_past {
            true => copied.last_snapshot_lsn(),
            false => copied.first_snapshot_lsn(),
        };
        let is_beyond = match &self.checkpoint.delivered {
            Some(Delivered::UpTo(last)) => last.commit_lsn >= floor,
            Some(Delivered::Before(lsn)) => *lsn >= floor,
            None => false,
        };
        if !is_beyond {
            self.checkpoint.delivered = Some(Delivered::Before(floor));
        }
        if is_past {
            self.checkpoint.snapshot = None;
        }
    }

    /// There is something that was not committed.
    pub(crate) fn is_behind(&self, core: &Core) -> bool {
        self.has_moved(core) || self.schedule.has_records(core.delivery.watermark.sent())
    }

    /// More may be confirmed after the next checkpoint than after the last one. Nothing is said of a log
    /// that has not proved itself.
    fn has_moved(&self, core: &Core) -> bool {
        core.is_proved() && core.delivery.watermark.received() > self.checkpoint.safe_lsn
    }

    /// Resolves when the commit that is under way has succeeded; never without one.
    ///
    /// # Errors
    /// It has failed, or nobody knows: what is in Kafka then says the checkpoint there.
    pub(crate) async fn committed(&mut self) -> Result<Committed, SinkError> {
        let Some(under_way) = &mut self.under_way else {
            return std::future::pending().await;
        };
        let result = (&mut under_way.commit).await;
        let committed = Committed {
            safe: under_way.safe,
            in_flight: under_way.in_flight,
            took: under_way.since.elapsed(),
        };
        self.under_way = None;
        result.map(|()| {
            self.stats.checkpointed(committed.took);
            committed
        })
    }
}
