//! Pipelines defined by the rows of a query's result. Each row supplies values that are inserted
//! into a template.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use toml::{Table, Value};

use super::Env;
use super::row_values::{self, Place, can_be_equal, own_topics};
use super::values::{PASSWORD_COMMAND, TOKEN_COMMAND, parse_duration};
use crate::kafka::properties::is_secret;
use crate::outbox::reserved_topics::collision_key;
use crate::postgres::connect::conninfo::Conninfo;
use crate::postgres::text_rows::{TextRow, TextRows, text_rows};
use crate::program::Program;
use crate::supervisor;

/// Timeout for the query that returns the rows.
const QUERY_TIMEOUT: Duration = Duration::from_secs(10);
const INTERVAL_DEFAULT: Duration = Duration::from_secs(30);
const INTERVAL_MIN: Duration = Duration::from_secs(1);

/// The key whose value contains a regular expression. Braces in the regular expression do not refer
/// to columns.
const ROUTE: &str = "route";
/// The keys whose values are programs to run. Row values must not be inserted into these programs
/// or their arguments.
const COMMAND_KEYS: [&str; 2] = [PASSWORD_COMMAND, TOKEN_COMMAND];

/// A `[[fleet.source]]` table that contains a query.
#[derive(Clone)]
pub(crate) struct QuerySource {
    pub postgres: String,
    pub password_command: Option<Vec<String>>,
    pub query: String,
    pub every: Duration,
    pub template: Table,
}

impl fmt::Debug for QuerySource {
    // Omit the connection string and the template, because they may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuerySource")
            .field("query", &self.query)
            .finish_non_exhaustive()
    }
}

impl QuerySource {
    /// Parses the interval between queries.
    ///
    /// # Errors
    /// Returns an error if the text is not a duration, or the duration is too short.
    pub(super) fn every(given: Option<&str>) -> Result<Duration, String> {
        let every = given.map_or(Ok(INTERVAL_DEFAULT), parse_duration)?;
        match every < INTERVAL_MIN {
            true => Err(format!("every: expected at least {INTERVAL_MIN:?}")),
            false => Ok(every),
        }
    }

    /// Returns an ID that distinguishes this source of pipelines from all other sources in the
    /// file. Changing a password does not change the ID.
    pub(super) fn id(&self) -> SourceId {
        SourceId {
            query: self.query.clone(),
            database: Conninfo::without_passwords(&self.postgres),
            name: self.template.get("name").map(Value::to_string),
        }
    }

    /// Returns the template for the names of the source's pipelines.
    fn name(&self) -> &str {
        let name = self.template.get("name").and_then(Value::as_str);
        name.unwrap_or_default()
    }

    /// Returns descriptions of the keys whose values are, or contain, passwords.
    pub(super) fn secrets(&self) -> Vec<String> {
        let mut found = Vec::new();
        if Conninfo::contains_password(&self.postgres) {
            found.push("postgres in a fleet.source".to_owned());
        }
        let in_template = self.template.get("postgres").and_then(Value::as_str);
        if in_template.is_some_and(Conninfo::contains_password) {
            found.push("postgres in a template".to_owned());
        }
        let kafka = self.template.get("kafka").and_then(Value::as_table);
        let names = kafka.into_iter().flatten().map(|(name, _)| name);
        found.extend(
            names
                .filter(|name| is_secret(name))
                .map(|name| format!("{name} in a template")),
        );
        found
    }

    /// Returns the path of the program that the template specifies for this key.
    pub(super) fn template_program(&self, key: &str) -> Option<String> {
        let program = self.template.get(key)?.as_array()?.first()?;
        program.as_str().map(str::to_owned)
    }

    /// Returns the source's name for use in messages.
    pub(super) fn describe(&self, env: Env<'_>) -> String {
        match Conninfo::parse(&self.postgres, env) {
            Ok(conninfo) => format!("fleet.source in {}", conninfo.describe()),
            Err(_) => "fleet.source".to_owned(),
        }
    }

