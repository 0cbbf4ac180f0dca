//! Another program drops, creates and moves slots.

use super::walk::Walk;

impl Walk<'_> {
    pub(super) fn change_slot(&mut self) {
        match self.rng.u32(..3) {
            0 => self.drop_slot(),
            1 => self.create_slot(),
            _ => self.move_slot(),
        }
    }

    pub(super) fn drop_slot(&mut self) {
        let slot = self.slot();
        if self.rng.bool() {
            self.end_walsender();
        }
        self.sql(&format!(
            "SELECT pg_catalog.pg_drop_replication_slot('{slot}')"
        ));
    }

    pub(super) fn end_walsender(&mut self) {
        let slot = self.slot();
        self.sql(&format!(
            "SELECT pg_catalog.pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}' AND active"
        ));
    }

    /// Creates the slot unless the walk has open transactions, because creating a slot would wait
    /// until they end.
    fn create_slot(&mut self) {
        if self.open.is_empty() {
            let slot = self.slot();
            self.sql(&format!(
                "SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
            ));
        }
    }

    fn move_slot(&mut self) {
        let slot = self.slot();
        self.sql(&format!(
            "SELECT pg_catalog.pg_replication_slot_advance('{slot}', pg_current_wal_lsn())"
        ));
    }
}
