//! Events that the random walk writes, and the range of WAL positions in which each was committed.

use std::mem;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::support::event::{Event, EventWriter};
use crate::support::fixture::Fixture;
use crate::support::session::Session;

use super::walk::{LOCK_TIMEOUT, Walk};

/// An event whose delivery the random walk checks.
#[derive(Clone, Debug)]
pub(super) struct WrittenEvent {
    /// The name that the table had when the row was inserted.
    pub(super) table: String,
    pub(super) era: u32,
    /// WAL positions shortly before and after the commit.
    pub(super) after: u64,
    pub(super) by: u64,
    /// Whether the server acknowledged the commit. If not, the event may or may not exist.
    pub(super) is_certain: bool,
}

/// A transaction that a later step commits or rolls back.
pub(super) struct OpenTransaction {
    session: Session,
    events: Vec<(String, String)>,
}

const POSITION_SQL: &str = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint";

fn position(session: &Session) -> Option<u64> {
    let rows = session.try_rows(POSITION_SQL).ok()?;
    rows.first()?.first()?.as_deref()?.parse().ok()
}

fn insert_sql(table: &str, id: &str, aggregate: &str) -> String {
    EventWriter::Table(table.to_owned()).insert_one(Event {
        id: Some(id),
        ..Event::new(aggregate, "k", "{}")
    })
}

impl Walk<'_> {
    /// Returns statements that write `count` events to a table, and each event's id and table.
    fn events(&mut self, table: &str, count: u32) -> (String, Vec<(String, String)>) {
        let mut sql = String::new();
        let mut events = Vec::new();
        for _ in 0..count {
            self.count += 1;
            let id = format!("00000000-0000-4000-8000-{:012}", self.count);
            sql.push_str(&insert_sql(table, &id, &self.aggregate));
            events.push((id, table.to_owned()));
        }
        (sql, events)
    }

    /// Adds the given events to `written`. The events were committed after the WAL position `after`
    /// and before the current position.
    fn record_events(&mut self, events: Vec<(String, String)>, after: u64, is_certain: bool) {
        let by = position(&self.fixture.db).unwrap_or(u64::MAX);
        let era = self.era;
        for (id, table) in events {
            let written = WrittenEvent {
                table,
                era,
                after,
                by,
                is_certain,
            };
            self.written.insert(id, written);
        }
    }

    pub(super) fn insert(&mut self) {
        let count = self.rng.u32(1..4);
        if let Some(table) = self.table() {
            self.insert_into(table, count);
        }
    }

    /// Inserts enough rows to keep Walpost busy for a while.
    pub(super) fn insert_many(&mut self) {
        if let Some(table) = self.table() {
            self.insert_into(table, 300);
        }
    }

    pub(super) fn insert_into(&mut self, table: &str, count: u32) {
        let (sql, events) = self.events(table, count);
        let after = position(&self.fixture.db).unwrap_or(0);
        let outcome = self.fixture.db.try_run(&format!("BEGIN; {sql} COMMIT"));
        let text = match &outcome {
            Ok(()) => "done".to_owned(),
            Err(error) => format!("{error}: {:?}", error.as_db_error()),
        };
        let first = &events[0].0;
        self.log_step(format!("{count} events to {table} from {first}: {text}"));
        match outcome {
            Ok(()) => self.record_events(events, after, true),
            Err(error) => {
                if error.as_db_error().is_none() {
                    self.record_events(events, after, false);
                }
                let _ = self.fixture.db.try_run("ROLLBACK");
            }
        }
    }

    pub(super) fn begin(&mut self) {
        let Some(table) = self.table() else { return };
        let count = self.rng.u32(1..4);
        let (sql, events) = self.events(table, count);
        let Ok(session) = Session::connect(&self.fixture.conninfo()) else {
            return;
        };
        session.run(LOCK_TIMEOUT);
        let opened = session.try_run(&format!("BEGIN; {sql}")).is_ok();
        let ids: Vec<_> = events.iter().map(|(id, _)| id.as_str()).collect();
        let text = format!("another session: BEGIN; {table}: {ids:?}: {opened}");
        self.log_step(text);
        if opened {
            self.open.push(OpenTransaction { session, events });
        }
    }

    pub(super) fn end(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let index = self.rng.usize(..self.open.len());
        let OpenTransaction { session, events } = self.open.remove(index);
        let commits = self.rng.u32(..4) > 0;
        let end = if commits { "COMMIT" } else { "ROLLBACK" };
        let after = position(&self.fixture.db).unwrap_or(0);
        let record_exit = session.try_run(end);
        let ids: Vec<_> = events.iter().map(|(id, _)| id.as_str()).collect();
        let text = format!("another session: {end} of {ids:?}: {record_exit:?}");
        self.log_step(text);
        match record_exit {
            Ok(()) if commits => self.record_events(events, after, true),
            Err(error) if commits && error.as_db_error().is_none() => {
                self.record_events(events, after, false);
            }
            _ => {}
        }
    }

    /// Ends every open transaction, as a server restart or a migration does.
    pub(super) fn end_all(&mut self) {
        while !self.open.is_empty() {
            self.end();
        }
    }

    /// Starts or pauses the session that writes events in the background while the steps of the
    /// random walk are performed.
    pub(super) fn toggle_background(&mut self) {
        let tables: Vec<_> = match self.background.is_writing() {
            true => Vec::new(),
            false => self.table().into_iter().map(str::to_owned).collect(),
        };
        self.log_step(format!("a concurrent session writes to {tables:?}"));
        self.background.write_to(tables);
    }

    pub(super) fn collect_background(&mut self) {
        let events = mem::take(&mut self.background.lock().events);
        self.written.extend(events);
    }
}

