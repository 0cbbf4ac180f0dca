//! Advances a slot past events that an operator has decided to skip.
//!
//! The journal is written first, then the checkpoint, and then the slot is advanced. If the process
//! terminates between these steps, the journal may record a skip that was not completed, and the
//! checkpoint may be ahead of the slot, in which case the next `run` resumes from the checkpoint.
//! In each case, running the same command again advances the slot.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde_json::json;
use tracing::{info, warn};

use crate::delivery::checkpoint::{Checkpoint, ServerState};
use crate::kafka::producer::KafkaSink;
use crate::model::lsn::{Lsn, Position};
use crate::outbox::columns::MappingError;
use crate::pipeline::database::open_as_owner;
use crate::pipeline::decode::preview::{Preview, PreviewReport, Until};
use crate::pipeline::exactly_once::error::ExactlyOnceError;
use crate::pipeline::settings::{Delivery, PipelineSettings, SnapshotMode};
use crate::postgres::catalog::journal::{Action, Entry, Written};
use crate::postgres::catalog::slot_state::FoundState;
use crate::postgres::catalog::{Catalog, CatalogError, Problem};
use crate::postgres::replication::{Connection, ConnectionError, UnsendableCause};
use crate::postgres::target::Outbox;
use crate::postgres::wire::frame::Frame;
use crate::sink::{Sink, SinkError};

/// The size limit for rows. No row can be larger, because PostgreSQL does not send larger messages.
const ROW_BYTES_MAX: usize = 1 << 30;

/// How often to check whether the server has released the slot.
const RELEASE_POLL: Duration = Duration::from_millis(50);

/// The requested position of the slot.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SkipTarget {
    Lsn(Lsn),
    Position(Position),
}

impl FromStr for SkipTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.contains(':') {
            true => text
                .parse()
                .map(Self::Position)
                .map_err(|error| format!("{error}")),
            false => text.parse().map(Self::Lsn).map_err(|error| {
                format!("{error}. A position such as 00000000/016B3748:0000000002 is also accepted")
            }),
        }
    }
}

impl SkipTarget {
    fn lsn(self) -> Lsn {
        match self {
            Self::Lsn(lsn) => lsn,
            Self::Position(position) => position.commit,
        }
    }
}

impl fmt::Display for SkipTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lsn(lsn) => lsn.fmt(f),
            Self::Position(position) => position.fmt(f),
        }
    }
}

/// An error that prevents a skip.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SkipError {
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    #[error(transparent)]
    Connection(#[from] ConnectionError),
    #[error(transparent)]
    Problem(#[from] Problem),
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    ExactlyOnce(#[from] ExactlyOnceError),
    #[error(transparent)]
    Sink(#[from] SinkError),
    #[error(
        "slot {slot:?} is active for PID {pid}. Stop the walpost run process that uses the slot, then run the same \
         command again"
    )]
    Active { slot: String, pid: i32 },
    #[error(
        "slot {slot:?} is at {confirmed}, and {to} is not after that position: there is nothing to skip"
    )]
    Behind {
        slot: String,
        confirmed: Lsn,
        to: SkipTarget,
    },
    #[error("{to} is after the end of the WAL, which is at {end}")]
    Beyond { end: Lsn, to: SkipTarget },
    #[error(
        "slot {slot:?} would not send a row with position {to}. Copy the position from the log line that contains \
         \"halted\", or from the header walpost-position"
    )]
    NoSuchRow { slot: String, to: Position },
    #[error(
        "PostgreSQL can't send the row at {at}, so Walpost can't list the events after it: {error}. First skip the \
         transaction that contains the row: {command}"
    )]
    UnsendableRow {
        at: Position,
        error: ConnectionError,
        command: String,
    },
    #[error(
        "slot {slot:?} was at {confirmed}, but something else has moved it in the meantime. Check its current position, \
         and run the command again if you still want to skip"
    )]
    Moved { slot: String, confirmed: Lsn },
    #[error(
        "not all rows that are older than slot {slot:?} have been delivered, and no event can be skipped until these rows have \
         been delivered. Start walpost run to deliver the rows first, or omit them: snapshot = \"never\". A row that can't be \
         delivered must be corrected or deleted"
    )]
    Copying { slot: String },
}

/// The changes that a skip will make.
pub(crate) struct SkipPlan {
    pub(crate) confirmed: Lsn,
    pub(crate) to: Lsn,
    pub(crate) found: PreviewReport,
    /// The existing checkpoint and the new checkpoint; set only with exactly-once delivery.
    pub(crate) checkpoint: Option<(Checkpoint, Checkpoint)>,
    /// Whether another program has already advanced the slot to the requested position.
    pub(crate) is_moved: bool,
    /// Whether the server is a standby, on which the journal can't be written.
    in_recovery: bool,
}

