//! Converts configurations of other tools to walpost.toml, with the origin of each line and a
//! report about the remaining properties.
//!
//! [`source`] reads the file in any of its formats, and returns each property once. The modules
//! that write lines of walpost.toml request their properties: [`connector`], [`chain`] and
//! [`router`], [`converters`], [`producer`]. [`known`] handles the remaining properties, or reports
//! them as unknown. [`document`] writes the lines, [`report`] collects the findings for the user,
//! and [`switch_over`] contains the commands. Pure: no server is queried, and nothing except the
//! given text is read.

mod chain;
mod connector;
mod converters;
mod document;
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

/// Imports the configuration of a Debezium connector. `worker` contains the properties of the Kafka
/// Connect worker that runs it.
///
/// # Errors
/// Returns an error if the text is not a configuration, or is for something that Walpost does not
/// support.
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
    chain.others(&topics.collect::<Vec<_>>(), report);

    let mut document = Document::default();
    producer::read(source, &mut document.kafka, report);
    let mut common = Section::default();
    tokens::need_program(source, &document.kafka, &mut common, report);
    let roles = connector::connection(source, &mut common, report);
    connector::snapshot(source, &mut common, report);
    let formats = converters::read(source, &mut common, report);
    router::read(&chain, source, formats, &mut common, report);
    connector::others(source, prefix.as_ref(), &mut common, report);
    connector::heartbeat(source, &mut common, report);
    let slot = connector::slot(source, report);
    let mut slots = Vec::new();
    let base = plain(source.name.as_deref().unwrap_or_default());
    for table in &tables {
        let name = pipeline_name(&base, &table.name, tables.len() > 1, &document);
        let mut section = Section::default();
        section.set(
            "name",
            text(&name),
            "Walpost's slot and publication are walpost_NAME",
        );
        section.set("table", text(&table.in_sql()), table.from.clone());
        let mut own = format!("walpost_{name}");
        if own == slot {
            own.push_str("_new");
            section.set("slot", text(&own), "walpost_NAME is Debezium's");
        }
        slots.push(own);
        document.pipelines.push(section.append(&common));
    }
    if tables.len() > 1 {
        let says = "become one pipeline each, and each pipeline delivers in commit order. Debezium has one order for all of \
         them: if two pipelines share a topic, the order between their events can differ";
        report.different("several tables", says);
    }
    report.different(
        "header walpost-position",
        "is added to every record, after Debezium's headers",
    );
    known::report_remaining(source, report);

    let connector = source.name.as_deref();
    let of = match (source.kind, connector) {
        (Kind::Connect, Some(name)) => format!("the connector {name}"),
        (Kind::Connect, None) => "a connector".to_owned(),
        (Kind::Server, _) => "Debezium Server's application.properties".to_owned(),
    };
    document.head.push(format!(
        "Made by walpost import debezium from {of}. The comment above each line names the property that it was converted from."
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

/// # Errors
/// Returns an error if the connector reads another database.
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

/// Converts a name to one that consists only of a-z, 0-9 and _.
fn plain(name: &str) -> String {
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

/// Returns a name that no pipeline of the document uses.
fn pipeline_name(base: &str, table: &str, are_several: bool, document: &Document) -> String {
    const MAX: usize = 48;
    let name = match (base, are_several) {
        ("", true) => plain(table),
        (base, true) => format!("{base}_{}", plain(table)),
        (base, false) => base.to_owned(),
    };
    let name = if name.is_empty() { "outbox" } else { &name };
    // The name is ASCII, so it can be cut at any byte.
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
