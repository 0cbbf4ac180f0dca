//! Converts other tools' configuration to walpost.toml. A comment above each line names the
//! property from which the line was derived, and a report lists how each property was handled.
//!
//! [`source`] reads the file, in any supported format. The modules [`connector`], [`chain`],
//! [`router`], [`converters`] and [`producer`] request properties from the source and convert them
//! to lines of walpost.toml. [`known`] handles the remaining properties, or reports them as
//! unknown. [`document`] writes the lines, [`report`] collects the findings for the user, and
//! [`switch_over`] lists the commands that replace the other tool with Walpost. These modules do no
//! I/O: they neither connect to a server nor read other files.

mod chain;
mod connector;
mod converters;
mod document;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod jaas;
mod java_regex;
mod known;
mod producer;
mod property;
pub(crate) mod report;
mod router;
pub(crate) mod source;
mod switch_over;
mod tokens;

use document::{Document, Section, text};
use report::{Finding, Report};
use source::{ImportError, Kind, Source};
use switch_over::SwitchOver;

/// The result of an import.
#[derive(Debug)]
pub(crate) struct Imported {
    /// The contents of walpost.toml.
    pub(crate) toml: String,
    pub(crate) findings: Vec<Finding>,
}

/// Imports the configuration of a Debezium connector. `worker` is the properties file of the Kafka
/// Connect worker that runs the connector.
///
/// # Errors
/// Returns an error if the text is not a connector configuration, or if Walpost can't replace the
/// connector.
pub(crate) fn debezium(given: &str, worker: Option<&str>) -> Result<Imported, ImportError> {
    let mut report = Report::default();
    let report = &mut report;
    let mut source = Source::read(given, report)?;
    if let Some(worker) = worker {
        source.add_worker(worker)?;
    }
    let source = &mut source;
    check_postgres(source)?;
    let chain = chain::read(source, report)?;
    let prefix = connector::take_or_obsolete(source, "topic.prefix", report);
    let prefix_text = prefix.as_ref().map(|prefix| prefix.value.trim());
    let tables = connector::tables(source, prefix_text, chain.filter.as_ref(), report);
    let topics = tables.iter().map(|table| {
        format!(
            "{}.{}.{}",
            prefix_text.unwrap_or_default(),
            table.schema,
            table.name
        )
    });
    chain.report_others(&topics.collect::<Vec<_>>(), report);

    let mut document = Document::default();
    producer::read(source, &mut document.kafka, report);
    let mut common = Section::default();
    tokens::add_program_placeholder(source, &document.kafka, &mut common, report);
    let roles = connector::connection(source, &mut common, report);
    connector::snapshot(source, &mut common, report);
    let formats = converters::read(source, &mut common, report);
    router::read(&chain, source, formats, &mut common, report);
    connector::remaining(source, prefix.as_ref(), &mut common, report);
    connector::heartbeat(source, &mut common, report);
    let slot = connector::slot(source, report);
    let mut slots = Vec::new();
    let base = plain_name(source.name.as_deref().unwrap_or_default());
    for table in &tables {
        let name = pipeline_name(&base, &table.name, tables.len() > 1, &document);
        let mut section = Section::default();
        section.set(
            "name",
            text(&name),
            "Walpost's slot and publication are named walpost_NAME",
        );
        section.set("table", text(&table.in_sql()), table.from.clone());
        let mut own = format!("walpost_{name}");
        if own == slot {
            own.push_str("_new");
            section.set("slot", text(&own), "Debezium already uses walpost_NAME");
        }
        slots.push(own);
        document.pipelines.push(section.append(&common));
    }
    if tables.len() > 1 {
        let message = "the tables become separate pipelines, each of which delivers its events in commit order. Debezium \
         delivers the events of all tables in commit order: if two pipelines share a topic, their events can be interleaved \
         differently";
        report.different("several tables", message);
    }
    report.different(
        "header walpost-position",
        "this header is added to every record, after Debezium's headers",
    );
    known::report_remaining(source, report);

    let connector = source.name.as_deref();
    let origin = match (source.kind, connector) {
        (Kind::Connect, Some(name)) => format!("the connector {name}"),
        (Kind::Connect, None) => "a connector".to_owned(),
        (Kind::Server, _) => "Debezium Server's application.properties".to_owned(),
    };
    document.head.push(format!(
        "Created by walpost import debezium from {origin}. The comment above each line names the property from which the line \
         was converted."
    ));
    let switch_over = SwitchOver {
        kind: source.kind,
        connector,
        roles: &roles,
        slot: &slot,
        slots: &slots,
        is_initial: document.has_line("snapshot", "\"initial\""),
    };
    document.tail = switch_over.comments();
    Ok(Imported {
        toml: document.write(),
        findings: std::mem::take(report).finish(),
    })
}

/// Checks that the connector is Debezium's PostgreSQL connector.
///
/// # Errors
/// Returns an error if the connector does not read PostgreSQL.
fn check_postgres(source: &mut Source) -> Result<(), ImportError> {
    let class = source
        .raw("connector.class")
        .map(|class| class.value)
        .unwrap_or_default();
    let short = class.trim().rsplit('.').next().unwrap_or_default();
    match short {
        "PostgresConnector" => Ok(()),
        _ => Err(ImportError::OtherConnector(class)),
    }
}

/// Converts a name to a pipeline name, which consists only of a-z, 0-9 and _.
fn plain_name(name: &str) -> String {
    let mut plain = String::new();
    for c in name.chars() {
        match c.to_ascii_lowercase() {
            c if c.is_ascii_alphanumeric() => plain.push(c),
            _ if plain.is_empty() || plain.ends_with('_') => {}
            _ => plain.push('_'),
        }
    }
    plain.trim_end_matches('_').to_owned()
}

/// Returns a name that no other pipeline in the document uses.
fn pipeline_name(base: &str, table: &str, are_several: bool, document: &Document) -> String {
    const MAX: usize = 48;
    let name = match (base, are_several) {
        ("", true) => plain_name(table),
        (base, true) => format!("{base}_{}", plain_name(table)),
        (base, false) => base.to_owned(),
    };
    let name = if name.is_empty() { "outbox" } else { &name };
    // The name is ASCII, so it can be truncated at any byte.
    let cut = |name: &str, length: usize| {
        name.get(..length.min(name.len()))
            .unwrap_or_default()
            .to_owned()
    };
    let first = cut(name, MAX);
    let is_taken = |name: &str| document.has_line("name", &text(name));
    let others = (2..).map(|number| {
        let number = format!("_{number}");
        cut(name, MAX - number.len()) + &number
    });
    let found = std::iter::once(first.clone())
        .chain(others)
        .find(|name| !is_taken(name));
    found.unwrap_or(first)
}
