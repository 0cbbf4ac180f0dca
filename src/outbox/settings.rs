//! Which columns mean what: the part of a pipeline's configuration that makes records.

use super::template::{Part, Template};

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

fn template(text: &str) -> Template {
    text.parse().expect("a default template is a template")
}

fn default_headers() -> Vec<(String, Template)> {
    vec![("id".to_owned(), template("{id}"))]
}

impl OutboxSettings {
    /// Nobody has said which headers there are to be.
    #[must_use]
    pub fn has_default_headers(&self) -> bool {
        self.headers == default_headers()
    }

    /// The header that tells events apart, and its template: `id`, or else the first that is the column
    /// `id` and nothing more.
    #[must_use]
    pub fn id_header(&self) -> Option<(&str, &Template)> {
        let is_id =
            |template: &Template| matches!(template.parts(), [Part::Column(name)] if name == "id");
        let mut headers = self.headers.iter();
        let named = headers.clone().find(|(name, _)| name == "id");
        let (name, template) = named.or_else(|| headers.find(|(_, template)| is_id(template)))?;
        Some((name, template))
    }
}

impl Default for OutboxSettings {
    fn default() -> Self {
        Self {
            topic: template("outbox.event.{aggregatetype}"),
            key: template("{aggregateid}"),
            payload: "payload".to_owned(),
            null_payload: NullPayload::default(),
            headers: default_headers(),
            headers_column: HeadersColumn::default(),
            timestamp: None,
            partition: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(headers: &[(&str, &str)]) -> OutboxSettings {
        let headers = headers.iter().map(|(name, template)| {
            let template = template.parse().expect("a template");
            ((*name).to_owned(), template)
        });
        OutboxSettings {
            headers: headers.collect(),
            ..OutboxSettings::default()
        }
    }

    #[test]
    fn header_with_the_id_is_found_by_its_name_or_by_its_column() {
        let check = |headers: &[(&str, &str)], expected: Option<&str>| {
            let settings = with(headers);
            let found = settings.id_header().map(|(name, _)| name);
            assert_eq!(found, expected, "{headers:?}");
        };
        check(&[("id", "{id}")], Some("id"));
        check(&[("event", "{id}"), ("id", "{tenant}-{id}")], Some("id"));
        check(&[("type", "{type}"), ("event", "{id}")], Some("event"));
        check(&[("type", "{type}"), ("event", "x{id}")], None);
        check(&[], None);
    }
}
