//! The fourth phase of startup: the slot is acquired. The remaining step is to start the copy or
//! the stream.

use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{error, info};

use super::{OlderRows, Startup};
use crate::delivery::checkpoint::{Checkpoint, Phantom, ServerState};
use crate::model::lifecycle::State;
use crate::model::lsn::Lsn;
use crate::model::set_aside::SetAside;
use crate::pipeline::confirmation_gate::{ConfirmationGate, SlotStateWriter};
use crate::pipeline::database::{CatalogQueries, Database};
use crate::pipeline::error::PipelineError;
use crate::pipeline::exactly_once::committer::TransactionCommitter;
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::recovery;
use crate::pipeline::session::Session;
use crate::pipeline::session::link::Link;
use crate::pipeline::session::monitor::monitor_slot;
use crate::pipeline::session::set_aside::{self, TableWatch};
use crate::pipeline::settings::Delivery;
use crate::pipeline::snapshot;
use crate::pipeline::snapshot::pace::Pace;
use crate::postgres::catalog::CatalogError;
use crate::postgres::catalog::slot_state::{SlotIdentity, SlotState};

/// SQLSTATE insufficient_privilege.
const INSUFFICIENT_PRIVILEGE: &str = "42501";

/// The result of the fourth startup phase: the slot is acquired, so other processes can't move it.
pub(super) struct SlotTaken<C> {
    pub(super) catalog: C,
    pub(super) link: Link,
    pub(super) recorded: Recorded,
    pub(super) checkpoint: Option<Checkpoint>,
    pub(super) server: ServerState,
    pub(super) older: OlderRows,
}

impl<C: CatalogQueries> SlotTaken<C> {
    /// Starts the copy, if there are older rows to copy, and returns the streaming session.
    pub(super) async fn stream<'s, D: Database<Catalog = C>>(
        mut self,
        mut start: Startup<'_, 's, D>,
    ) -> Result<Session<'s>, PipelineError> {
        let settings = start.settings;
        let resume = self.server.confirmed;
        let now = Instant::now();
        // The stream contains every row whose commit LSN is at or above `known_from`, and none of
        // these rows are skipped as duplicates.
        let (committer, known_from) = match self.checkpoint.take() {
            None => (None, resume),
            Some(checkpoint) => {
                let (committer, reach) = start.resume_from(checkpoint, &self.server, now)?;
                (Some(committer), reach.max(resume))
            }
        };
        let set_aside = self.load_set_aside(&mut start, known_from).await?;
        let snapshot = match self.older {
            OlderRows::Copy(snapshot) => Some(snapshot),
            OlderRows::Settled(settlement) => {
                snapshot::settle(settings, &self.catalog, resume, settlement).await?;
                None
            }
            OlderRows::Nothing => None,
        };
        start.session_state.snapshot_done |= snapshot.is_none();
        let copying = match snapshot {
            Some(snapshot) => Some(
                snapshot
                    .copy(settings, &self.catalog, resume, start.core)
                    .await?,
            ),
            None => {
                let (slot, host) = (&settings.target.slot, &self.link.connection.host);
                info!(pipeline = settings.name, slot, from = %resume, host, "streaming");
                None
            }
        };
        let recorded = self.recorded;
        let (confirmation_gate, writer) = recorded
            .confirmation_gate(&self.catalog, &mut start, resume, now)
            .await?;
        let mut slot_monitor = JoinSet::new();
        start
            .core
            .delivery
            .watermark
            .stats()
            .entered(State::Streaming);
        start.session_state.watched.begin_session();
        slot_monitor.spawn(monitor_slot(
            start.database.clone(),
            start.session_state.watched.clone(),
            start.session_state.publication.clone(),
            self.catalog,
            self.link.walsender.pid,
            writer,
        ));
        let mut pace = Pace::new(now);
        if self.link.connection.shrink_receive_buffer() {
            pace.record_small_buffer();
        }
        Ok(Session {
            settings,
            connection: self.link.connection,
            resume,
            slot_monitor,
            committer,
            confirmation_gate,
            reported: None,
            reported_at: now,
            status_due: now,
            tables_due: now,
            stopping_since: None,
            pace,
            copying,
            has_announced_restart: false,
            tables: TableWatch::new(set_aside, start.session_state.watched.set_aside()),
        })
    }

    /// Makes the decoder skip the rows of set-aside tables, and returns the journal entries about
    /// these tables.
    async fn load_set_aside<D: Database<Catalog = C>>(
        &self,
        start: &mut Startup<'_, '_, D>,
        known_from: Lsn,
    ) -> Result<Vec<SetAside>, PipelineError> {
        let settings = start.settings;
        let outbox = &settings.target.outbox;
        if outbox.is_messages() {
            return Ok(Vec::new());
        }
        let entries = match self.catalog.set_aside(&settings.target).await {
            Err(CatalogError::NoJournal { .. }) if !settings.sets_tables_aside() => Vec::new(),
            // If the role lacks the privilege to read the journal, it can't have set a table aside.
            Err(CatalogError::Server(error))
                if !outbox.is_several() && error.code == INSUFFICIENT_PRIVILEGE =>
            {
                Vec::new()
            }
            entries => entries?,
        };
        if !std::mem::replace(&mut start.session_state.has_listed_tables, true) {
            set_aside::log_set_aside_tables(settings, &entries);
        }
        if !outbox.is_several() {
            set_aside::check_single(settings, &entries)?;
            return Ok(Vec::new());
        }
        let cluster = self.server.system_id.clone();
        start
            .core
            .load_set_aside(entries.clone(), cluster, known_from);
        Ok(entries)
    }
}

