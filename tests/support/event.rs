//! The two kinds of outbox, and the statements that write events to them.

/// Where a test's events are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outbox {
    /// Rows of a table.
    Table,
    /// Messages in WAL.
    Messages,
}

/// Writes events to one outbox.
#[derive(Clone, Debug)]
pub(crate) enum Writer {
    /// Into the table of this name.
    Table(String),
    /// Into one of these tables each time; `like` stands for all that are or were outboxes.
    Tables { like: String, tables: Vec<String> },
    /// Into the log, with this prefix.
    Messages(String),
}

/// One event. The texts are SQL literals without their quotes; see [`Writer::many`] for columns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event<'a> {
    /// None is a random one.
    pub(crate) id: Option<&'a str>,
    pub(crate) aggregate: &'a str,
    pub(crate) key: &'a str,
    pub(crate) payload: &'a str,
}

impl<'a> Event<'a> {
    /// With a random id.
    pub(crate) fn new(aggregate: &'a str, key: &'a str, payload: &'a str) -> Self {
        Self {
            id: None,
            aggregate,
            key,
            payload,
        }
    }
}

impl Writer {
    /// The table for the next statement.
    fn table(&self) -> &str {
        match self {
            Self::Table(table) => table,
            Self::Tables { tables, .. } => fastrand::choice(tables).expect("a table"),
            Self::Messages(_) => panic!("messages have no table"),
        }
    }

    /// A statement that writes one event.
    pub(crate) fn one(&self, event: Event<'_>) -> String {
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

    /// A statement that writes `count` events, with 50 different keys. The payload is an expression
    /// of type jsonb over the event's number `n`.
    pub(crate) fn many(&self, aggregate: &str, count: usize, payload: &str) -> String {
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