/// A planned skip. [`Skip::run`] performs it.
pub(crate) struct Skip<'s> {
    settings: &'s PipelineSettings,
    catalog: Catalog,
    journal: Vec<Written>,
    pub(crate) plan: SkipPlan,
}

impl<'s> Skip<'s> {
    /// Determines the changes that a skip requires, without making them.
    ///
    /// # Errors
    /// Returns an error if the skip is not possible, or if a server query failed.
    pub(crate) async fn to(
        settings: &'s PipelineSettings,
        to: SkipTarget,
    ) -> Result<Self, SkipError> {
        let catalog = open_as_owner(settings).await?;
        // The slot is moved only if the journal can be read, so the journal is queried first.
        let journal = catalog.journal(&settings.name, &settings.target).await?;
        let plan = plan(settings, &catalog, to).await?;
        // Also check the snapshots of tables that the pipeline no longer reads.
        let snapshots = catalog.table_snapshots(&settings.target).await?;
        let begun = snapshots
            .iter()
            .any(|found| found.record.is_open(plan.confirmed));
        let begun = begun || catalog.has_due_copy(&settings.target, &snapshots).await?;
        let found = plan.checkpoint.as_ref().map(|(found, _)| found);
        let copied = found.and_then(|found| found.snapshot.as_ref());
        if begun && settings.snapshot == SnapshotMode::Initial
            || copied.is_some_and(|copied| !copied.is_complete())
        {
            return Err(SkipError::Copying {
                slot: settings.target.slot.clone(),
            });
        }
        Ok(Self {
            settings,
            catalog,
            journal,
            plan,
        })
    }

    /// Performs the skip.
    ///
    /// # Errors
    /// Returns an error if another process has moved the slot or the checkpoint, or if a server
    /// rejects the change.
    pub(crate) async fn run(self) -> Result<(), SkipError> {
        let Self {
            settings,
            catalog,
            journal,
            plan,
        } = self;
        let (pipeline, slot) = (&settings.name, &settings.target.slot);
        let SkipPlan {
            confirmed,
            to,
            is_moved,
            in_recovery,
            ..
        } = plan;
        let is_same = |entry: &&Written| {
            entry.action == Action::Skip && entry.from == Some(confirmed) && entry.to == Some(to)
        };
        let id = match journal.last().filter(is_same) {
            // An earlier attempt recorded this skip but did not complete it.
            Some(last) => Some(last.id),
            None if in_recovery => {
                warn!(
                    pipeline,
                    slot,
                    "the server is a standby in recovery, so the skip is not recorded in walpost.journal"
                );
                None
            }
            None => {
                let cluster = catalog.cluster().await?;
                let entry = Entry {
                    pipeline,
                    target: &settings.target,
                    action: Action::Skip,
                    from: Some(confirmed),
                    to: Some(to),
                    detail: detail(&plan.found, &cluster),
                };
                Some(catalog.write_journal(&entry).await?)
            }
        };
        if let Some((found, checkpoint)) = plan.checkpoint {
            move_checkpoint(settings, &found, checkpoint).await?;
        }
        if !is_moved && !catalog.advance(slot, confirmed, to).await? {
            let slot = slot.clone();
            return Err(SkipError::Moved { slot, confirmed });
        }
        info!(pipeline, slot, from = %confirmed, to = %to, journal = id, "skipped");
        Ok(())
    }
}

