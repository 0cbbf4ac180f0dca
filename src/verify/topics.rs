//! Reads the records of the topics.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::Instant;

use tracing::warn;

use super::context::{Place, Topic};
use super::entry::{Entry, EntryKind, Record};
use super::report::{Finding, RecordLocation};
use super::spill::{Journal, Spill, hash};
use super::table::hash_of_key;
use super::{Reporter, VerifyError};
use crate::kafka::reader::{ReadError, ReadRecord, Span, TopicReader};
use crate::model::lsn::{Lsn, Position};
use crate::outbox::headers::{POSITION_HEADER, REPLAY_HEADER};
use crate::progress::Progress;

/// Progress is updated each time this many records have been read.
const PROGRESS_RECORDS: u64 = 1024;

/// The result of reading the topics.
pub(super) struct Read {
    pub(super) topics: Vec<Topic>,
    pub(super) places: Vec<Place>,
    /// Records of transactions that committed at or before this LSN may have expired.
    pub(super) complete_after: Lsn,
}

/// A plan for reading the topics.
pub(super) struct Plan<'p> {
    pub(super) reader: &'p TopicReader,
    /// The header that contains the event's ID.
    pub(super) id: &'p str,
    /// Records produced before this time, in milliseconds since 1970, are not read.
    pub(super) since: Option<i64>,
    /// Whether records contain the time at which they were produced.
    pub(super) is_production_time: bool,
    /// The time until which to wait for open transactions to end.
    pub(super) deadline: Instant,
}

/// The part of a topic to read.
struct Part {
    number: u32,
    name: String,
    spans: Vec<Span>,
}

