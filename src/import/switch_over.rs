//! The commands for a switch-over without a gap, for one configuration.

use super::connector::{Roles, encoded};
use super::source::Kind;
use crate::escape::shell_quoted;

/// The values in the commands. Slots and pipelines have plain names, and URLs are percent-encoded,
/// so the role is the only value from outside that needs the shell's quotes.
pub(super) struct SwitchOver<'i> {
    pub(super) kind: Kind,
    /// The connector's name, if it is known.
    pub(super) connector: Option<&'i str>,
    pub(super) roles: &'i Roles,
    /// Debezium's slot.
    pub(super) slot: &'i str,
    /// Walpost's slots.
    pub(super) slots: &'i [String],
    /// Whether the file contains `snapshot = "initial"`.
    pub(super) is_initial: bool,
}

impl SwitchOver<'_> {
    /// Returns the comments. Commands are indented.
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
        let mut say = |text: &str| comments.push(text.to_owned());
        say(
            "The switch-over without a gap, with this file as walpost.toml. docs/debezium.md explains it.",
        );
        say("");
        say(
            "1. While Debezium is running, create what Walpost needs, as the table's owner or a superuser. From now on, both \
             slots retain every event.",
        );
        say(&format!(
            "     walpost init --config walpost.toml --role {role} --postgres '{administrator}'"
        ));
        say(
            "2. Wait until this prints t: Debezium has delivered everything that is older than Walpost's slot. In an idle \
             database, insert an event.",
        );
        say(&format!(
            "     psql '{administrator}' -qAt -c \"SET search_path = pg_catalog\" -c \"SELECT \
             bool_and(debezium.confirmed_flush_lsn >= walpost.confirmed_flush_lsn) FROM pg_replication_slots AS debezium, \
             pg_replication_slots AS walpost WHERE debezium.slot_name = '{slot}' AND walpost.slot_name IN ({slots})\""
        ));
        say(
            "3. Stop Debezium. Events that it has delivered since step 1 are delivered again with the same ids: keep this time \
             short.",
        );
        match self.kind {
            Kind::Connect => say(&format!("     curl -fsS -X PUT {rest}/stop")),
            Kind::Server => say("     systemctl stop debezium-server"),
        }
        if self.is_initial {
            say(
                "4. Debezium has delivered the older rows. Exclude them, or all of them are delivered again.",
            );
            say("     sed -i 's/^snapshot = \"initial\"$/snapshot = \"never\"/' walpost.toml");
        } else {
            say("4. snapshot = \"never\" excludes the older rows, which Debezium has delivered.");
        }
        say("5. Start Walpost.");
        say("     walpost check --config walpost.toml");
        say("     walpost run --config walpost.toml");
        say(
            "6. When consumers have received everything, drop Debezium's slot, or the WAL that it retains fills the disk. After \
             this step you can't switch back.",
        );
        say(&format!(
            "     psql '{administrator}' -c \"SELECT pg_catalog.pg_drop_replication_slot('{slot}')\""
        ));
        if self.kind == Kind::Connect {
            say(&format!("     curl -fsS -X DELETE {rest}"));
        }
        comments
    }
}