/// Determines the changes that a skip requires, without making them.
async fn plan(
    settings: &PipelineSettings,
    catalog: &Catalog,
    to: SkipTarget,
) -> Result<SkipPlan, SkipError> {
    let target = &settings.target;
    let observed = catalog.observe(target).await?;
    let mut problems = observed.problems(target).into_iter();
    if let Some(problem) = problems
        .next()
        .or_else(|| observed.publisher_problem(target))
    {
        return Err(problem.into());
    }
    let in_recovery = observed.in_recovery;
    let tables = match (observed.table, observed.publication) {
        (Some(table), _) => vec![table],
        (None, Some(publication)) => {
            let found = catalog.tables(&publication.tables, &target.publication);
            found.await?.into_iter().map(|(_, table)| table).collect()
        }
        (None, None) => Vec::new(),
    };
    let facts = tables.into_iter().map(|table| (table.oid, table.facts));
    let facts: HashMap<_, _> = facts.collect();
    let slot = observed.slot.ok_or_else(|| Problem::NoSlot {
        slot: target.slot.clone(),
        init: target.init_slot(),
    })?;
    let confirmed = slot.confirmed;
    let slot_name = || target.slot.clone();
    if let Some(pid) = slot.active_pid {
        return Err(SkipError::Active {
            slot: slot_name(),
            pid,
        });
    }
    let is_behind = match to {
        SkipTarget::Lsn(lsn) => lsn <= confirmed,
        // A transaction whose commit record is at the slot's position has not been sent yet.
        SkipTarget::Position(position) => position.commit < confirmed,
    };
    if let SkipTarget::Lsn(lsn) = to
        && lsn == confirmed
        && let Some(written) = unconfirmed_move(settings, catalog, lsn).await?
    {
        return Ok(SkipPlan {
            confirmed: written,
            to: lsn,
            found: PreviewReport::default(),
            checkpoint: None,
            is_moved: true,
            in_recovery,
        });
    }
    if is_behind {
        return Err(SkipError::Behind {
            slot: slot_name(),
            confirmed,
            to,
        });
    }
    let end = catalog.log_end().await?;
    if to.lsn() > end {
        return Err(SkipError::Beyond { end, to });
    }
    let found = checkpoint(settings, confirmed).await?;
    let delivered = found
        .as_ref()
        .and_then(|(_, resumed)| resumed.delivered.clone());

    let until = match to {
        SkipTarget::Lsn(lsn) => Until::Before(lsn),
        SkipTarget::Position(position) => Until::Commit(position.commit),
    };
    let new_preview = || {
        let (outbox, columns) = (target.outbox.clone(), settings.outbox.clone());
        let mut preview = Preview::new(outbox, columns, until, delivered.clone())?;
        preview.read_older_rows_of(&target.publication);
        preview.describe_columns(HashMap::clone(&facts));
        Ok::<_, SkipError>(preview)
    };
    // The commit record of the transaction to skip may start at the requested position. The end of
    // such a record is greater than the position, so read past the position.
    let end_lsn = end.min(Lsn(to.lsn().0 + 1));
    let preview = preview_events(settings, catalog, to, end_lsn, new_preview).await?;
    let to = match (to, preview.end) {
        (SkipTarget::Lsn(lsn), _) => lsn,
        (SkipTarget::Position(position), Some((end, rows))) if position.index < rows => end,
        (SkipTarget::Position(to), _) => {
            let slot = slot_name();
            return Err(SkipError::NoSuchRow { slot, to });
        }
    };
    Ok(SkipPlan {
        confirmed,
        to,
        found: preview,
        checkpoint: found.map(|(found, resumed)| (found, resumed.skipped(to))),
        is_moved: false,
        in_recovery,
    })
}

/// Reads the events that would be skipped, up to `end_lsn`. If the server can't send a row of the
/// transaction at the position `to`, the transaction's remaining events are omitted.
async fn preview_events(
    settings: &PipelineSettings,
    catalog: &Catalog,
    to: SkipTarget,
    end_lsn: Lsn,
    new_preview: impl Fn() -> Result<Preview, SkipError>,
) -> Result<PreviewReport, SkipError> {
    let mut encoding = TextEncoding::Converted;
    loop {
        let mut preview = new_preview()?;
        let read = read_slot(settings, catalog, end_lsn, encoding, |data| {
            preview.message(data)
        });
        let error = match read.await {
            Ok(()) => return Ok(preview.found),
            Err(SkipError::Connection(error)) => error,
            Err(error) => return Err(error),
        };
        let is_encoding = error.unsendable_cause() == Some(UnsendableCause::Encoding);
        if is_encoding && encoding == TextEncoding::Converted {
            encoding = TextEncoding::Unconverted;
            continue;
        }
        let Some(at) = preview.record_unsendable(&error) else {
            return Err(error.into());
        };
        if at.commit < to.lsn() {
            let position = at.to_string();
            let skip = ["skip", "--to", &position];
            let command = settings.target.commands.print(skip);
            return Err(SkipError::UnsendableRow { at, error, command });
        }
        return Ok(preview.found);
    }
}

/// The encoding in which the server sends text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TextEncoding {
    /// UTF-8
    Converted,
    /// The database's encoding.
    Unconverted,
}

