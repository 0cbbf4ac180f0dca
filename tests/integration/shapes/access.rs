//! Privileges, role attributes and database settings are changed, and restored later.

use super::walk::Walk;

impl Walk<'_> {
    pub(super) fn change_access(&mut self) {
        if !self.undo.is_empty() && self.rng.bool() {
            self.restore_access();
            return;
        }
        let table = self.any_table();
        let database = self.fixture.name.clone();
        let changes = [
            (
                format!("REVOKE SELECT ON {table} FROM walpost"),
                format!("GRANT SELECT ON {table} TO walpost"),
            ),
            (
                "REVOKE ALL ON walpost.slot_state FROM walpost".to_owned(),
                "GRANT SELECT, INSERT, UPDATE ON walpost.slot_state TO walpost".to_owned(),
            ),
            (
                "REVOKE INSERT ON walpost.journal FROM walpost".to_owned(),
                "GRANT SELECT, INSERT (pipeline, slot, action, from_lsn, to_lsn, detail) ON walpost.journal TO walpost"
                    .to_owned(),
            ),
            (
                "REVOKE USAGE ON SCHEMA walpost FROM walpost".to_owned(),
                "GRANT USAGE ON SCHEMA walpost TO walpost".to_owned(),
            ),
            (
                "ALTER ROLE walpost NOREPLICATION".to_owned(),
                "ALTER ROLE walpost REPLICATION".to_owned(),
            ),
            (
                "ALTER ROLE walpost NOLOGIN".to_owned(),
                "ALTER ROLE walpost LOGIN".to_owned(),
            ),
            (
                "ALTER ROLE walpost CONNECTION LIMIT 1".to_owned(),
                "ALTER ROLE walpost CONNECTION LIMIT -1".to_owned(),
            ),
            (
                format!("ALTER DATABASE {database} ALLOW_CONNECTIONS false"),
                format!("ALTER DATABASE {database} ALLOW_CONNECTIONS true"),
            ),
            (
                "ALTER ROLE walpost SET statement_timeout = '50ms'".to_owned(),
                "ALTER ROLE walpost RESET ALL".to_owned(),
            ),
            (
                format!("ALTER DATABASE {database} SET default_transaction_isolation = 'serializable'"),
                format!("ALTER DATABASE {database} RESET ALL"),
            ),
            (
                format!("ALTER DATABASE {database} SET default_transaction_read_only = on"),
                format!("ALTER DATABASE {database} RESET ALL"),
            ),
        ];
        let (change, undo) = self.rng.choice(&changes).cloned().expect("a change");
        if self.sql(&change) {
            self.undo.push(undo);
        }
        if self.rng.bool() {
            self.end_walsender();
        }
    }

    pub(super) fn restore_access(&mut self) {
        while let Some(undo) = self.undo.pop() {
            self.sql(&undo);
        }
    }
}
