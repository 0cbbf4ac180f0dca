//! Events that can't be delivered as they are: a dead letter in their place, or a halt.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use tracing::{debug, warn};

use super::{Source, Step, give};
use crate::observe::outage::{Outage, Say};
use crate::outbox::dead_letter::{
    ERROR, ERROR_MESSAGE, PIPELINE, Remains, SOURCE_PREFIX, SOURCE_TABLE, Writer,
};
use crate::pipeline::PipelineError;
use crate::pipeline::settings::{DeadLetterSettings, Undeliverable};
use crate::pipeline::sink::{Sink, SinkError};
use crate::pipeline::watermark::Watermark;
use crate::postgres::lsn::Position;

/// A reason can quote a column's value, which can be long.
const REASON_BYTES_MAX: usize = 1000;

/// How many dead letters there were, by what kept the events from being delivered. What comes again
/// is counted again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeadLetterCounts {
    /// Their records were too large.
    pub oversize: u64,
    /// No record could be made of them.
    pub unroutable: u64,
}

/// Why an event can't be delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Oversize,
    Unroutable,
}

/// Makes dead letters, and counts them.
pub(super) struct DeadLetters {
    settings: DeadLetterSettings,
    pipeline: String,
    /// The header that says where events come from, and its value.
    source: (&'static str, String),
    writer: Writer,
    said: Outage,
    counts: DeadLetterCounts,
}

impl DeadLetters {
    pub(super) fn new(pipeline: &str, source: &Source, settings: DeadLetterSettings) -> Self {
        Self {
            settings,
            pipeline: pipeline.to_owned(),
            source: match source {
                Source::Table(source) => (SOURCE_TABLE, source.table().to_string()),
                Source::Log(source) => (SOURCE_PREFIX, source.prefix().to_owned()),
            },
            writer: Writer::default(),
            said: Outage::default(),
            counts: DeadLetterCounts::default(),
        }
    }

    pub(super) fn counts(&self) -> DeadLetterCounts {
        self.counts
    }

    pub(super) fn go_on_counting(&mut self, before: DeadLetterCounts) {
        self.counts = before;
    }

    /// Delivers a dead letter of what remains of the event at this position, which `error` kept from
    /// being delivered. The error comes back where the settings have it halt.
    pub(super) fn deliver(
        &mut self,
        error: PipelineError,
        at: Position,
        remains: Remains<'_>,
        watermark: &mut Watermark,
        sink: &mut impl Sink,
    ) -> Result<Step, PipelineError> {
        let Some((kind, reason)) = self.judge(&error) else {
            return Err(error);
        };
        let reason = cut(&reason);
        let mut send = |whole| {
            let about: [(&str, &[u8]); 4] = [
                (ERROR, kind.name().as_bytes()),
                (ERROR_MESSAGE, reason.as_bytes()),
                (self.source.0, self.source.1.as_bytes()),
                (PIPELINE, self.pipeline.as_bytes()),
            ];
            let topic = &self.settings.topic;
            let letter = self.writer.write(topic, remains, &at.text(), &about, whole);
            give(&letter, watermark, sink)
        };
        // What was too large would be so with more headers.
        let sent = match kind {
            Kind::Oversize => send(false)?,
            Kind::Unroutable => match send(true)? {
                Err(SinkError::TooLarge { .. })
                    if self.settings.oversize == Undeliverable::DeadLetter =>
                {
                    send(false)?
                }
                sent => sent,
            },
        };
        let row = match remains {
            Remains::Row(mapping, row) => mapping.describe(row),
            Remains::Bytes(_) => "message".to_owned(),
        };
        let step = sent.map_err(|error| PipelineError::DeadLetter {
            at,
            row: row.clone(),
            error: Box::new(error),
            reason: reason.to_owned(),
        })?;
        if step == Step::Done {
            self.count(kind, at, &row, reason);
            watermark.stats().dead_letters_are(self.counts);
        }
        Ok(step)
    }

    /// What kind of failure it is and why the event can't be delivered, if that calls for a dead
    /// letter.
    fn judge(&self, error: &PipelineError) -> Option<(Kind, String)> {
        let (kind, reason) = match error {
            PipelineError::Route { error, .. } => (Kind::Unroutable, error.to_string()),
            PipelineError::Envelope { error, .. } => (Kind::Unroutable, error.to_string()),
            PipelineError::Produce { error, .. } => match error {
                SinkError::TooLarge { .. } => (Kind::Oversize, error.to_string()),
                SinkError::NoPartition { .. } => (Kind::Unroutable, error.to_string()),
                _ => return None,
            },
            _ => return None,
        };
        let becomes = match kind {
            Kind::Oversize => self.settings.oversize,
            Kind::Unroutable => self.settings.unroutable,
        };
        (becomes == Undeliverable::DeadLetter).then_some((kind, reason))
    }

    fn count(&mut self, kind: Kind, at: Position, row: &str, reason: &str) {
        match kind {
            Kind::Oversize => self.counts.oversize += 1,
            Kind::Unroutable => self.counts.unroutable += 1,
        }
        let (pipeline, topic, kind) = (&self.pipeline, &self.settings.topic, kind.name());
        let DeadLetterCounts {
            oversize,
            unroutable,
        } = self.counts;
        match self.said.failed(Instant::now()) {
            Say::Nothing => debug!(pipeline, topic, kind, %at, "dead letter of {row}: {reason}"),
            Say::Begins | Say::Lasts(..) => warn!(
                pipeline, topic, kind, %at, oversize, unroutable, "dead letter of {row}: {reason}"
            ),
        }
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Oversize => "oversize",
            Self::Unroutable => "unroutable",
        }
    }
}

/// The beginning of a text.
fn cut(text: &str) -> &str {
    let mut ends = (0..=text.len().min(REASON_BYTES_MAX)).rev();
    let end = ends.find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or_default()]
}