    /// Runs the query. Blocks until the result arrives.
    ///
    /// # Errors
    /// Returns an error if the connection or the query fails.
    pub(super) fn run(&self, env: Env<'_>) -> Result<TextRows, String> {
        let conninfo = Conninfo::parse(&self.postgres, env);
        let mut conninfo = conninfo.map_err(|error| format!("postgres: {error}"))?;
        if let Some(argv) = &self.password_command {
            let with_command = Program::new(argv).and_then(|program| {
                let place = format!("{PASSWORD_COMMAND} of a fleet.source");
                let with_command = conninfo.with_password_command(program, &place);
                with_command.map_err(str::to_owned)
            });
            conninfo = with_command.map_err(|error| format!("{PASSWORD_COMMAND}: {error}"))?;
        }
        let runtime = supervisor::runtime().map_err(|error| error.to_string())?;
        let rows = runtime.block_on(text_rows(&conninfo, &self.query, QUERY_TIMEOUT));
        // Don't wait for the runtime's threads: one of them may still be resolving a host name.
        runtime.shutdown_background();
        rows.map_err(|error| error.to_string())
    }

    /// Returns a row's name for use in messages.
    pub(super) fn row_name(&self, row: &TextRow) -> String {
        let template = self.template.get("name").and_then(Value::as_str);
        match template.map(|template| Place::new("name").filled(template, row)) {
            Some(Ok(name)) => format!("row of pipeline {name:?}"),
            _ => "a row".to_owned(),
        }
    }

    /// Returns the template with the row's values inserted.
    ///
    /// # Errors
    /// Returns an error if the row lacks a value, or if a value is not allowed where the template
    /// uses it.
    pub(super) fn fill_template(&self, row: &TextRow) -> Result<Table, String> {
        let mut table = self.template.clone();
        for (key, value) in &mut table {
            if key != ROUTE && !COMMAND_KEYS.contains(&key.as_str()) {
                row_values::fill_value(key, value, row)?;
            }
        }
        Ok(table)
    }
}

/// Checks that two sources of a file can't define pipelines with the same name, because a
/// pipeline's name must determine its source. Also checks that the sources can't use the same topic
/// for different purposes.
///
/// # Errors
/// Returns an error that names the setting that could have the same value in both sources.
pub(super) fn check_distinct(first: &QuerySource, second: &QuerySource) -> Result<(), String> {
    let (name, other_name) = (first.name(), second.name());
    if can_be_equal(name, other_name) {
        return Err(format!(
            "found two sources whose pipelines could have the same name, because their templates have name = {name:?} and \
             name = {other_name:?}. Begin the names of each source's pipelines with different text, like \"shard_{{name}}\" and \
             \"tenant_{{name}}\""
        ));
    }
    let other_topics = own_topics(&second.template);
    for (key, usage, topic) in own_topics(&first.template) {
        for (other_key, other_usage, other_topic) in &other_topics {
            if usage != *other_usage
                && can_be_equal(&collision_key(topic), &collision_key(other_topic))
            {
                return Err(format!(
                    "found two sources that could use the same topic for different purposes, because their templates have {key} = \
                     {topic:?} and {other_key} = {other_topic:?}. Begin the topics with different text"
                ));
            }
        }
    }
    Ok(())
}

/// Checks that a template meets the requirements that do not depend on the values of rows.
///
/// # Errors
/// Returns an error if all pipelines would have the same name, or if the template uses row values
/// where they are not allowed. The message suggests a fix.
pub(super) fn check_template(template: &Table) -> Result<(), String> {
    if !template.contains_key("name") {
        return Err(
            "template: name: expected a name that contains a column of the query, like \"shard_{name}\""
                .to_owned(),
        );
    }
    for program in COMMAND_KEYS {
        let arguments = template.get(program).and_then(Value::as_array);
        let mut arguments = arguments.into_iter().flatten().filter_map(Value::as_str);
        if arguments.any(|argument| argument.contains('{')) {
            return Err(format!(
                "template: {program}: found braces, expected the same program and arguments for each row: otherwise, any role \
                 that can write a row could run other programs"
            ));
        }
    }
    row_values::check(template)
}

/// Identifies a `[[fleet.source]]` that contains a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SourceId {
    query: String,
    /// The parameters of the connection, without passwords.
    database: Vec<(String, String)>,
    /// The template for the pipelines' names.
    name: Option<String>,
}

/// The query result row that currently defines a pipeline, and the source whose query returned the
/// row.
pub(crate) struct DefiningRow(Mutex<(SourceId, TextRow)>);

impl fmt::Debug for DefiningRow {
    // Omit the row, because it may contain passwords.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DefiningRow").finish_non_exhaustive()
    }
}

