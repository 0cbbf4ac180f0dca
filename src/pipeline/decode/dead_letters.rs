//! Handles events that can't be delivered: depending on the settings, such an event is replaced by
//! a dead letter or halts the pipeline.

use std::time::Instant;

use tracing::{debug, warn};

use super::Step;
use super::hand_over::{Mark, Undelivered, send_record};
use crate::delivery::failure::RefusalCause;
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::dead_letters::{DeadLetterCounts, LastDeadLetter};
use crate::model::outage::{Outage, OutageMessage};
use crate::model::time::{seconds, unix_micros};
use crate::outbox::dead_letter::{
    ERROR, ERROR_MESSAGE, EventContent, Extent, PIPELINE, SOURCE_PREFIX, SOURCE_TABLE, Writer,
};
use crate::outbox::envelope::EnvelopeError;
use crate::pipeline::settings::{DeadLetterSettings, Undeliverable};
use crate::sink::{Sink, SinkError};

/// Maximum length of a [`Failure`]'s reason, in bytes. Needed because a reason can quote a column's
/// value, which can be long.
const REASON_BYTES_MAX: usize = 1000;

/// Why an event can't be delivered. Each kind has its own setting, except `BadTimestamp`, which
/// uses the setting for `Unroutable`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Oversize,
    Unroutable,
    /// The event is unroutable because of its timestamp, so the dead letter must not have that
    /// timestamp either.
    BadTimestamp,
    Malformed,
}

impl Kind {
    /// Returns the kind of failure if the sink rejected a record because of its contents or its
    /// topic. Returns `None` if the error has a different cause.
    fn from_sink_error(error: &SinkError) -> Option<Self> {
        match error {
            SinkError::TooLarge { .. } => Some(Self::Oversize),
            SinkError::RecordRejected { cause, .. } => Some(match cause {
                RefusalCause::Size => Self::Oversize,
                RefusalCause::Timestamp => Self::BadTimestamp,
                RefusalCause::Other => Self::Unroutable,
            }),
            SinkError::NoPartition { .. }
            | SinkError::TopicMissing { .. }
            | SinkError::TopicDenied { .. }
            | SinkError::TopicNotCreated { .. } => Some(Self::Unroutable),
            SinkError::Refused { .. }
            | SinkError::Configuration(_)
            | SinkError::Checkpoint { .. }
            | SinkError::CheckpointTopic { .. }
            | SinkError::Fenced(_)
            | SinkError::TransactionDenied { .. }
            | SinkError::Broken(_)
            | SinkError::Stdout(_)
            | SinkError::StdoutClosed => None,
        }
    }
}

/// Returns whether the sink rejected the record because of its contents or its topic. Each such
/// record can be replaced by a dead letter.
pub(super) fn concerns_one_record(error: &SinkError) -> bool {
    Kind::from_sink_error(error).is_some()
}

/// Describes why one event can't be delivered.
pub(super) struct Failure {
    kind: Kind,
    reason: String,
}

impl Failure {
    /// Returns a [`Failure`] for a message that is not a valid event.
    pub(super) fn malformed(error: &EnvelopeError) -> Self {
        Self {
            kind: Kind::Malformed,
            reason: error.to_string(),
        }
    }

    /// Returns a [`Failure`] for an event that was not delivered because of its contents or its
    /// topic. Returns `None` if the error has a different cause.
    pub(super) fn from_undelivered(error: &Undelivered) -> Option<Self> {
        match error {
            Undelivered::Route(error) => Some(Self {
                kind: Kind::Unroutable,
                reason: error.to_string(),
            }),
            Undelivered::Produce(error) => Kind::from_sink_error(error).map(|kind| Self {
                kind,
                reason: error.to_string(),
            }),
            Undelivered::DeadLetter { .. } | Undelivered::Order(_) => None,
        }
    }

    /// Returns the reason, truncated to [`REASON_BYTES_MAX`].
    fn reason(&self) -> &str {
        let text = &self.reason;
        let mut ends = (0..=text.len().min(REASON_BYTES_MAX)).rev();
        let end = ends.find(|&end| text.is_char_boundary(end));
        &text[..end.unwrap_or_default()]
    }
}

/// Creates and counts dead letters.
pub(crate) struct DeadLetters {
    settings: DeadLetterSettings,
    pipeline: String,
    /// The prefix of the outbox's logical decoding messages; empty if the outbox is a table.
    prefix: String,
    writer: Writer,
    messages: Outage,
    counts: DeadLetterCounts,
}

impl DeadLetters {
    /// Creates an instance for `pipeline`, or returns `None` if `settings` do not enable dead
    /// letters. `prefix` is the prefix of the outbox's logical decoding messages. For rows, the
    /// dead letter contains the table's name instead, which is taken from the row's mapping.
    pub(crate) fn new(pipeline: &str, prefix: &str, settings: &DeadLetterSettings) -> Option<Self> {
        settings.is_enabled().then(|| Self {
            settings: settings.clone(),
            pipeline: pipeline.to_owned(),
            prefix: prefix.to_owned(),
            writer: Writer::default(),
            messages: Outage::default(),
            counts: DeadLetterCounts::default(),
        })
    }

    pub(crate) fn counts(&self) -> DeadLetterCounts {
        self.counts
    }

    pub(crate) fn resume_counts(&mut self, before: DeadLetterCounts) {
        self.counts = before;
    }

    /// Returns whether a failure of this kind results in a dead letter.
    pub(super) fn is_sent_for(&self, failure: &Failure) -> bool {
        let reaction = match failure.kind {
            Kind::Oversize => self.settings.oversize,
            Kind::Unroutable | Kind::BadTimestamp => self.settings.unroutable,
            Kind::Malformed => self.settings.malformed,
        };
        reaction == Undeliverable::DeadLetter
    }

