//! Checks whether the slot survives a failover of the server, and which settings can invalidate an
//! inactive slot.

use super::{Catalog, CatalogError};
use crate::escape::shell_word_on_one_line;
use crate::postgres::connect::conninfo::syntax::quote_value;
use crate::postgres::table::identifier;

/// A query for the values in [`Failover`]. Returns null for settings that the server's version does
/// not support.
const QUERY: &str = "SELECT current_setting('server_version_num')::int4, pg_is_in_recovery(), \
     (SELECT (pg_catalog.to_jsonb(s) OPERATOR(pg_catalog.->>) 'failover')::bool FROM pg_replication_slots s WHERE slot_name = $1), \
     coalesce((SELECT array_agg(slot_name::text ORDER BY slot_name) FROM pg_replication_slots \
         WHERE slot_type = 'physical' AND NOT temporary), '{}'), \
     current_setting('synchronized_standby_slots', true), current_setting('sync_replication_slots', true), \
     current_setting('hot_standby_feedback', true), current_setting('primary_slot_name', true), \
     (SELECT nullif(setting::int8, 0) FROM pg_settings WHERE name = 'idle_replication_slot_timeout'), \
     (SELECT nullif(reset_val, '0') FROM pg_settings WHERE name = 'transaction_timeout')";

/// The server's settings that affect the slot during a failover or while it is inactive.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Failover {
    version: i32,
    in_recovery: bool,
    /// Whether the slot is enabled for failover; `None` if the slot does not exist.
    is_failover_slot: Option<bool>,
    /// The names of the physical slots, which standbys use.
    standbys: Vec<String>,
    synchronized_standby_slots: Option<String>,
    sync_replication_slots: Option<String>,
    hot_standby_feedback: Option<String>,
    primary_slot_name: Option<String>,
    /// `idle_replication_slot_timeout` in seconds, if it exists and is enabled.
    idle_timeout: Option<i64>,
    /// The server's default for `transaction_timeout`, in milliseconds, if it exists and is
    /// enabled.
    transaction_timeout: Option<String>,
}

/// A message to the operator about the settings in [`Failover`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// The settings need no change.
    Ok(String),
    /// A setting may cause events to be lost in the future.
    Warning(String),
}

impl Catalog {
    /// Queries the settings that determine whether the slot survives a failover.
    ///
    /// # Errors
    /// Returns an error if the query fails.
    pub(crate) async fn failover(&self, slot: &str) -> Result<Failover, CatalogError> {
        let row = self.client.query_one(QUERY, &[&slot]).await?;
        Ok(Failover {
            version: row.try_get(0)?,
            in_recovery: row.try_get(1)?,
            is_failover_slot: row.try_get(2)?,
            standbys: row.try_get(3)?,
            synchronized_standby_slots: row.try_get(4)?,
            sync_replication_slots: row.try_get(5)?,
            hot_standby_feedback: row.try_get(6)?,
            primary_slot_name: row.try_get(7)?,
            idle_timeout: row.try_get(8)?,
            transaction_timeout: row.try_get(9)?,
        })
    }
}

impl Failover {
    /// Returns messages to the operator about the settings that affect `slot` in the database
    /// `database`.
    #[must_use]
    pub(crate) fn notes(&self, slot: &str, database: &str) -> Vec<Note> {
        let mut notes = Vec::new();
        // Servers older than PostgreSQL 17 can't synchronize slots to standbys.
        if self.version >= 170_000 {
            match self.in_recovery {
                true => self.on_standby(&mut notes),
                false => self.on_primary(slot, database, &mut notes),
            }
        }
        if let Some(seconds) = self.idle_timeout {
            notes.push(Note::Warning(format!(
                "idle_replication_slot_timeout is {seconds} s: the server invalidates slot {slot:?} after it has been \
                 inactive for that long, and a new slot would not contain the undelivered events. Disable the timeout, \
                 and limit retained WAL with max_slot_wal_keep_size instead: \
                 ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_catalog.pg_reload_conf()"
            )));
        }
        if let Some(millis) = &self.transaction_timeout {
            notes.push(Note::Ok(format!(
                "transaction_timeout is {millis} ms, but Walpost disables it in its own sessions, because a walsender \
                 waits while Kafka is unavailable"
            )));
        }
        notes
    }

    fn on_primary(&self, slot: &str, database: &str, notes: &mut Vec<Note>) {
        let standbys = self.standbys.join(", ");
        let is_empty =
            |setting: &Option<String>| setting.as_deref().unwrap_or_default().trim().is_empty();
        match self.is_failover_slot {
            // `check` reports a missing slot separately.
            None => {}
            Some(false) if self.standbys.is_empty() => {}
            Some(false) => notes.push(Note::Warning(format!(
                "slot {slot:?} is not enabled for failover, but the server has standbys ({standbys}): after a \
                 promotion, the slot will be missing and Walpost will halt. With Walpost stopped, run: psql {connection} -c \
                 'ALTER_REPLICATION_SLOT {name} (FAILOVER true)'",
                connection = shell_word_on_one_line(&format!("dbname={} replication=database", quote_value(database))),
                name = identifier(slot)
            ))),
            Some(true) if !self.standbys.is_empty() && is_empty(&self.synchronized_standby_slots) => {
                notes.push(Note::Warning(format!(
                    "slot {slot:?} is enabled for failover, but synchronized_standby_slots is empty: when a standby is \
                     promoted, events that it lacks may already be in Kafka. List the slots of the standbys to wait \
                     for: ALTER SYSTEM SET \
                     synchronized_standby_slots = '{standbys}'; SELECT pg_catalog.pg_reload_conf()"
                )));
            }
            Some(true) => notes.push(Note::Ok(format!(
                "slot {slot:?} is enabled for failover to a standby with sync_replication_slots = on"
            ))),
        }
    }