impl DefiningRow {
    /// Returns the current row and its source.
    pub(super) fn get(&self) -> (SourceId, TextRow) {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, (SourceId, TextRow)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The rows that define pipelines, keyed by the names of the pipelines. A row is kept in memory as
/// long as a pipeline refers to it.
#[derive(Default)]
pub(super) struct DefiningRows(BTreeMap<String, Weak<DefiningRow>>);

impl DefiningRows {
    /// Stores the row that defines the pipeline. A running pipeline of this name uses the new row
    /// when it reads its credentials again. Only one source can define pipelines of this name.
    pub(super) fn set(
        &mut self,
        pipeline: &str,
        source: SourceId,
        row: &TextRow,
    ) -> Arc<DefiningRow> {
        let current = self.0.get(pipeline).and_then(Weak::upgrade);
        if let Some(current) = current {
            *current.lock() = (source, row.clone());
            return current;
        }
        let added = Arc::new(DefiningRow(Mutex::new((source, row.clone()))));
        self.0.insert(pipeline.to_owned(), Arc::downgrade(&added));
        added
    }

    /// Removes the rows of pipelines that no longer exist.
    pub(super) fn remove_unused(&mut self) {
        self.0.retain(|_, row| row.strong_count() > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[(&str, Option<&str>)]) -> TextRow {
        let owned =
            |(name, value): &(&str, Option<&str>)| ((*name).to_owned(), value.map(str::to_owned));
        values.iter().map(owned).collect()
    }

    fn filled(template: &str, row: &TextRow) -> Result<Table, String> {
        let source = QuerySource {
            postgres: "postgresql://registry/shards".to_owned(),
            password_command: None,
            query: "SELECT 1".to_owned(),
            every: INTERVAL_DEFAULT,
            template: template.parse().expect("TOML"),
        };
        source.fill_template(row)
    }

    #[test]
    fn replaces_column_placeholders_in_a_template_with_values_from_the_row() {
        let row = row(&[("name", Some("a")), ("host", Some("h1")), ("none", None)]);
        let table = filled(
            r#"
            name = "shard_{name}"
            postgres = "postgresql://walpost@{host}/shop_{name}"
            tables = ["{name}.outbox"]
            window_records = 5
            topic = "{source.name}.{aggregatetype}"
            headers = { shard = "{source.name}", id = "{id}" }
            route = { column = "a", regex = "(.{2})", replacement = "$1" }
            kafka = { "client.id" = "{name}{{x}}" }
            password_command = ["/bin/p"]
            "#,
            &row,
        );
        let expected: Table = r#"
            name = "shard_a"
            postgres = "postgresql://walpost@h1/shop_a"
            tables = ["a.outbox"]
            window_records = 5
            topic = "a.{aggregatetype}"
            headers = { shard = "a", id = "{id}" }
            route = { column = "a", regex = "(.{2})", replacement = "$1" }
            kafka = { "client.id" = "a{x}" }
            password_command = ["/bin/p"]
            "#
        .parse()
        .expect("TOML");
        assert_eq!(table, Ok(expected));
    }

    /// Row values are inserted as literal text. If braces were not escaped, a value could refer to
    /// other columns of the outbox.
    #[test]
    fn escapes_braces_in_values() {
        let row = row(&[("v", Some("{payload}{{")), ("name", Some("a"))]);
        let table = filled(
            "headers = { a = \"{source.v}-{id}\" }\nkey = \"{source.v}\"",
            &row,
        );
        let expected: Table =
            "headers = { a = \"{{payload}}{{{{-{id}\" }\nkey = \"{{payload}}{{{{\""
                .parse()
                .expect("TOML");
        assert_eq!(table, Ok(expected));
    }

    fn source(postgres: &str, query: &str, name: &str) -> QuerySource {
        QuerySource {
            postgres: postgres.to_owned(),
            password_command: None,
            query: query.to_owned(),
            every: INTERVAL_DEFAULT,
            template: Table::from_iter([("name".to_owned(), name.into())]),
        }
    }

    #[test]
    fn identifies_a_registry_by_its_query_and_database_and_pipeline_names() {
        let ours = source("postgresql://r:old@h/shards", "SELECT 1", "{a}").id();
        assert_eq!(
            ours,
            source("postgresql://r:new@h/shards", "SELECT 1", "{a}").id()
        );
        for (postgres, query, name) in [
            ("postgresql://r:old@h/shards", "SELECT 2", "{a}"),
            // During an outage, earlier results from a different database must not be used.
            ("postgresql://r:old@h/tenants", "SELECT 1", "{a}"),
            ("postgresql://r:old@h2/shards", "SELECT 1", "{a}"),
            ("postgresql://r:old@h/shards", "SELECT 1", "b_{a}"),
        ] {
            assert_ne!(ours, source(postgres, query, name).id());
        }
    }

    #[test]
    fn discards_a_registry_row_once_no_pipeline_uses_it() {
        let id = |query| source("postgresql://h/shards", query, "{a}").id();
        let [old, new] = ["1", "2"].map(|value| row(&[("a", Some(value))]));
        let mut rows = DefiningRows::default();
        let running = rows.set("running", id("SELECT 1"), &old);
        drop(rows.set("removed", id("SELECT 1"), &old));
        rows.remove_unused();
        assert_eq!(rows.0.keys().collect::<Vec<_>>(), ["running"]);
        // If the query changes, existing pipelines use its new rows.
        let same = rows.set("running", id("SELECT 2"), &new);
        assert!(Arc::ptr_eq(&running, &same));
        assert_eq!(running.get(), (id("SELECT 2"), new));
    }

    #[test]
    fn a_value_from_a_registry_row_cannot_change_other_connection_parameters() {
        let text = "a?host=evil&user=b/c@d:e%20,\u{e4}";
        let row = row(&[("dbname", Some(text)), ("url", Some("host=h dbname=d"))]);
        let postgres = |template: &str| {
            let table = filled(&format!("postgres = {template:?}"), &row)?;
            let text = table["postgres"].as_str().expect("a text").to_owned();
            Ok::<_, String>(text)
        };
        let url = postgres("postgresql://walpost@db/{dbname}?sslmode=require").expect("filled");
        let conninfo = Conninfo::parse(&url, &|_| None).expect("a URL");
        assert_eq!(
            (conninfo.dbname(), conninfo.user(), &*conninfo.servers()),
            (text, "walpost", "db:5432")
        );
        assert_eq!(postgres("{url}"), Ok("host=h dbname=d".to_owned()));
        let error = postgres("host=h dbname={dbname}").expect_err("no URL");
        assert!(error.contains("expected a URL"), "{error}");
    }

    #[test]
    fn error_about_an_oversized_row_value_omits_the_value() {
        let long = "\u{7f}".repeat((64 << 10) + 1);
        let row = row(&[("v", Some(&long)), ("name", Some("a"))]);
        let error = filled("postgres = \"postgresql://u@h/{v}\"", &row).expect_err("too long");
        assert!(error.contains("has 65537 bytes"), "{error}");
        assert!(error.len() < 200, "{error}");
    }

    #[test]
    fn rejects_row_values_that_are_invalid_for_their_configuration_key() {
        let fill_error = |template: &str, value: &str| {
            let row = row(&[("v", Some(value)), ("name", Some("a"))]);
            let template = template.replace('\'', "\"");
            match filled(&template, &row) {
                Ok(table) => panic!("{template} with {value:?}: {table}"),
                Err(error) => error,
            }
        };
        for (template, values) in [
            (
                "postgres = 'postgresql://u@{v}/d'",
                &["/tmp", "@a", "a,b", "a:1", "%2Ftmp", "a?b", "a#b", ""][..],
            ),
            ("postgres = 'postgresql://u@[{v}]/d'", &["/tmp", "::1]"]),
            (
                "postgres = 'postgresql://u@/d?host={v}'",
                &["/tmp", "@a", "a&sslmode=disable"],
            ),
            (
                "postgres = 'postgresql://u@/d?host=/run/{v}'",
                &["..", "a/b", ""],
            ),
            (
                "postgres = 'postgresql://u@h/d?hostaddr={v}'",
                &["a", "/tmp"],
            ),
            ("postgres = 'postgresql://u@h:{v}/d'", &["", "0", "1,2"]),
            ("postgres = 'postgresql://{v}@h/d'", &["", "a\0b"]),
            ("postgres = 'postgresql://u:{v}@h/d'", &[""]),
            ("postgres = 'postgresql://u@h/{v}'", &[""]),
            (
                "postgres = '{v}'",
                &["host=/tmp", "service=x", "host=h passfile=/x"],
            ),
            (
                "tables = ['{v}.outbox']",
                &["*", "a?", "a.b", "a\"b", "a b", ""],
            ),
            ("tables = ['\\'{v}\\'.outbox']", &["a\"b", ""]),
            ("tables = ['{v}']", &["a.*", "a.b.c", ""]),
            ("table = '{v}.outbox'", &["other.outbox", "a\".\"b"]),
            (
                "topic = '{source.v}.{aggregatetype}'",
                &["a.b", "a/b", "{id}", ""],
            ),
            ("topic = '{source.v}'", &["a b", ""]),
            ("dead_letter_topic = 'dead.{v}'", &["a b", ""]),
            ("checkpoint = { topic = '{v}' }", &["a b", ""]),
            (
                "kafka = { 'bootstrap.servers' = '{v}' }",
                &["ssl://h:1", "h:1,/x", "h:x", ",", "[::1", ""],
            ),
            (
                "kafka = { 'bootstrap.servers' = '{v}:9092' }",
                &["h:1", "a,b", ""],
            ),
            ("kafka = { 'ssl.ca.location' = '{v}' }", &["/etc/ca"]),
        ] {
            for value in values {
                let error = fill_error(template, value);
                assert!(
                    error.contains("column v") && error.starts_with("template: "),
                    "{error}"
                );
            }
        }
    }

    #[test]
    fn accepts_valid_hosts_ports_tables_and_topics() {
        let row = row(&[
            ("host", Some("db-1.example.com")),
            ("v6", Some("::1")),
            ("port", Some("5433")),
            ("Schema", Some("Shop Nr. 1*")),
            ("table", Some("shop.\"out*\"")),
            ("brokers", Some("k1:9092,[::1]:9093,k3")),
            ("topic", Some("eu.shop")),
        ]);
        let table = filled(
            r#"
            postgres = "postgresql://u@{host}:{port},[{v6}]/d?port={port}"
            tables = ["{table}", "\"{Schema}\".outbox"]
            topic = "{source.topic}"
            dead_letter_topic = "{topic}.dead"
            kafka = { "bootstrap.servers" = "{brokers}" }
            "#,
            &row,
        );
        let expected: Table = r#"
            postgres = "postgresql://u@db%2D1%2Eexample%2Ecom:5433,[%3A%3A1]/d?port=5433"
            tables = ["shop.\"out*\"", "\"Shop Nr. 1*\".outbox"]
            topic = "eu.shop"
            dead_letter_topic = "eu.shop.dead"
            kafka = { "bootstrap.servers" = "k1:9092,[::1]:9093,k3" }
            "#
        .parse()
        .expect("TOML");
        assert_eq!(table, Ok(expected));
    }

    #[test]
    fn rejects_templates_that_let_rows_set_restricted_parameters() {
        for (template, says) in [
            ("postgres = 'postgresql://u@h/d?sslmode={x}'", "{x}"),
            ("postgres = 'postgresql://u@h/d?options={x}'", "{x}"),
            ("postgres = 'postgresql://u@h/d?passfile=/home/{x}'", "{x}"),
            ("postgres = 'postgresql://u@h/d?{x}=y'", "{x}"),
            ("postgres = 'host={x} user=u'", "expected a URL"),
            (
                "kafka = { 'security.protocol' = '{x}' }",
                "security.protocol",
            ),
            ("dead_letter_topic = '{x}'", "'{x}.walpost'"),
            ("checkpoint = { topic = '{x}{y}' }", "checkpoint.topic"),
            ("checkpoint = { topic = '{x}._-{y}' }", "a letter or digit"),
        ] {
            let text = format!("name = '{{x}}'\n{template}");
            let error = check_template(&text.parse().expect("TOML")).expect_err(template);
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn error_names_the_column_that_is_missing_or_null() {
        let row = row(&[("name", Some("a")), ("slot_name", None)]);
        for (template, says) in [
            (
                "name = '{title}'",
                "name: the query has no column title; its columns are name, slot_name",
            ),
            ("slot = '{slot_name}'", "slot: column slot_name is NULL"),
            ("slot = 'x{name'", "unmatched brace"),
            ("slot = 'x}'", "unmatched brace"),
            (
                "topic = '{source.title}'",
                "topic: the query has no column title",
            ),
        ] {
            let error = filled(template, &row).expect_err(template);
            assert!(error.contains(says), "{error}");
        }
        for (template, says) in [
            (
                "name = '{x}'\npassword_command = ['/bin/sh', '-c', 'echo {x}']",
                "password_command",
            ),
            ("slot = '{x}'", "template: name: expected"),
        ] {
            let error = check_template(&template.parse().expect("TOML")).expect_err(template);
            assert!(error.contains(says), "{error}");
        }
    }
}