    /// Delivers a dead letter that has the header `mark` and contains the parts of the event that
    /// are available.
    pub(super) fn deliver(
        &mut self,
        failure: &Failure,
        mark: Mark<'_>,
        content: EventContent<'_>,
        watermark: &mut Watermark,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        let sent = self.send(failure, mark, content, watermark, sink)?;
        let step = sent.map_err(|error| Undelivered::DeadLetter {
            error,
            reason: failure.reason().to_owned(),
        })?;
        if step == Step::Done {
            let stats = watermark.stats();
            stats.set_dead_letter_counts(self.counts);
            stats.record_dead_letter(LastDeadLetter {
                at: seconds(unix_micros()),
                position: String::from_utf8_lossy(mark.1).into_owned(),
                topic: self.settings.topic.clone(),
                reason: failure.reason().to_owned(),
            });
        }
        Ok(step)
    }

    /// Passes a dead letter with the header `mark` to the sink. The inner result is an error if the
    /// sink rejected the dead letter.
    fn send(
        &mut self,
        failure: &Failure,
        mark: Mark<'_>,
        content: EventContent<'_>,
        watermark: &mut Watermark,
        sink: &mut impl Sink,
    ) -> Result<Result<Step, SinkError>, OrderError> {
        let table = match content {
            EventContent::Row(mapping, _) => mapping.table(),
            EventContent::Bytes(_) | EventContent::Unread(_) => None,
        };
        let source = table.map_or((SOURCE_PREFIX, self.prefix.as_str()), |table| {
            (SOURCE_TABLE, table)
        });
        let mut send = |extent| {
            let about: [(&str, &[u8]); 4] = [
                (ERROR, failure.kind.name().as_bytes()),
                (ERROR_MESSAGE, failure.reason().as_bytes()),
                (source.0, source.1.as_bytes()),
                (PIPELINE, self.pipeline.as_bytes()),
            ];
            let topic = &self.settings.topic;
            let letter = self.writer.write(topic, content, mark, &about, extent);
            send_record(&letter, watermark, sink)
        };
        let (first, smaller) = failure.kind.extents(self.settings.oversize);
        let mut sent = send(first)?;
        for &extent in smaller {
            if !is_refused(&sent) {
                break;
            }
            sent = send(extent)?;
        }
        if sent == Ok(Step::Done) {
            self.record_failure(failure, mark.1, content);
        }
        Ok(sent)
    }

    fn record_failure(&mut self, failure: &Failure, at: &[u8], content: EventContent<'_>) {
        match failure.kind {
            Kind::Oversize => self.counts.oversize += 1,
            Kind::Unroutable | Kind::BadTimestamp => self.counts.unroutable += 1,
            Kind::Malformed => self.counts.malformed += 1,
        }
        let (pipeline, topic, kind) = (&self.pipeline, &self.settings.topic, failure.kind.name());
        let DeadLetterCounts {
            oversize,
            unroutable,
            malformed,
        } = self.counts;
        let (row, reason, at) = (
            describe(content),
            failure.reason(),
            String::from_utf8_lossy(at),
        );
        match self.messages.failed(Instant::now()) {
            OutageMessage::Suppressed => {
                debug!(pipeline, topic, kind, %at, "sent a dead letter for {row}: {reason}")
            }
            OutageMessage::Started | OutageMessage::Ongoing(..) => warn!(
                pipeline, topic, kind, %at, oversize, unroutable, malformed, "sent a dead letter for {row}: {reason}"
            ),
        }
    }
}

/// Describes the event, for log messages.
fn describe(content: EventContent<'_>) -> String {
    match content {
        EventContent::Row(mapping, row) => mapping.describe(row),
        EventContent::Bytes(_) | EventContent::Unread(_) => "message".to_owned(),
    }
}

/// Returns whether the sink rejected the record but might accept a smaller one.
fn is_refused(sent: &Result<Step, SinkError>) -> bool {
    matches!(
        sent,
        Err(SinkError::TooLarge { .. } | SinkError::RecordRejected { .. })
    )
}

impl Kind {
    /// Returns how much of the event to include in its dead letter, followed by the smaller amounts
    /// to try, in order, if the sink rejects the dead letter.
    fn extents(self, oversize: Undeliverable) -> (Extent, &'static [Extent]) {
        const SMALLER: [Extent; 4] = [
            Extent::Cut,
            Extent::NoPayload,
            Extent::CutWithoutPayload,
            Extent::Reference,
        ];
        match (self, oversize) {
            // Omit the payload from the start: the event was already too large, and its dead letter
            // has additional headers.
            (Self::Oversize, _) => (Extent::NoPayload, &SMALLER[2..]),
            // Omitting the payload is allowed only if on_oversize = "dead-letter".
            (Self::Unroutable, Undeliverable::Halt) => (Extent::Whole, &SMALLER[..1]),
            (Self::BadTimestamp, Undeliverable::Halt) => (SMALLER[0], &[]),
            (Self::BadTimestamp, Undeliverable::DeadLetter) => (SMALLER[0], &SMALLER[1..]),
            // With these settings, the pipeline must not halt, however large the event is
            // (on_oversize does not apply to malformed messages). If the sink rejects the dead
            // letter, retry with smaller and smaller parts of the event, and finally with only the
            // data that identifies the event.
            (Self::Unroutable, Undeliverable::DeadLetter) | (Self::Malformed, _) => {
                (Extent::Whole, &SMALLER)
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Oversize => "oversize",
            Self::Unroutable | Self::BadTimestamp => "unroutable",
            Self::Malformed => "malformed",
        }
    }
}
