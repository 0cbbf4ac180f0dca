//! Writes the commands for switching from Debezium to Walpost without missing any events.

use super::connector::{Roles, encoded};
use super::source::Kind;
use crate::escape::shell_quoted;

/// The values to insert in the switch-over commands. Only the role has to be quoted for the shell:
/// the names of slots and pipelines contain no special characters, and URLs are percent-encoded.
pub(super) struct SwitchOver<'i> {
    pub(super) kind: Kind,
    /// The connector's name, if it is known.
    pub(super) connector: Option<&'i str>,
    pub(super) roles: &'i Roles,
    /// Debezium's slot.
    pub(super) slot: &'i str,
    /// Walpost's slots.
    pub(super) slots: &'i [String],
    /// Whether walpost.toml contains `snapshot = "initial"`.
    pub(super) is_initial: bool,
}

impl SwitchOver<'_> {
    /// Returns the comments for the end of walpost.toml. Commands in the comments are indented.
    #[must_use]
    pub(super) fn comments(&self) -> Vec<String> {
        let administrator = &self.roles.administrator;
        let role = shell_quoted(&self.roles.user);
        let slot = self.slot;
        let slots: Vec<_> = self.slots.iter().map(|slot| format!("'{slot}'")).collect();
        let slots = slots.join(", ");
        let connector = self.connector.map_or_else(|| "NAME".to_owned(), encoded);
        let rest = format!("http://localhost:8083/connectors/{connector}");
        let mut comments = Vec::new();
        let mut add = |text: &str| comments.push(text.to_owned());
        add(
            "Commands for a switch-over that misses no events; they assume that this file is saved as walpost.toml. \
             docs/debezium.md explains the steps.",
        );
        add("");
        add(
            "1. While Debezium is running, create Walpost's database objects, as the table's owner or a superuser. From now on, \
             both slots retain every event.",
        );
        add(&format!(
            "     walpost init --config walpost.toml --role {role} --postgres '{administrator}'"
        ));
        add(
            "2. Wait until this command prints t: Debezium has then delivered all events that are older than Walpost's \
             slot. If the database is idle, insert an event.",
        );
        add(&format!(
            "     psql '{administrator}' -qAt -c \"SET search_path = pg_catalog\" -c \"SELECT \
             bool_and(debezium.confirmed_flush_lsn >= walpost.confirmed_flush_lsn) FROM pg_replication_slots AS debezium, \
             pg_replication_slots AS walpost WHERE debezium.slot_name = '{slot}' AND walpost.slot_name IN ({slots})\""
        ));
        add(
            "3. Stop Debezium. Walpost will deliver again, with the same ids, the events that Debezium has delivered \
             since step 1, so don't wait longer than necessary.",
        );
        match self.kind {
            Kind::Connect => add(&format!("     curl -fsS -X PUT {rest}/stop")),
            Kind::Server => add("     systemctl stop debezium-server"),
        }
        if self.is_initial {
            add(
                "4. Debezium has delivered the older rows. Exclude these rows, or Walpost will deliver all of them again.",
            );
            add("     sed -i 's/^snapshot = \"initial\"$/snapshot = \"never\"/' walpost.toml");
        } else {
            add("4. snapshot = \"never\" excludes the older rows, which Debezium has delivered.");
        }
        add("5. Start Walpost.");
        add("     walpost check --config walpost.toml");
        add("     walpost run --config walpost.toml");
        add(
            "6. When consumers have received all events, drop Debezium's slot. Otherwise, the WAL that it retains will fill the \
             disk. After this step, you can't switch back.",
        );
        add(&format!(
            "     psql '{administrator}' -c \"SELECT pg_catalog.pg_drop_replication_slot('{slot}')\""
        ));
        if self.kind == Kind::Connect {
            add(&format!("     curl -fsS -X DELETE {rest}"));
        }
        comments
    }
}
