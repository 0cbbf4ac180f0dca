//! The events that became dead letters, which the topics of the events lack.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::time::Instant;

use super::Reporter;
use crate::kafka::reader::{ReadError, ReadRecord, TopicReader};
use crate::outbox::dead_letter::{EVENT_ID, PIPELINE};
use crate::pipeline::settings::PipelineSettings;

/// Ids of events that became dead letters.
#[derive(Debug, Default)]
pub(super) struct DeadLetters {
    pub(super) topic: String,
    ids: HashSet<Box<[u8]>>,
    bytes: usize,
}

impl DeadLetters {
    /// Reads those of the pipeline, if its settings send any; `id` is the header that has the event's id. What cannot be read, and
    /// what takes more than `max_bytes`, is left out with a note.
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
        if !settings.dead_letters.are_sent() {
            return letters;
        }
        let mut is_full = false;
        let read = letters.read_topic(reader, deadline, |letters, message| {
            is_full = letters.bytes > max_bytes;
            if !is_full {
                letters.add(message, id, &settings.name);
            }
        });
        let why = match read {
            Ok(()) if is_full => "there are too many for --memory".to_owned(),
            Ok(()) => return letters,
            Err(error) => error.to_string(),
        };
        reporter.note(format!(
            "dead letters in topic {:?} were not all read, and their events can be among the missing: {why}",
            letters.topic
        ));
        letters
    }

    fn read_topic(
        &mut self,
        reader: &TopicReader,
        deadline: Instant,
        mut take: impl FnMut(&mut Self, &ReadRecord<'_>),
    ) -> Result<(), ReadError> {
        let topic = self.topic.clone();
        let Some(partitions) = reader.partitions(&topic)? else {
            return Ok(());
        };
        let spans = reader.spans(&topic, &partitions, None, deadline)?;
        reader.read(&topic, &spans, |message| {
            take(self, message);
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
        let ids = message
            .headers()
            .filter(|(name, _)| *name == id || *name == EVENT_ID);
        for id in ids.filter_map(|(_, value)| value) {
            if self.ids.insert(id.into()) {
                self.bytes += id.len() + 64;
            }
        }
    }

    pub(super) fn contains(&self, id: &[u8]) -> bool {
        self.ids.contains(id)
    }
}
