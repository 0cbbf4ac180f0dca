//! Reads the events that became dead letters and are therefore not in the event topics.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::time::Instant;

use super::Reporter;
use crate::kafka::reader::{ReadError, ReadRecord, TopicReader};
use crate::outbox::dead_letter::{EVENT_ID, PIPELINE};
use crate::outbox::headers::{POSITION_HEADER, REPLAY_HEADER};
use crate::pipeline::settings::PipelineSettings;

/// The IDs of events that became dead letters.
#[derive(Debug, Default)]
pub(super) struct DeadLetters {
    pub(super) topic: String,
    ids: HashSet<Box<[u8]>>,
    bytes: usize,
}

impl DeadLetters {
    /// Reads the pipeline's dead letters. `id` is the header that contains the event's ID. Adds a
    /// note if some dead letters can't be read or require more than `max_bytes`. The topic is read
    /// even if dead letters are not enabled in `settings`, because the settings of `walpost run`
    /// may be different, or may have been different in the past.
    pub(super) fn read(
        settings: &PipelineSettings,
        reader: &TopicReader,
        id: &str,
        max_bytes: usize,
        deadline: Instant,
        reporter: &mut Reporter<'_>,
    ) -> Self {
        let mut letters = Self {
            topic: settings.dead_letters.topic.clone(),
            ..Self::default()
        };
        let mut is_full = false;
        let read = letters.read_topic(reader, deadline, |letters, message| {
            is_full = letters.bytes > max_bytes;
            if !is_full {
                letters.add(message, id, &settings.name);
            }
        });
        let reason = match read {
            Ok(()) if is_full => "the memory limit (--memory) was reached".to_owned(),
            Ok(()) => return letters,
            // If dead letters are not enabled, the Kafka user may not be authorized to read their
            // topic.
            Err(_) if !settings.dead_letters.is_enabled() => return letters,
            Err(error) => error.to_string(),
        };
        reporter.add_note(format!(
            "not all dead letters in topic {:?} were read, so their events may be counted as missing: {reason}",
            letters.topic
        ));
        letters
    }

    fn read_topic(
        &mut self,
        reader: &TopicReader,
        deadline: Instant,
        mut on_record: impl FnMut(&mut Self, &ReadRecord<'_>),
    ) -> Result<(), ReadError> {
        let topic = self.topic.clone();
        let Some(partitions) = reader.partitions(&topic)? else {
            return Ok(());
        };
        let spans = reader.spans(&topic, &partitions, None, deadline)?;
        reader.read(&topic, &spans, |message| {
            on_record(self, message);
            Ok(ControlFlow::Continue(()))
        })
    }

    fn add(&mut self, message: &ReadRecord<'_>, id: &str, pipeline: &str) {
        let is_ours = message
            .headers()
            .any(|(name, value)| name == PIPELINE && value == Some(pipeline.as_bytes()));
        if !is_ours {
            return;
        }
        for id in event_ids(message.headers(), id).into_iter().flatten() {
            if self.ids.insert(id.into()) {
                self.bytes += id.len() + 64;
            }
        }
    }

    pub(super) fn contains(&self, id: &[u8]) -> bool {
        self.ids.contains(id)
    }
}

/// Returns the event's IDs in a dead letter: the value of the configured header `id`, and the value
/// of the column `id`. Headers from the headers column, whose contents are chosen by the role that
/// inserts the row, must not be mistaken for these IDs. Headers from the headers column follow the
/// header with the event's position, and can't have the name `EVENT_ID`.
fn event_ids<'h>(
    headers: impl Iterator<Item = (&'h str, Option<&'h [u8]>)>,
    id: &str,
) -> [Option<&'h [u8]>; 2] {
    let (mut by_settings, mut by_column, mut is_row_header) = (None, None, false);
    for (name, value) in headers {
        match name {
            POSITION_HEADER | REPLAY_HEADER => is_row_header = true,
            EVENT_ID => by_column = value,
            name if name == id && !is_row_header => {
                by_settings.get_or_insert(value);
            }
            _ => {}
        }
    }
    [by_settings.flatten(), by_column]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignores_event_ids_in_headers_set_by_the_row() {
        let check = |headers: &[(&str, Option<&str>)], expected: [Option<&str>; 2]| {
            let headers = headers
                .iter()
                .map(|(name, value)| (*name, value.map(str::as_bytes)));
            let found = event_ids(headers, "id");
            assert_eq!(found, expected.map(|id| id.map(str::as_bytes)));
        };
        let (mark, again) = ((POSITION_HEADER, Some("0/1:0")), (REPLAY_HEADER, Some("r")));
        let (own, row, column) = (
            ("id", Some("a")),
            ("id", Some("victim")),
            (EVENT_ID, Some("a")),
        );
        check(&[own, mark, row, column], [Some("a"), Some("a")]);
        check(&[own, mark, row], [Some("a"), None]);
        check(&[own, own, again, row], [Some("a"), None]);
        // The configured header is null or missing.
        check(&[("id", None), row, mark, row], [None, None]);
        check(&[mark, row, column], [None, Some("a")]);
        check(&[again, row], [None, None]);
        check(&[], [None, None]);
    }
}