/// A session that inserts rows in the background, concurrently with the steps of the walk.
pub(super) struct BackgroundWriter {
    shared: Arc<Mutex<WriterState>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
pub(super) struct WriterState {
    conninfo: String,
    tables: Vec<String>,
    era: u32,
    events: Vec<(String, WrittenEvent)>,
    is_over: bool,
}

impl BackgroundWriter {
    pub(super) fn start(fixture: &Fixture<'_>, aggregate: &str, seed: u64) -> Self {
        let shared = Arc::new(Mutex::new(WriterState {
            conninfo: fixture.conninfo(),
            ..WriterState::default()
        }));
        let (its, aggregate) = (Arc::clone(&shared), aggregate.to_owned());
        let thread = thread::spawn(move || write(&its, &aggregate, seed));
        Self {
            shared,
            thread: Some(thread),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, WriterState> {
        self.shared.lock().expect("the writer has not panicked")
    }

    fn is_writing(&self) -> bool {
        !self.lock().tables.is_empty()
    }

    /// Changes the tables that the session writes to; an empty list pauses the session. Waits until
    /// the current transaction has ended.
    pub(super) fn write_to(&self, tables: Vec<String>) {
        self.lock().tables = tables;
    }

    /// Makes the session reconnect to the given server and continue writing there.
    pub(super) fn move_to(&self, conninfo: String, era: u32) {
        let mut shared = self.lock();
        shared.conninfo = conninfo;
        shared.era = era;
    }
}

impl Drop for BackgroundWriter {
    fn drop(&mut self) {
        if let Ok(mut shared) = self.shared.lock() {
            shared.is_over = true;
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn write(shared: &Mutex<WriterState>, aggregate: &str, seed: u64) {
    let mut rng = fastrand::Rng::with_seed(!seed);
    let mut session: Option<(String, Session)> = None;
    let mut count = 0;
    loop {
        // Hold the mutex for the whole transaction, so that a step of the random walk that changes
        // the server waits until the transaction has ended.
        let mut shared = shared.lock().expect("the walk has not panicked");
        if shared.is_over {
            return;
        }
        if session
            .as_ref()
            .is_none_or(|(conninfo, _)| *conninfo != shared.conninfo)
        {
            let new = Session::connect(&shared.conninfo).ok();
            session = new
                .filter(|session| session.try_run(LOCK_TIMEOUT).is_ok())
                .map(|session| (shared.conninfo.clone(), session));
        }
        let after = session.as_ref().and_then(|(_, open)| position(open));
        if after.is_none() {
            session = None;
        }
        if let Some(table) = rng.choice(&shared.tables).cloned()
            && let Some((_, open)) = &session
            && let Some(after) = after
        {
            count += 1;
            let id = format!("00000000-0000-4000-9000-{count:012}");
            let outcome = open.try_run(&insert_sql(&table, &id, aggregate));
            let is_uncertain = matches!(&outcome, Err(error) if error.as_db_error().is_none());
            if outcome.is_ok() || is_uncertain {
                let written = WrittenEvent {
                    table,
                    era: shared.era,
                    after,
                    by: position(open).unwrap_or(u64::MAX),
                    is_certain: outcome.is_ok(),
                };
                shared.events.push((id, written));
            }
            if is_uncertain {
                session = None;
            }
        }
        drop(shared);
        thread::sleep(Duration::from_millis(20));
    }
}
