//! The server crashes or restarts, or it is replaced by a standby, a restored dump or an older copy
//! of itself.

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use crate::support::postgres::{MAJOR, Server, StopMode, debian_binaries};
use crate::support::wait::wait_until;

use super::walk::{LOCK_TIMEOUT, Walk};

/// The servers of a random walk. They are kept until the walk ends.
#[derive(Default)]
pub(super) struct Servers {
    places: [OnceLock<Server>; 6],
}

impl Servers {
    pub(super) fn add(&self, server: Server) -> &Server {
        let free = self.places.iter().find(|place| place.get().is_none());
        free.expect("a free place").get_or_init(|| server)
    }

    fn is_full(&self) -> bool {
        self.places.iter().all(|place| place.get().is_some())
    }
}

/// A copy of the server's data directory.
pub(super) struct OlderCopy {
    folder: PathBuf,
    ids: HashSet<String>,
    /// The end of WAL at the time when the copy was made.
    end: u64,
}

impl Walk<'_> {
    pub(super) fn change_server(&mut self) {
        self.restore_access();
        match self.rng.u32(..8) {
            0 => self.restart(StopMode::Immediate),
            1 => self.restart(StopMode::Fast),
            2..=3 if self.copy.is_none() => self.copy_server(),
            2..=3 => self.restore_copy(),
            4 if !self.servers.is_full() => self.fail_over(),
            5..=7 if !self.servers.is_full() && self.fixture.server.major <= MAJOR => {
                self.restore_dump()
            }
            _ => self.restart(StopMode::Immediate),
        }
    }

    fn restart(&mut self, how: StopMode) {
        self.open.clear();
        self.fixture.server.stop(how);
        self.fixture.server.start();
        self.log_step(format!("the server was restarted: {how:?}"));
        self.reconnect();
    }

    fn reconnect(&mut self) {
        self.fixture.reconnect();
        self.fixture.db.run(LOCK_TIMEOUT);
    }

    fn copy_server(&mut self) {
        self.open.clear();
        self.fixture.server.stop(StopMode::Fast);
        let folder = self.fixture.server.copy_data();
        // Record the events before the server starts again. Once it has started, the background
        // session writes events that the copy lacks.
        self.collect_background();
        let ids = self.written.keys().cloned().collect();
        self.fixture.server.start();
        self.reconnect();
        self.log_step("a copy of the server was made");
        let end = self.end_of_wal();
        self.copy = Some(OlderCopy { folder, ids, end });
    }

    /// Restores the copy, which discards everything committed after it was made. Sometimes also
    /// drops the slot, because a base backup contains no slots.
    fn restore_copy(&mut self) {
        let Some(OlderCopy { folder, ids, end }) = self.copy.take() else {
            return;
        };
        self.open.clear();
        self.background.write_to(Vec::new());
        self.collect_background();
        self.fixture.server.stop(StopMode::Fast);
        self.fixture.server.restore_data(&folder);
        self.fixture.server.start();
        self.reconnect();
        let is_void = |id: &String| !ids.contains(id);
        let void: Vec<_> = self
            .written
            .keys()
            .filter(|id| is_void(id))
            .cloned()
            .collect();
        for id in void {
            self.written.remove(&id);
            self.void.insert(id);
        }
        self.log_step("the copy of the server was put back");
        // The original WAL and the WAL of the restored server are identical up to the end of the
        // copy, so LSNs up to that point remain valid.
        self.era += 1;
        for event in self.written.values_mut() {
            event.era = self.era;
        }
        for evidence in &mut self.evidence {
            if evidence.era + 1 == self.era && evidence.now <= end {
                evidence.era = self.era;
            }
        }
        self.background.move_to(self.fixture.conninfo(), self.era);
        if self.rng.bool() {
            self.drop_slot();
        }
        // The copy contains events that Walpost may have delivered after the copy was made. The
        // restored server has no record of their delivery, so they may be delivered again.
        self.exclude_from_repeat_check();
    }

    /// Fails over to a standby, which has everything except the slots.
    fn fail_over(&mut self) {
        self.open.clear();
        self.copy = None;
        self.background.write_to(Vec::new());
        let primary = self.fixture.server;
        let name = format!("standby_{}", self.count);
        let standby = self.servers.add(primary.standby(&name, ""));
        self.reconnect();
        self.insert();
        let goal = self.end_of_wal();
        let session = standby.session("postgres");
        wait_until("the standby to replay", || {
            session.number("SELECT (pg_last_wal_replay_lsn() - '0/0')::bigint")
                >= i64::try_from(goal).expect("a position")
        });
        primary.stop(StopMode::Fast);
        standby.promote();
        self.log_step("the standby was promoted");
        self.switch_to_server(standby);
    }

    /// Moves the database, by dump and restore, to a cluster whose LSNs start over. The dump does
    /// not include the slot.
    fn restore_dump(&mut self) {
        self.open.clear();
        self.copy = None;
        self.background.write_to(Vec::new());
        self.collect_background();
        if self.rng.bool() {
            // Make sure that the dump contains undelivered rows.
            self.stop();
            self.insert();
        }
        let restored = self.servers.add(Server::with_new_cluster(MAJOR, ""));
        let name = self.fixture.name.clone();
        let session = restored.session("postgres");
        session.run("CREATE ROLE walpost LOGIN REPLICATION");
        session.run(&format!("CREATE DATABASE {name} TEMPLATE template0"));
        let copied = Command::new("sh")
            .arg("-c")
            .arg("\"$0/pg_dump\" -d \"$1\" | \"$0/psql\" -q -v ON_ERROR_STOP=1 -d \"$2\"")
            .arg(debian_binaries(MAJOR))
            .arg(self.fixture.conninfo())
            .arg(restored.conninfo(&name))
            .output()
            .expect("a shell");
        assert!(copied.status.success(), "{copied:?}");
        self.log_step("the database was dumped and restored on another server");
        self.era += 1;
        self.switch_to_server(restored);
    }
}

impl<'s> Walk<'s> {
    /// Switches every session to the given server.
    fn switch_to_server(&mut self, server: &'s Server) {
        self.fixture.fail_over(server, []);
        self.fixture.db.run(LOCK_TIMEOUT);
        self.background.move_to(self.fixture.conninfo(), self.era);
        self.undo.clear();
        self.reload();
    }
}
