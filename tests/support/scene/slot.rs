//! The slot, and the server's WAL.

use super::super::wait::wait_until;
use super::Scene;

impl Scene<'_> {
    /// Returns the name of both the slot and the publication.
    pub(crate) fn slot(&self) -> String {
        format!("walpost_{}", self.name)
    }

    /// Returns the slot's confirmed_flush_lsn.
    pub(crate) fn confirmed(&self) -> u64 {
        let lsn = self.db.number(&format!(
            "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = '{}'",
            self.slot()
        ));
        u64::try_from(lsn).unwrap()
    }

    /// Returns the server's current WAL write position.
    pub(crate) fn wal_position(&self) -> u64 {
        u64::try_from(
            self.db
                .number("SELECT (pg_current_wal_lsn() - '0/0')::bigint"),
        )
        .unwrap()
    }

    /// Writes the given number of megabytes of WAL that contain no events.
    pub(crate) fn write_other_wal(&self, megabytes: u32) {
        for _ in 0..megabytes {
            self.db
                .run("SELECT pg_logical_emit_message(false, 'other', repeat('x', 1 << 20))");
        }
    }

    /// Waits until everything committed so far is confirmed.
    pub(crate) fn wait_until_confirmed(&self) {
        let goal = self.wal_position();
        wait_until("the slot to be confirmed", || self.confirmed() >= goal);
    }

    /// Returns whether a walsender is using the slot.
    pub(crate) fn slot_is_active(&self) -> bool {
        let slot = self.slot();
        self.db.is_true(&format!(
            "SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"
        ))
    }

    /// Returns whether the walsender that uses the slot has sent WAL up to `lsn`.
    pub(crate) fn has_sent(&self, lsn: u64) -> bool {
        self.db.is_true(&format!(
            "SELECT (sent_lsn - '0/0') >= {lsn} FROM pg_stat_replication r
             JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE slot_name = '{}'",
            self.slot()
        ))
    }

    /// Terminates the walsender that uses the slot, and returns whether there was one.
    pub(crate) fn end_walsender(&self) -> bool {
        self.db.is_true(&format!(
            "SELECT pg_catalog.pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{}'",
            self.slot()
        ))
    }

    /// Drops the slot, terminating any walsender that uses it.
    pub(crate) fn drop_slot(&self) {
        let drop = format!(
            "SELECT pg_catalog.pg_drop_replication_slot('{}')",
            self.slot()
        );
        wait_until("the slot to go", || {
            self.end_walsender();
            self.db.try_run(&drop).is_ok()
        });
    }
}