/// Calls `on_message` with each message that the slot would send, until `on_message` returns false
/// or all messages before `end_lsn` have been sent.
async fn read_slot(
    settings: &PipelineSettings,
    catalog: &Catalog,
    end_lsn: Lsn,
    encoding: TextEncoding,
    mut on_message: impl FnMut(&[u8]) -> bool,
) -> Result<(), SkipError> {
    let (target, limit) = (&settings.target, settings.link_timeout);
    // Don't use the pipeline's limit, because the row to skip may exceed it.
    let mut connection = Connection::open(&settings.postgres, limit, ROW_BYTES_MAX).await?;
    if encoding == TextEncoding::Unconverted {
        connection.disable_conversion().await?;
    }
    let (walsender, messages) = (
        connection.server_process().await?.pid,
        matches!(target.outbox, Outbox::Messages { .. }),
    );
    connection
        .start(&target.slot, Lsn::ZERO, &target.publication, messages)
        .await?;
    let read = connection.preview(end_lsn, limit, |frame| match frame {
        Frame::XLogData { data, .. } => on_message(data),
        // No message exceeds `ROW_BYTES_MAX`.
        Frame::LargeMessage { .. } | Frame::Keepalive { .. } => true,
    });
    let read = read.await;
    // If the server is sending a large transaction, it may take a while to detect that the
    // connection was closed.
    let _ = connection.close().await;
    for _ in 0..limit.as_millis() / RELEASE_POLL.as_millis() {
        let slot = catalog.slot(&target.slot).await?;
        if slot.is_none_or(|slot| slot.active_pid != Some(walsender)) {
            break;
        }
        tokio::time::sleep(RELEASE_POLL).await;
    }
    Ok(read?)
}

/// If the slot is at `to` but Walpost has not confirmed this position, returns the last position
/// that Walpost has confirmed.
async fn unconfirmed_move(
    settings: &PipelineSettings,
    catalog: &Catalog,
    to: Lsn,
) -> Result<Option<Lsn>, CatalogError> {
    let target = &settings.target;
    let identity = catalog.slot_identity(&settings.name, target).await?;
    let FoundState::State(Some(state)) = catalog.slot_state(&identity).await? else {
        return Ok(None);
    };
    let is_known = state.confirmed >= to
        || catalog
            .is_accounted_for(&identity, state.confirmed, to)
            .await?;
    Ok((!is_known).then_some(state.confirmed))
}

/// With exactly-once delivery, returns the last checkpoint, and the checkpoint from which the
/// pipeline would resume now.
async fn checkpoint(
    settings: &PipelineSettings,
    confirmed: Lsn,
) -> Result<Option<(Checkpoint, Checkpoint)>, SkipError> {
    let slot = &settings.target.slot;
    let (Some(checkpoints), Delivery::ExactlyOnce(place)) =
        (settings.checkpoints(), &settings.delivery)
    else {
        return Ok(None);
    };
    let found = checkpoints.read_last().await?;
    let found = found.ok_or_else(|| ExactlyOnceError::NoCheckpoint {
        adopt: settings.adopt(),
        pipeline: settings.name.clone(),
        topic: place.topic.clone(),
        slot: slot.clone(),
        moved: String::new(),
    })?;
    let (limit, row_bytes) = (settings.link_timeout, settings.row_bytes_max);
    let mut connection = Connection::open(&settings.postgres, limit, row_bytes).await?;
    let identity = connection.identify().await?;
    let history = match found.timeline == identity.timeline {
        true => Vec::new(),
        false => connection.timeline_history(identity.timeline).await?,
    };
    let server = ServerState {
        system_id: identity.system_id,
        timeline: identity.timeline,
        history,
        slot: slot.clone(),
        confirmed,
        flushed: identity.flushed,
    };
    let resumed = found.resumed(
        &server,
        &found.resume(&server).map_err(ExactlyOnceError::from)?,
    );
    Ok(Some((found, resumed)))
}

/// Returns the `detail` column of the journal entry.
fn detail(found: &PreviewReport, cluster: &str) -> serde_json::Value {
    let mut detail = json!({
        "system_id": cluster,
        "events": found.events,
        "dealt_with": found.dealt_with,
        "unroutable": found.unroutable,
        "transactions": found.transactions,
        "topics": found.topics,
        "first": found.first.first().map(|event| event.position().to_string()),
        "last": found.last.map(|last| last.to_string()),
    });
    if let Some(at) = found.unsendable {
        detail["unsendable"] = at.to_string().into();
    }
    detail
}

/// Writes the checkpoint, unless the current checkpoint differs from `found`.
async fn move_checkpoint(
    settings: &PipelineSettings,
    found: &Checkpoint,
    mut checkpoint: Checkpoint,
) -> Result<(), SkipError> {
    if *found == checkpoint {
        return Ok(());
    }
    let Some(producer) = settings.producer() else {
        return Ok(());
    };
    let mut sink = KafkaSink::for_checkpoint(&producer)?;
    let now = sink.take_over().await?;
    if now.as_ref() != Some(found) {
        return Err(SkipError::Moved {
            slot: settings.target.slot.clone(),
            confirmed: found.safe_lsn,
        });
    }
    sink.commit(&mut checkpoint).await?;
    Ok(())
}
