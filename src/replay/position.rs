//! Finds the row whose record has a given WAL position. The table does not contain the position,
//! but records in Kafka do.

use std::fmt;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::postgres::sql::{escape_identifier, escape_literal};

use super::ReplayError;
use crate::kafka::reader::{ReadError, TopicReader};
use crate::model::lsn::Position;
use crate::outbox::headers::POSITION_HEADER;
use crate::outbox::route::is_topic_name;
use crate::outbox::settings::{OutboxSettings, Topic};
use crate::outbox::template::{Part, Template};
use crate::pipeline::settings::{PipelineSettings, SinkSettings};
use crate::postgres::catalog::{Catalog, Statement};
use crate::postgres::table::TableName;

/// How long to wait for open transactions in a topic.
const OPEN_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of characters of an ID that an error quotes.
const QUOTED_ID_CHARS: usize = 100;

/// Returns the ID of the row whose record has the given position.
///
/// # Errors
/// Returns an error if no record has the position, or if records with different IDs have it.
pub(super) async fn find_row_id(
    settings: &PipelineSettings,
    catalog: &Catalog,
    table: &TableName,
    position: Position,
    flag: &'static str,
) -> Result<String, ReplayError> {
    let no_record = |reason: String| ReplayError::NoRecord {
        position,
        flag,
        reason,
    };
    let SinkSettings::Kafka {
        properties,
        credentials,
        ..
    } = &settings.sink
    else {
        return Err(no_record(
            "the sink is stdout, which can't be read".to_owned(),
        ));
    };
    let Some((header, _)) = settings.outbox.id_header() else {
        return Err(no_record(
            "records have no header with the event's id".to_owned(),
        ));
    };
    let topics = topics(catalog, table, &settings.outbox).await?;
    let name = format!("walpost-replay-{}", settings.name);
    let reader = TopicReader::new(properties, credentials, &name).map_err(ReadError::from)?;
    let search = Search {
        reader: Arc::new(reader),
        header: header.to_owned(),
        outbox: settings.outbox.clone(),
        topics,
        position,
    };
    let (reader, topics) = (Arc::clone(&search.reader), search.topics.join(", "));
    // A failure of the task itself, such as a panic, also ends the command with an error.
    let found = tokio::task::spawn_blocking(move || search.run()).await;
    let found = found.map_err(|error| ReadError::from(std::io::Error::other(error)))?;
    let found = match found {
        Ok(found) => found,
        Err(error) => return Err(reader.explain(error).await.into()),
    };
    match (found.first, found.other) {
        (Some(first), None) => Ok(first.id),
        (Some(first), Some(other)) => Err(ReplayError::AmbiguousPosition {
            position,
            flag,
            first: first.to_string(),
            other: other.to_string(),
        }),
        (None, _) => Err(no_record(format!(
            "no record in these topics has this position, or the record has expired: {topics}"
        ))),
    }
}

/// Returns the topics to which rows of the table are sent.
async fn topics(
    catalog: &Catalog,
    table: &TableName,
    outbox: &OutboxSettings,
) -> Result<Vec<String>, ReplayError> {
    let topic = match &outbox.topic {
        Topic::Template(template) => expression(template, table),
        Topic::Route(route) => as_text_sql(&route.column),
    };
    let columns = format!("DISTINCT {topic} AS topic");
    let rest = format!(" WHERE {topic} IS NOT NULL ORDER BY topic");
    let version = catalog.table_version(table).await?;
    let locked = catalog.lock_table(&version, Statement::Select).await?;
    let mut rows = catalog.select(locked, &columns, &rest).await?;
    let mut names = Vec::new();
    while let Some(row) = rows.next().await? {
        names.extend(row.get(0).map(str::to_owned));
    }
    if let Topic::Route(route) = &outbox.topic {
        names = names
            .iter()
            .map(|text| route.topic(text).into_owned())
            .collect();
        names.sort_unstable();
        names.dedup();
    }
    // Reserved topics contain no events.
    names.retain(|name| is_topic_name(name) && outbox.reserved_topics.find(name).is_none());
    Ok(names)
}

/// Returns an SQL expression for a column's value as text, or NULL. Unlike a cast, `concat` calls
/// only the output function of the type.
fn as_text_sql(column: &str) -> String {
    let column = escape_identifier(column);
    format!("CASE num_nulls({column}) WHEN 0 THEN concat({column}) END")
}

