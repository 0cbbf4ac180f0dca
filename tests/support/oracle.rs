//! What was committed, in commit order, from a witness other than Walpost: a second slot with
//! `test_decoding`.

use std::collections::HashMap;

use super::checker::Committed;
use super::session::Session;

/// A slot that remembers every commit of its database from its creation on.
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

    /// Every committed insert into the table since the slot was created, in commit order. `table`
    /// is a prefix: `public.outbox` stands for its partitions too. The table has a column `id`.
    pub(crate) fn history(&self, session: &Session, table: &str) -> Vec<Committed> {
        let rows = session.rows(&format!(
            "SELECT (lsn - '0/0')::bigint, left(data, 1000)
             FROM pg_logical_slot_peek_changes('{}', NULL, NULL, 'include-xids', '0')
             WHERE data = 'COMMIT' OR data LIKE 'table {table}%: INSERT: %'",
            self.slot
        ));
        let mut history = Vec::new();
        let mut open: Vec<String> = Vec::new();
        for row in rows {
            let lsn = row[0].as_deref().unwrap().parse().expect("an LSN");
            let data = row[1].as_deref().unwrap();
            if data == "COMMIT" {
                let events = open.drain(..).zip(0..);
                history.extend(events.map(|(id, index)| Committed {
                    id,
                    end: lsn,
                    index,
                }));
            } else {
                open.push(
                    id_of(data)
                        .unwrap_or_else(|| panic!("no id in: {data}"))
                        .to_owned(),
                );
            }
        }
        assert_distinct(&history);
        history
    }

    /// Gives the slot back, so that its WAL can go.
    pub(crate) fn drop_slot(&self, session: &Session) {
        let _ = session.try_run(&format!("SELECT pg_drop_replication_slot('{}')", self.slot));
    }
}

/// The value after ` id[type]:`, without quotes.
fn id_of(data: &str) -> Option<&str> {
    let (_, rest) = data.split_once(" id[")?;
    let (_, value) = rest.split_once("]:")?;
    match value.strip_prefix('\'') {
        Some(quoted) => quoted.split('\'').next(),
        None => value.split(' ').next(),
    }
}

fn assert_distinct(history: &[Committed]) {
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
