//! Standard output as a sink: one JSON object a line, for trying without Kafka.

use std::io::Write;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::{Produced, Sink, SinkError};
use crate::delivery::watermark::{Deliveries, Tag};
use crate::escape;
use crate::outbox::Record;

/// Gathers records as lines, writes them when nothing more is at hand, and reports them delivered
/// once they are flushed.
pub(crate) struct StdoutSink {
    deliveries: Arc<Deliveries>,
    lines: Vec<u8>,
    gathered: Vec<Tag>,
}

impl StdoutSink {
    /// Reports to `deliveries`.
    #[must_use]
    pub(crate) fn new(deliveries: Arc<Deliveries>) -> Self {
        Self {
            deliveries,
            lines: Vec::new(),
            gathered: Vec::new(),
        }
    }
}

impl Sink for StdoutSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        serde_json::to_writer(&mut self.lines, &to_json(record)).map_err(failed)?;
        self.lines.push(b'\n');
        self.gathered.push(tag);
        Ok(Produced::Taken)
    }

    fn flush(&mut self, _busy: bool) -> Result<(), SinkError> {
        if self.gathered.is_empty() {
            return Ok(());
        }
        self.write().map_err(failed)?;
        self.lines.clear();
        self.deliveries.delivered(self.gathered.drain(..));
        Ok(())
    }
}

impl StdoutSink {
    /// Writes the lines, so that they mean what they meant and a terminal obeys nothing in them.
    #[expect(clippy::disallowed_methods, reason = "records are what it prints")]
    fn write(&self) -> std::io::Result<()> {
        let lines = String::from_utf8_lossy(&self.lines);
        let mut out = std::io::stdout().lock();
        out.write_all(escape::in_json(&lines).as_bytes())?;
        out.flush()
    }
}

fn failed(error: impl std::fmt::Display) -> SinkError {
    SinkError::Stdout(error.to_string())
}

/// The record as JSON. What is not UTF-8 stands in base64 under a name that says so.
fn to_json(record: &Record<'_>) -> Value {
    let mut object = Map::new();
    object.insert("topic".to_owned(), json!(record.topic));
    object.insert("partition".to_owned(), json!(record.partition));
    object.insert("timestamp".to_owned(), json!(record.timestamp_millis));
    insert(&mut object, "key", record.key);
    let mut headers = Map::new();
    record
        .headers
        .iter()
        .for_each(|(name, value)| insert(&mut headers, name, value));
    object.insert("headers".to_owned(), Value::Object(headers));
    insert(&mut object, "value", record.payload);
    Value::Object(object)
}

fn insert(object: &mut Map<String, Value>, name: &str, bytes: Option<&[u8]>) {
    match bytes.map(std::str::from_utf8) {
        None => object.insert(name.to_owned(), Value::Null),
        Some(Ok(text)) => object.insert(name.to_owned(), json!(text)),
        Some(Err(_)) => {
            let encoded = bytes.map(|bytes| STANDARD.encode(bytes));
            object.insert(format!("{name}_base64"), json!(encoded))
        }
    };
}
