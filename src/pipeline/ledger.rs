//! Exactly-once: what the open Kafka transaction has, and the checkpoint it ends with.

use tokio::time::Instant;

use super::checkpoint::{Checkpoint, Delivered, Resume, Standing};
use super::commits::Commits;
use super::core::Core;
use super::sink::{Commit, Sink, SinkError};
use crate::postgres::lsn::Lsn;

/// The books of one connection.
pub(super) struct Ledger {
    /// The last checkpoint, and what the next one has in common with it.
    checkpoint: Checkpoint,
    commits: Commits,
    /// The commit that is under way, and what may be confirmed after it.
    under_way: Option<(Lsn, Commit)>,
}

impl Ledger {
    /// Goes on from `checkpoint` on a server that stands so.
    pub(super) fn open(
        mut checkpoint: Checkpoint,
        standing: &Standing,
        resume: &Resume,
        core: &mut Core,
        now: Instant,
    ) -> Self {
        core.watermark.checkpointed(resume.safe_lsn);
        core.leave_out(resume.delivered.clone(), standing.confirmed);
        checkpoint.epoch = resume.epoch;
        checkpoint.timeline = standing.timeline;
        checkpoint.safe_lsn = resume.safe_lsn;
        checkpoint.delivered.clone_from(&resume.delivered);
        Self {
            checkpoint,
            commits: Commits::new(now, core.watermark.sent()),
            under_way: None,
        }
    }

    /// The server wants to hear how far we are.
    pub(super) fn ask(&mut self) {
        self.commits.ask();
    }

    /// A commit is under way: nothing can be produced.
    pub(super) fn is_committing(&self) -> bool {
        self.under_way.is_some()
    }

    /// Begins a commit if it is time for one; otherwise says when it will be.
    pub(super) fn tend(
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
        let due = self.commits.due(now, core.watermark.sent(), moved, busy)?;
        if due > now {
            return Some(due);
        }
        self.begin(core, sink, now);
        None
    }

    /// Begins a commit of everything up to here.
    pub(super) fn begin(&mut self, core: &Core, sink: &mut impl Sink, now: Instant) {
        self.commits.begin(now, core.watermark.sent());
        let received = core.watermark.received();
        // What is sent again at first ends before that.
        self.checkpoint.safe_lsn = received.max(self.checkpoint.safe_lsn);
        if let Some(last) = core.last() {
            self.checkpoint.delivered = Some(Delivered::UpTo(last));
        }
        let commit = sink.commit(&mut self.checkpoint);
        self.under_way = Some((self.checkpoint.safe_lsn, commit));
    }

    /// There is something that was not committed.
    pub(super) fn is_behind(&self, core: &Core) -> bool {
        self.has_moved(core) || self.commits.has_records(core.watermark.sent())
    }

    /// More may be confirmed after the next checkpoint than after the last one.
    fn has_moved(&self, core: &Core) -> bool {
        core.watermark.received() > self.checkpoint.safe_lsn
    }

    /// Resolves when the commit that is under way has succeeded; never without one.
    ///
    /// # Errors
    /// It has failed, or nobody knows: what is in Kafka then says the checkpoint there.
    pub(super) async fn committed(&mut self) -> Result<Lsn, SinkError> {
        let Some((safe, commit)) = &mut self.under_way else {
            return std::future::pending().await;
        };
        let (safe, result) = (*safe, commit.await);
        self.under_way = None;
        result.map(|()| safe)
    }
}
