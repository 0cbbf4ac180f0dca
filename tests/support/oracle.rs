//! Lists the committed events in commit order. The list is independent of Walpost, because it comes
//! from a second slot, which uses `test_decoding`.

use std::collections::HashMap;

use super::checker::CommittedEvent;
use super::event::EventWriter;
use super::session::Session;

/// A slot that retains every commit in its database since the slot was created.
pub(crate) struct Oracle {
    slot: String,
}

impl Oracle {
    /// Creates the slot `name`.
    pub(crate) fn new(session: &Session, name: &str) -> Self {
        session.run(&format!(
            "SELECT pg_create_logical_replication_slot('{name}', 'test_decoding')"
        ));
        Self {
            slot: name.to_owned(),
        }
    }

    /// Returns every event committed since the slot was created, in commit order. Tables must have
    /// a column `id`. Table names are matched as prefixes, so `public.outbox` also matches its
    /// partitions.
    pub(crate) fn history(&self, session: &Session, events: &EventWriter) -> Vec<CommittedEvent> {
        let query = match events {
            EventWriter::Table(table) => self.rows_query(table),
            EventWriter::Tables { name_pattern, .. } => self.rows_query(name_pattern),
            EventWriter::Messages(prefix) => self.messages_query(prefix),
        };
        let mut history = Vec::new();
        let mut open: Vec<Option<String>> = Vec::new();
        for row in session.rows(&query) {
            let [lsn, data] = &row[..] else {
                panic!("expected two columns: {row:?}")
            };
            let end = lsn.as_deref().unwrap().parse().expect("an LSN");
            match data.as_deref() {
                Some("COMMIT") => {
                    let events = open.drain(..).zip(0..);
                    history.extend(events.filter_map(|(id, index)| {
                        Some(CommittedEvent {
                            id: id?,
                            end,
                            index,
                        })
                    }));
                }
                Some(id) => open.push(Some(id.to_owned())),
                None => open.push(None),
            }
        }
        assert_distinct(&history);
        history
    }

    /// Returns a query that lists all commits and the ids of all inserted rows.
    fn rows_query(&self, table: &str) -> String {
        format!(
            "SELECT (lsn - '0/0')::bigint, CASE WHEN data = 'COMMIT' THEN data
                 ELSE substring(left(data, 1000) FROM ' id\\[[^]]*\\]:''?([^ '']*)') END
             FROM pg_logical_slot_peek_changes('{}', NULL, NULL, 'include-xids', '0')
             WHERE data = 'COMMIT' OR data LIKE 'table {table}%: INSERT: %'",
            self.slot
        )
    }

    /// Returns a query that lists all commits and logical decoding messages. For a message with the
    /// prefix, the query returns the event's id, which follows the first byte of the content. For
    /// any other message, it returns null.
    fn messages_query(&self, prefix: &str) -> String {
        let ours = format!("message: transactional: 1 prefix: {prefix}, sz: ");
        format!(
            "SELECT (lsn - '0/0')::bigint, CASE WHEN data = 'COMMIT' THEN 'COMMIT'
                 WHEN position('{ours}'::bytea IN data) = 1 THEN encode(
                     substr(data, position(' content:'::bytea IN data) + length(' content:') + 1, 16), 'hex')::uuid::text
                 END
             FROM pg_logical_slot_peek_binary_changes('{}', NULL, NULL, 'include-xids', '0')
             WHERE data = 'COMMIT' OR position('message: transactional: 1 '::bytea IN data) = 1",
            self.slot
        )
    }

    /// Drops the slot, so that the server can remove the WAL that it retained.
    pub(crate) fn drop_slot(&self, session: &Session) {
        let _ = session.try_run(&format!(
            "SELECT pg_catalog.pg_drop_replication_slot('{}')",
            self.slot
        ));
    }
}

fn assert_distinct(history: &[CommittedEvent]) {
    let mut seen = HashMap::new();
    for event in history {
        let other = seen.insert(&event.id, event.end);
        assert!(
            other.is_none(),
            "a test must not insert an id twice: {}",
            event.id
        );
    }
}
