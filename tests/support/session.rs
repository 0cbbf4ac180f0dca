//! A blocking database session for tests. It returns every value as text.

use tokio::runtime::{Builder, Runtime};
use tokio_postgres::{Client, Error, NoTls, SimpleQueryMessage};

/// A connection to a PostgreSQL server.
pub(crate) struct Session {
    runtime: Runtime,
    client: Client,
}

impl Session {
    /// Connects without TLS.
    pub(crate) fn connect(conninfo: &str) -> Result<Self, Error> {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let client = runtime.block_on(async {
            let (client, connection) = tokio_postgres::connect(conninfo, NoTls).await?;
            tokio::spawn(connection);
            Ok::<_, Error>(client)
        })?;
        Ok(Self { runtime, client })
    }

    /// Runs one or more statements.
    pub(crate) fn try_run(&self, sql: &str) -> Result<(), Error> {
        self.runtime.block_on(self.client.batch_execute(sql))
    }

    /// Runs one or more statements, and panics if any of them fails.
    pub(crate) fn run(&self, sql: &str) {
        self.try_run(sql)
            .unwrap_or_else(|error| panic!("{}\n{sql}", describe(&error)));
    }

    /// Drops a role at the end of a test, together with its privileges and its objects in this
    /// database. Without this, the role would remain, because roles are shared by all databases of
    /// the server. Errors are ignored: the session may be broken by then, or the role may not have
    /// been created.
    pub(crate) fn drop_role(&self, role: &str) {
        let drop = format!("DROP OWNED BY \"{role}\" CASCADE; DROP ROLE \"{role}\"");
        let _ = self.try_run(&drop);
    }

    /// Returns all rows. Each value is formatted as PostgreSQL prints it.
    pub(crate) fn try_rows(&self, sql: &str) -> Result<Vec<Vec<Option<String>>>, Error> {
        let messages = self.runtime.block_on(self.client.simple_query(sql))?;
        Ok(messages
            .into_iter()
            .filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(
                    (0..row.len())
                        .map(|i| row.get(i).map(str::to_owned))
                        .collect(),
                ),
                _ => None,
            })
            .collect())
    }

    /// Like [`Session::try_rows`], but panics if the query fails.
    pub(crate) fn rows(&self, sql: &str) -> Vec<Vec<Option<String>>> {
        self.try_rows(sql)
            .unwrap_or_else(|error| panic!("{}\n{sql}", describe(&error)))
    }

    /// Returns the first column of the first row, or `None` if there is no row or the value is
    /// null.
    pub(crate) fn value(&self, sql: &str) -> Option<String> {
        self.rows(sql).into_iter().next()?.into_iter().next()?
    }

    /// Returns the first column of the first row as a number.
    pub(crate) fn number(&self, sql: &str) -> i64 {
        let value = self.value(sql).unwrap_or_else(|| panic!("no value: {sql}"));
        value
            .parse()
            .unwrap_or_else(|_| panic!("not a whole number: {value}: {sql}"))
    }

    /// Returns whether the first column of the first row is true.
    pub(crate) fn is_true(&self, sql: &str) -> bool {
        self.value(sql).as_deref() == Some("t")
    }
}

fn describe(error: &Error) -> String {
    match error.as_db_error() {
        Some(db) => format!(
            "{}: {} {}",
            db.code().code(),
            db.message(),
            db.detail().unwrap_or("")
        ),
        None => error.to_string(),
    }
}