    fn on_standby(&self, notes: &mut Vec<Note>) {
        for (name, setting) in [
            ("sync_replication_slots", &self.sync_replication_slots),
            ("hot_standby_feedback", &self.hot_standby_feedback),
        ] {
            if setting.as_deref() != Some("on") {
                notes.push(Note::Warning(format!(
                    "{name} is off on this standby, so the standby does not synchronize the slot, which will be missing \
                     after a promotion. Turn it on: ALTER SYSTEM SET {name} = on; \
                     SELECT pg_catalog.pg_reload_conf()"
                )));
            }
        }
        if self
            .primary_slot_name
            .as_deref()
            .unwrap_or_default()
            .is_empty()
        {
            notes.push(Note::Warning(
                "primary_slot_name is empty on this standby, and a standby without its own slot on the primary does not \
                 synchronize other slots. Set it: ALTER SYSTEM SET \
                 primary_slot_name = '...'; SELECT pg_catalog.pg_reload_conf()"
                    .to_owned(),
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    fn primary() -> Failover {
        Failover {
            version: 180_000,
            is_failover_slot: Some(true),
            standbys: vec!["a".to_owned(), "b".to_owned()],
            synchronized_standby_slots: setting("a"),
            ..Failover::default()
        }
    }

    fn standby() -> Failover {
        Failover {
            version: 170_004,
            in_recovery: true,
            sync_replication_slots: setting("on"),
            hot_standby_feedback: setting("on"),
            primary_slot_name: setting("a"),
            ..Failover::default()
        }
    }

    fn warnings(found: &Failover) -> Vec<String> {
        let notes = found.notes("my_slot", "shop").into_iter();
        let warnings = notes.filter_map(|note| match note {
            Note::Ok(_) => None,
            Note::Warning(text) => Some(text),
        });
        warnings.collect()
    }

    #[test]
    fn warns_about_settings_that_prevent_slot_failover_and_names_the_remedy() {
        let check = |found: Failover, words: &[&str]| {
            let found = warnings(&found);
            assert_eq!(found.len(), 1, "{found:?}");
            for word in words {
                assert!(found[0].contains(word), "{word} in {found:?}");
            }
        };
        assert_eq!(warnings(&primary()), [""; 0]);
        assert_eq!(warnings(&standby()), [""; 0]);
        let is_failover_slot = Some(false);
        check(
            Failover {
                is_failover_slot,
                ..primary()
            },
            &[
                "(a, b)",
                "ALTER_REPLICATION_SLOT my_slot (FAILOVER true)",
                "psql 'dbname=shop replication=database' -c",
            ],
        );
        let unsynchronized = Failover {
            is_failover_slot,
            ..primary()
        };
        let notes = unsynchronized.notes("my_slot", "x';touch /tmp/f;'");
        let Some(Note::Warning(pasted)) = notes.first() else {
            panic!("{notes:?}");
        };
        let word = r"psql 'dbname='\''x'\\''\'';touch /tmp/f;'\\''\'''\'' replication=database' -c";
        assert!(pasted.contains(word), "{pasted}");
        let synchronized_standby_slots = setting("");
        check(
            Failover {
                synchronized_standby_slots,
                ..primary()
            },
            &["SET synchronized_standby_slots = 'a, b'"],
        );
        let hot_standby_feedback = setting("off");
        check(
            Failover {
                hot_standby_feedback,
                ..standby()
            },
            &["SET hot_standby_feedback = on"],
        );
        let sync_replication_slots = setting("off");
        check(
            Failover {
                sync_replication_slots,
                ..standby()
            },
            &["SET sync_replication_slots = on"],
        );
        let primary_slot_name = setting("");
        check(
            Failover {
                primary_slot_name,
                ..standby()
            },
            &["SET primary_slot_name"],
        );
        let idle_timeout = Some(3600);
        check(
            Failover {
                idle_timeout,
                ..primary()
            },
            &["is 3600 s", "idle_replication_slot_timeout = 0"],
        );
    }

    #[test]
    fn does_not_warn_without_failover_slots_or_standbys() {
        let version = 160_009;
        let is_failover_slot = None;
        assert_eq!(
            warnings(&Failover {
                version,
                is_failover_slot,
                ..primary()
            }),
            [""; 0]
        );
        let alone = Failover {
            is_failover_slot: Some(false),
            standbys: Vec::new(),
            ..primary()
        };
        assert_eq!(warnings(&alone), [""; 0]);
    }
}
