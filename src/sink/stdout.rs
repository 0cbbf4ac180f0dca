//! A sink that writes one JSON object per line to standard output, for trying out Walpost without
//! Kafka.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, makedev};
use rustix::io::Errno;
use rustix::stdio::stdout;
use serde_json::{Map, Value, json};

use super::{Produced, Sink, SinkError};
use crate::delivery::failure::DeliveryFailure;
use crate::delivery::watermark::{Deliveries, Tag};
use crate::escape;
use crate::file_error;
use crate::outbox::Record;

/// Approximate size of the chunks in which lines are written.
const CHUNK_BYTES: usize = 64 << 10;
/// How long to wait before retrying a write to a nonblocking standard output.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Collects records as lines, and passes them to a separate thread that writes them. If the program
/// that reads standard output stops reading, only that thread blocks. Records count as delivered
/// once they are written. The pipeline's window limits the number and size of the records queued
/// for the thread.
pub(crate) struct StdoutSink {
    lines: Batch,
    writer: Sender<Batch>,
}

/// Records formatted as lines of JSON, and their tags.
#[derive(Default)]
struct Batch {
    text: Vec<u8>,
    tags: Vec<Tag>,
}

impl StdoutSink {
    /// Creates a sink that reports deliveries to `deliveries`.
    ///
    /// # Errors
    /// Returns an error if standard output is closed, or if the operating system can't create a
    /// thread.
    pub(crate) fn new(deliveries: Arc<Deliveries>) -> Result<Self, SinkError> {
        if was_closed() {
            return Err(SinkError::StdoutClosed);
        }
        let (writer, batches) = channel();
        let thread = thread::Builder::new().name("stdout".to_owned());
        // The thread is never joined, because a blocked write may not return before the process
        // exits.
        thread
            .spawn(move || write_batches(&batches, &deliveries))
            .map_err(|error| stdout_error(&error))?;
        Ok(Self {
            lines: Batch::default(),
            writer,
        })
    }
}

impl Sink for StdoutSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        serde_json::to_writer(&mut self.lines.text, &to_json(record))
            .map_err(|error| stdout_error(&error.into()))?;
        self.lines.text.push(b'\n');
        self.lines.tags.push(tag);
        if self.lines.text.len() >= CHUNK_BYTES {
            self.flush(true)?;
        }
        Ok(Produced::Taken)
    }

    fn flush(&mut self, _busy: bool) -> Result<(), SinkError> {
        if self.lines.tags.is_empty() {
            return Ok(());
        }
        // Sending fails only if the thread has ended, which it does after it has reported a failure
        // to `deliveries`.
        let _ = self.writer.send(std::mem::take(&mut self.lines));
        Ok(())
    }
}

/// Writes batches until the sink is dropped or writing fails.
fn write_batches(batches: &Receiver<Batch>, deliveries: &Deliveries) {
    for batch in batches {
        if let Err(error) = write(&batch.text) {
            deliveries.report_failure(DeliveryFailure {
                reason: stdout_error(&error).to_string(),
                permanent: true,
                refused: None,
                refused_until: None,
            });
            return;
        }
        deliveries.delivered(batch.tags);
    }
}

/// Writes the lines, with control characters escaped as in JSON, so that a terminal does not
/// interpret them. Does not use `std::io::stdout`, which silently discards output if the descriptor
/// is not writable.
fn write(lines: &[u8]) -> io::Result<()> {
    let lines = String::from_utf8_lossy(lines);
    let lines = escape::in_json(&lines);
    let mut rest = lines.as_bytes();
    while !rest.is_empty() {
        match rustix::io::write(stdout(), rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => rest = &rest[written..],
            Err(Errno::INTR) => {}
            // Another process that shares this descriptor may have made it nonblocking.
            Err(Errno::AGAIN) => thread::sleep(RETRY_INTERVAL),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns whether standard output was closed when the process started. In that case, Rust's
/// standard library has opened /dev/null for reading and writing in place of standard output. A
/// shell's `> /dev/null` opens /dev/null for writing only.
fn was_closed() -> bool {
    let is_null = fstat(stdout()).is_ok_and(|found| {
        FileType::from_raw_mode(found.st_mode) == FileType::CharacterDevice
            && found.st_rdev == makedev(1, 3)
    });
    is_null && fcntl_getfl(stdout()).is_ok_and(|flags| flags.contains(OFlags::RDWR))
}

fn stdout_error(error: &io::Error) -> SinkError {
    SinkError::Stdout(file_error::reason(error))
}

/// Returns the record as JSON. A value that is not valid UTF-8 is encoded in base64, in a member
/// whose name ends in `_base64`.
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