/// Returns an SQL expression for the template's value, which is NULL if any of the template's
/// columns is NULL.
fn expression(template: &Template, table: &TableName) -> String {
    let parts = template.parts().iter().map(|part| match part {
        Part::Literal(text) => escape_literal(text),
        Part::Column(name) | Part::Time(name) => as_text_sql(name),
        Part::TableSchema => escape_literal(&table.schema),
        Part::TableName => escape_literal(&table.name),
    });
    parts.collect::<Vec<_>>().join(" || ")
}

struct Search {
    reader: Arc<TopicReader>,
    header: String,
    outbox: OutboxSettings,
    topics: Vec<String>,
    position: Position,
}

/// A record whose header contains the requested position.
#[derive(Debug, PartialEq, Eq)]
struct FoundRecord {
    id: String,
    topic: String,
    partition: i32,
    offset: i64,
}

impl fmt::Display for FoundRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id: String = self.id.chars().take(QUOTED_ID_CHARS).collect();
        write!(
            f,
            "{id:?} (topic {:?}, partition {}, offset {})",
            self.topic, self.partition, self.offset
        )
    }
}

/// The records that have the requested position. Any principal with WRITE on a topic can produce a
/// record with the position of one event and the ID of another event. If Walpost used the first
/// record that it finds, such a record in another partition could cause rows to be omitted from the
/// replay.
#[derive(Debug, Default, PartialEq, Eq)]
struct FoundRecords {
    first: Option<FoundRecord>,
    /// The first record whose ID differs from that of `first`.
    other: Option<FoundRecord>,
}

impl FoundRecords {
    /// Adds a record. Returns `Break` once records with different IDs have been found, because
    /// further records can't change the result.
    fn add(&mut self, record: FoundRecord) -> ControlFlow<()> {
        match &self.first {
            None => self.first = Some(record),
            Some(first) if first.id != record.id => {
                self.other = Some(record);
                return ControlFlow::Break(());
            }
            // At-least-once delivery can repeat a record.
            Some(_) => {}
        }
        ControlFlow::Continue(())
    }
}

impl Search {
    /// Reads all topics to their ends, unless records with different IDs are found.
    fn run(&self) -> Result<FoundRecords, ReadError> {
        let reader = &self.reader;
        let deadline = Instant::now() + OPEN_TRANSACTION_TIMEOUT;
        let mut found = FoundRecords::default();
        for topic in &self.topics {
            let Some(partitions) = reader.partitions(topic)? else {
                continue;
            };
            let spans = reader.spans(topic, &partitions, None, deadline)?;
            reader.read(topic, &spans, |message| {
                let value = |name: &str| {
                    let mut headers = message.headers();
                    headers.find(|(header, _)| *header == name)?.1
                };
                if value(POSITION_HEADER) != Some(&self.position.text()[..]) {
                    return Ok(ControlFlow::Continue(()));
                }
                let id = value(&self.header).and_then(|id| self.outbox.header_text(id));
                let Some(id) = id else {
                    return Ok(ControlFlow::Continue(()));
                };
                Ok(found.add(FoundRecord {
                    id,
                    topic: message.topic().to_owned(),
                    partition: message.partition(),
                    offset: message.offset(),
                }))
            })?;
            if found.other.is_some() {
                break;
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_records_with_the_same_position_and_different_ids() {
        let record = |id: &str, offset| FoundRecord {
            id: id.to_owned(),
            topic: "orders".to_owned(),
            partition: 1,
            offset,
        };
        let mut found = FoundRecords::default();
        assert_eq!(found.add(record("a", 3)), ControlFlow::Continue(()));
        assert_eq!(found.add(record("a", 5)), ControlFlow::Continue(()));
        assert_eq!(found.first, Some(record("a", 3)));
        assert_eq!(found.other, None);
        assert_eq!(found.add(record("b", 7)), ControlFlow::Break(()));
        assert_eq!(found.other, Some(record("b", 7)));
        assert_eq!(
            record("b", 7).to_string(),
            "\"b\" (topic \"orders\", partition 1, offset 7)"
        );
        assert!(record(&"b".repeat(10_000), 7).to_string().len() < 200);
    }

    #[test]
    fn converts_a_template_to_an_sql_expression() {
        let table = TableName::from_catalog("it's", "outbox");
        let sql = |text: &str| expression(&text.parse().expect("a template"), &table);
        assert_eq!(sql("events"), "'events'");
        assert_eq!(
            sql("o'x.{kind}.{a\"b}"),
            "'o''x.' || CASE num_nulls(\"kind\") WHEN 0 THEN concat(\"kind\") END || '.' || \
             CASE num_nulls(\"a\"\"b\") WHEN 0 THEN concat(\"a\"\"b\") END"
        );
        assert_eq!(
            sql("{table.schema}-{table.name}"),
            "'it''s' || '-' || 'outbox'"
        );
    }
}