impl<D: Database> Startup<'_, '_, D> {
    /// Resumes exactly-once delivery from `checkpoint`. Also returns the LSN up to which events are
    /// already covered by the checkpoint.
    ///
    /// # Errors
    /// Returns an error if the WAL of this server does not continue from the checkpoint.
    fn resume_from(
        &mut self,
        checkpoint: Checkpoint,
        server: &ServerState,
        now: Instant,
    ) -> Result<(TransactionCommitter, Lsn), ExactlyOnceError> {
        let resume = match checkpoint.resume(server) {
            Ok(resume) => resume,
            Err(error) => return Err(self.session_state.checkpoint_mismatch(checkpoint, error)),
        };
        if let Some(Phantom { from, to }) = resume.phantom {
            error!(
                pipeline = self.settings.name, %from, %to, epoch = resume.epoch,
                "PostgreSQL failed over to a standby that did not have the last transactions: their events are \
                 in Kafka but not in the database"
            );
        }
        let committer = TransactionCommitter::resume(&checkpoint, server, &resume, self.core, now);
        Ok((committer, resume.reach()))
    }
}

/// The slot's state in `walpost.slot_state` when the slot was acquired.
pub(super) struct Recorded {
    pub(super) slot_identity: SlotIdentity,
    /// The recorded state. `Some(None)` if no state has been recorded yet, and `None` if positions
    /// can't be recorded at all.
    pub(super) state: Option<Option<SlotState>>,
}

impl Recorded {
    /// Creates the gate that decides which durable positions may be confirmed, and the writer that
    /// records each position beforehand.
    async fn confirmation_gate<D: Database>(
        self,
        catalog: &D::Catalog,
        start: &mut Startup<'_, '_, D>,
        resume: Lsn,
        now: Instant,
    ) -> Result<(ConfirmationGate, Option<SlotStateWriter>), CatalogError> {
        let Some(before) = self.state else {
            return Ok((ConfirmationGate::always_open(), None));
        };
        // With exactly-once delivery, mark the slot as read only when the first position must be
        // recorded. If the slot were marked now and this run failed before its first checkpoint,
        // the next run would not count as the pipeline's first run. Waiting is safe, because events
        // are delivered only together with a checkpoint, and a position is recorded before it is
        // confirmed.
        let exactly_once = start.settings.delivery != Delivery::AtLeastOnce;
        let is_unread =
            exactly_once && before.is_some_and(|state: SlotState| state.is_untouched(resume));
        let written = match is_unread {
            true => Ok(()),
            false => catalog.write_slot_state(&self.slot_identity, resume).await,
        };
        match written {
            Ok(()) => {
                let confirmed = start.core.delivery.watermark.confirmed();
                let (gate, writer) =
                    ConfirmationGate::with_writer(self.slot_identity, confirmed, now);
                Ok((gate, Some(writer)))
            }
            // If this write fails, the existing row still contains an older position, so the
            // session can't continue.
            Err(error) if before.is_some() => Err(error),
            Err(error) if recovery::catalog_remedy(&error) == recovery::Remedy::Halt => {
                start
                    .session_state
                    .warn_unrecorded(&self.slot_identity, &error.to_string());
                Ok((ConfirmationGate::always_open(), None))
            }
            Err(error) => Err(error),
        }
    }
}
