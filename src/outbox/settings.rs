//! Which columns mean what: the part of a pipeline's configuration that makes records.

use super::template::Template;

/// How records are made of rows. The defaults take a Debezium outbox table as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutboxSettings {
    /// The topic. A null column in it is an error.
    pub topic: Template,
    /// The key. Where all its columns are null, the record has no key.
    pub key: Template,
    /// The column with the value.
    pub payload: String,
    /// What a null payload becomes.
    pub null_payload: NullPayload,
    /// Names and values of headers, in order. Where all columns of a value are null, the header
    /// has no value.
    pub headers: Vec<(String, Template)>,
    /// The column with more headers.
    pub headers_column: HeadersColumn,
    /// The column with the record's timestamp.
    pub timestamp: Option<String>,
    /// The column with the record's partition.
    pub partition: Option<String>,
}

/// What a null payload becomes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum NullPayload {
    /// A value of no bytes.
    #[default]
    Empty,
    /// No value: a compacted topic then forgets the key.
    Tombstone,
}

/// The JSON column of which each member becomes a header.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum HeadersColumn {
    /// `headers`, if the table has such a column of type json or jsonb.
    #[default]
    IfPresent,
    /// The column of this name.
    Named(String),
    /// None.
    Off,
}

impl Default for OutboxSettings {
    fn default() -> Self {
        let template = |text: &str| text.parse().expect("a default template is a template");
        Self {
            topic: template("outbox.event.{aggregatetype}"),
            key: template("{aggregateid}"),
            payload: "payload".to_owned(),
            null_payload: NullPayload::default(),
            headers: vec![("id".to_owned(), template("{id}"))],
            headers_column: HeadersColumn::default(),
            timestamp: None,
            partition: None,
        }
    }
}
