//! The two kinds of outbox, and the statements that write events to them.

/// The kind of outbox in which a test stores its events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outbox {
    /// Rows of a table.
    Table,
    /// Logical decoding messages.
    Messages,
}

/// Writes events to one outbox.
#[derive(Clone, Debug)]
pub(crate) enum EventWriter {
    /// Writes to the table with this name.
    Table(String),
    /// Writes to several tables: each statement writes to one of `tables`, chosen at random.
    /// `name_pattern` is a LIKE pattern that matches all tables that are or were outboxes.
    Tables {
        name_pattern: String,
        tables: Vec<String>,
    },
    /// Writes logical decoding messages with this prefix.
    Messages(String),
}

/// An event to write. Each field contains the text of an SQL literal, without quotes. To use
/// expressions over columns, see [`EventWriter::insert_many`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event<'a> {
    /// The event's id, or `None` for a random one.
    pub(crate) id: Option<&'a str>,
    pub(crate) aggregate: &'a str,
    pub(crate) key: &'a str,
    pub(crate) payload: &'a str,
}

impl<'a> Event<'a> {
    /// Creates an event with a random id.
    pub(crate) fn new(aggregate: &'a str, key: &'a str, payload: &'a str) -> Self {
        Self {
            id: None,
            aggregate,
            key,
            payload,
        }
    }
}

impl EventWriter {
    /// Chooses the table for the next statement.
    fn table(&self) -> &str {
        match self {
            Self::Table(table) => table,
            Self::Tables { tables, .. } => fastrand::choice(tables).expect("a table"),
            Self::Messages(_) => panic!("messages have no table"),
        }
    }

    /// Returns a statement that writes a single event.
    pub(crate) fn insert_one(&self, event: Event<'_>) -> String {
        let Event {
            id,
            aggregate,
            key,
            payload,
        } = event;
        let id = id.map_or("gen_random_uuid()".to_owned(), |id| format!("'{id}'"));
        match self {
            Self::Table(_) | Self::Tables { .. } => format!(
                "INSERT INTO {table} (id, aggregatetype, aggregateid, type, payload)
                 VALUES ({id}, '{aggregate}', '{key}', 'Happened', '{payload}');",
                table = self.table(),
            ),
            Self::Messages(prefix) => format!(
                "SELECT walpost.publish('{aggregate}', '{key}', 'Happened', '{payload}', NULL, {id}, '{prefix}');"
            ),
        }
    }

    /// Returns a statement that writes `count` events with 50 different keys. `payload` is an SQL
    /// expression of type jsonb, which may contain the event's number `n`.
    pub(crate) fn insert_many(&self, aggregate: &str, count: usize, payload: &str) -> String {
        let series = format!("FROM generate_series(1, {count}) AS n");
        match self {
            Self::Table(_) | Self::Tables { .. } => format!(
                "INSERT INTO {table} (id, aggregatetype, aggregateid, type, payload)
                 SELECT gen_random_uuid(), '{aggregate}', (n % 50)::text, 'Happened', {payload} {series};",
                table = self.table(),
            ),
            Self::Messages(prefix) => format!(
                "SELECT count(walpost.publish('{aggregate}', (n % 50)::text, 'Happened', {payload},
                     prefix => '{prefix}')) {series};"
            ),
        }
    }
}