impl Plan<'_> {
    /// Reads the topics. A topic that does not exist is treated as empty.
    pub(super) fn read(
        &self,
        names: Vec<String>,
        entries: &mut Spill,
        journal: &mut Journal,
        reporter: &mut Reporter<'_>,
    ) -> Result<Read, VerifyError> {
        let mut read = Read {
            topics: Vec::new(),
            places: Vec::new(),
            complete_after: Lsn::ZERO,
        };
        let mut parts = Vec::new();
        for (number, name) in (0..).zip(names) {
            let spans = match self.reader.partitions(&name).map_err(ReadError::from)? {
                Some(partitions) => self
                    .reader
                    .spans(&name, &partitions, self.since, self.deadline)
                    .map_err(ReadError::from)?,
                None => {
                    reporter.add_note(format!("topic {name:?} does not exist"));
                    Vec::new()
                }
            };
            read.topics.push(Topic {
                name: name.clone(),
                is_hidden: spans.iter().any(|span| span.is_hidden),
                expired_before: None,
            });
            parts.push(Part {
                number,
                name,
                spans,
            });
        }
        let spans = parts.iter().flat_map(|part| &part.spans);
        let offsets = spans.map(|span| u64::try_from(span.end - span.start).unwrap_or(0));
        let mut progress = Progress::new("records read", Some(offsets.sum()));
        let mut collector = RecordCollector {
            id: self.id,
            entries,
            journal,
            bytes: Vec::new(),
        };
        for part in &parts {
            self.read_one(part, &mut read, &mut collector, &mut progress, reporter)?;
        }
        progress.advance(reporter.counts.records % PROGRESS_RECORDS);
        progress.finish();
        Ok(read)
    }

    fn read_one(
        &self,
        part: &Part,
        read: &mut Read,
        collector: &mut RecordCollector<'_>,
        progress: &mut Progress,
        reporter: &mut Reporter<'_>,
    ) -> Result<(), VerifyError> {
        let Part {
            number,
            name,
            spans,
        } = part;
        let mut places = HashMap::new();
        for span in spans {
            let place = Place {
                topic: *number,
                partition: span.partition,
            };
            // The partition number can't overflow in practice, because brokers don't support that
            // many partitions.
            let number = u32::try_from(read.places.len()).unwrap_or(u32::MAX);
            places.insert(span.partition, (number, FirstRecord::default()));
            read.places.push(place);
        }
        self.reader.read(name, spans, |message| {
            let Some((place, first)) = places.get_mut(&message.partition()) else {
                return Ok(ControlFlow::Continue(()));
            };
            let position = collector.add_record(message, *place, reporter)?;
            first.observe(message, position);
            if reporter.counts.records.is_multiple_of(PROGRESS_RECORDS) {
                progress.advance(PROGRESS_RECORDS);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        for span in spans.iter().filter(|span| span.is_cut) {
            let first = places.get(&span.partition).map(|(_, first)| *first);
            self.adjust_for_removed_records(span, first.unwrap_or_default(), *number, read);
        }
        if spans.iter().any(|span| span.is_cut) {
            reporter.add_note(format!(
                "the first records of topic {name:?} have expired or were deleted: rows whose records may have been \
                 among them are counted as expired, and transactions that may be incomplete are not searched for gaps"
            ));
        }
        if spans.iter().any(|span| span.is_hidden) {
            warn!(
                topic = name,
                "an open transaction in the topic hides the records after it"
            );
            reporter.add_note(format!(
                "topic {name:?} has an open transaction: events that it hides are counted as pending"
            ));
        }
        Ok(())
    }

    /// Adjusts the result for records that were removed from the beginning of the partition.
    fn adjust_for_removed_records(
        &self,
        span: &Span,
        first: FirstRecord,
        topic: u32,
        read: &mut Read,
    ) {
        // The removed records precede the first remaining record. If no record remains, the
        // transactions and times of the removed records are unknown, so assume the latest possible
        // values.
        read.complete_after = match (span.start < span.end, first.commit) {
            (true, Some(commit)) => read.complete_after.max(commit),
            _ => Lsn(u64::MAX),
        };
        let expired_before = match first.produced {
            Some(produced) if self.is_production_time => produced,
            _ if self.is_production_time => i64::MAX,
            _ => return,
        };
        let topic = &mut read.topics[topic as usize];
        topic.expired_before = topic.expired_before.max(Some(expired_before));
    }
}

/// The properties of the first record in a partition.
#[derive(Clone, Copy, Default)]
struct FirstRecord {
    is_known: bool,
    produced: Option<i64>,
    commit: Option<Lsn>,
}

impl FirstRecord {
    fn observe(&mut self, message: &ReadRecord<'_>, position: Option<Position>) {
        if self.commit.is_none() {
            self.commit = position.map(|position| position.commit);
        }
        if !std::mem::replace(&mut self.is_known, true) {
            self.produced = message.timestamp_millis();
        }
    }
}

/// Converts Kafka records to entries, and stores these entries.
struct RecordCollector<'t> {
    id: &'t str,
    entries: &'t mut Spill,
    journal: &'t mut Journal,
    bytes: Vec<u8>,
}

impl RecordCollector<'_> {
    fn add_record(
        &mut self,
        message: &ReadRecord<'_>,
        place: u32,
        reporter: &mut Reporter<'_>,
    ) -> std::io::Result<Option<Position>> {
        let number = reporter.counts.records;
        reporter.counts.records += 1;
        let (mut id, mut position, mut is_replay) = (None, None, false);
        for (name, value) in message.headers() {
            // Headers from the headers column follow the configured headers and may have any name.
            // Therefore, only the first header with the configured name for the event's ID is used,
            // even if it has no value.
            match name {
                name if name == self.id => {
                    id.get_or_insert(value);
                }
                POSITION_HEADER => {
                    let text = value.and_then(|value| str::from_utf8(value).ok());
                    position = position.or(text.and_then(|text| text.parse().ok()));
                }
                REPLAY_HEADER => is_replay = true,
                _ => {}
            }
        }
        let record = Record {
            place,
            offset: message.offset(),
            key: hash_of_key(message.key()),
            position: position.filter(|_| !is_replay),
            is_replay,
            number,
        };
        let Some(id) = id.flatten() else {
            reporter.counts.unexpected += 1;
            reporter.unexpected(|| Finding::Unexpected {
                id: None,
                at: RecordLocation {
                    topic: message.topic().to_owned(),
                    partition: message.partition(),
                    offset: message.offset(),
                },
            })?;
            return Ok(record.position);
        };
        let kind = EntryKind::Record(record);
        Entry { kind, id }.encode(&mut self.bytes);
        self.entries.push(hash(id), &self.bytes)?;
        if record.position.is_some() {
            self.journal.push(&self.bytes)?;
        }
        Ok(record.position)
    }
}
