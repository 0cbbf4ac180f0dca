//! The way of one row from its mapping to the sink: a record of it, or a dead letter in its place.

use super::Step;
use super::dead_letters::{DeadLetters, Failure};
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::lsn::Position;
use crate::outbox::Record;
use crate::outbox::columns::{Mapping, Row};
use crate::outbox::dead_letter::Remains;
use crate::outbox::envelope::EnvelopeError;
use crate::outbox::route::{POSITION_HEADER, RouteError, Router};
use crate::pipeline::decode::error::CoreError;
use crate::pipeline::exactly_once::duplicate_filter::DuplicateFilter;
use crate::sink::{Produced, Sink, SinkError};

/// Bytes of the window that a record takes beside its key, value and headers: what librdkafka
/// keeps for each message and for each header, and what the allocator has left over beside them.
const RECORD_OVERHEAD: usize = 384;
const HEADER_OVERHEAD: usize = 64;

/// What rows go through, whether they come from the stream, from a snapshot or from a replay.
pub struct Delivery {
    router: Router,
    /// Exactly-once: what is left out and what was dealt with.
    pub(super) duplicate_filter: Option<DuplicateFilter>,
    /// None where every event that can't be delivered is an error.
    pub(crate) dead_letters: Option<DeadLetters>,
    /// Deliveries in any order to one confirmed LSN.
    pub watermark: Watermark,
}

/// A header that says which event a record is.
pub(crate) type Mark<'m> = (&'static str, &'m [u8]);

/// Why neither a record nor a dead letter was handed over.
#[derive(Debug)]
pub(crate) enum Undelivered {
    /// The row can't become a record.
    Route(RouteError),
    /// The sink does not take the record.
    Produce(SinkError),
    /// The sink does not take the dead letter, which was to be sent for this reason.
    DeadLetter { error: SinkError, reason: String },
    /// A record at a place where there can be none.
    Order(OrderError),
}

impl From<OrderError> for Undelivered {
    fn from(error: OrderError) -> Self {
        Self::Order(error)
    }
}

impl Undelivered {
    /// The same, of the event at this position. `row` is for a person.
    fn at(self, at: Position, row: impl FnOnce() -> String) -> CoreError {
        match self {
            Self::Route(error) => CoreError::Route {
                at,
                row: row(),
                error,
            },
            Self::Produce(error) => CoreError::Produce {
                at,
                row: row(),
                error: Box::new(error),
            },
            Self::DeadLetter { error, reason } => CoreError::DeadLetter {
                at,
                row: row(),
                error: Box::new(error),
                reason,
            },
            Self::Order(error) => CoreError::Order(error),
        }
    }
}

impl Delivery {
    /// All records count in `watermark`.
    pub(crate) fn new(watermark: Watermark) -> Self {
        Self {
            router: Router::default(),
            duplicate_filter: None,
            dead_letters: None,
            watermark,
        }
    }

    /// Hands over an event of the stream, or a dead letter of it, unless the duplicate filter says that Kafka has it.
    #[inline]
    pub(super) fn event(
        &mut self,
        at: Position,
        mapping: &Mapping,
        row: &Row<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        let id = || mapping.id(row);
        if let Some(duplicate_filter) = &mut self.duplicate_filter
            && duplicate_filter.has(at, id)?
        {
            return Ok(Step::Done);
        }
        let step = self.row(at, mapping, row, sink)?;
        if let (Some(duplicate_filter), Step::Done) = (&mut self.duplicate_filter, &step) {
            duplicate_filter.delivered(at, id());
        }
        Ok(step)
    }

    /// Hands over a row that has this position, or a dead letter of it.
    #[inline]
    pub(super) fn row(
        &mut self,
        at: Position,
        mapping: &Mapping,
        row: &Row<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        self.hand_over(mapping, row, (POSITION_HEADER, &at.text()), sink)
            .map_err(|error| error.at(at, || mapping.describe(row)))
    }

    /// Hands over a message of the stream that is no event: a dead letter of it, where the settings say so.
    pub(super) fn malformed(
        &mut self,
        at: Position,
        prefix: &str,
        error: EnvelopeError,
        remains: Remains<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        if let Some(duplicate_filter) = &mut self.duplicate_filter
            && duplicate_filter.has(at, || None)?
        {
            return Ok(Step::Done);
        }
        let failure = Failure::malformed(&error);
        let letters = self.dead_letters.as_mut();
        let Some(letters) = letters.filter(|letters| letters.are_for(&failure)) else {
            return Err(CoreError::Envelope {
                at,
                prefix: prefix.to_owned(),
                error,
            });
        };
        let mark = (POSITION_HEADER, &at.text()[..]);
        let step = letters
            .deliver(&failure, mark, remains, &mut self.watermark, sink)
            .map_err(|error| error.at(at, || "message".to_owned()))?;
        if let (Some(duplicate_filter), Step::Done) = (&mut self.duplicate_filter, &step) {
            duplicate_filter.delivered(at, None);
        }
        Ok(step)
    }

    /// Hands over a record of the row with that header, or a dead letter of it.
    #[inline]
    pub(crate) fn hand_over(
        &mut self,
        mapping: &Mapping,
        row: &Row<'_>,
        mark: Mark<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        match self.record(mapping, row, mark, sink) {
            Err(error) => self.dead_letter(error, mark, Remains::Row(mapping, row), sink),
            step => step,
        }
    }

    /// Makes a record of it and gives that to the sink.
    #[inline]
    fn record(
        &mut self,
        mapping: &Mapping,
        row: &Row<'_>,
        (name, value): Mark<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        let routed = self.router.route_with(mapping, row, name, value);
        let record = routed.map_err(Undelivered::Route)?;
        give(&record, &mut self.watermark, sink)?.map_err(Undelivered::Produce)
    }

    fn dead_letter(
        &mut self,
        error: Undelivered,
        mark: Mark<'_>,
        remains: Remains<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        let (Some(letters), Some(failure)) = (&mut self.dead_letters, Failure::of(&error)) else {
            return Err(error);
        };
        match letters.are_for(&failure) {
            true => letters.deliver(&failure, mark, remains, &mut self.watermark, sink),
            false => Err(error),
        }
    }
}

/// Counts a record and gives it to the sink. The inner error is the sink's refusal.
#[inline]
pub(super) fn give(
    record: &Record<'_>,
    watermark: &mut Watermark,
    sink: &mut impl Sink,
) -> Result<Result<Step, SinkError>, OrderError> {
    let Some(tag) = watermark.reserve(cost(record))? else {
        return Ok(Ok(Step::Full));
    };
    let step = match sink.produce(record, tag) {
        Ok(Produced::Taken) => return Ok(Ok(Step::Done)),
        Ok(Produced::Full) => Ok(Step::Full),
        Ok(Produced::NewTopic) => Ok(Step::NewTopic(record.topic.to_owned())),
        Err(error) => Err(error),
    };
    watermark.release(tag);
    Ok(step)
}

/// What a record takes of the window, in bytes.
fn cost(record: &Record<'_>) -> u64 {
    let of = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len);
    let headers = record
        .headers
        .iter()
        .map(|(name, value)| name.len() + of(value) + HEADER_OVERHEAD)
        .sum::<usize>();
    (of(record.key) + of(record.payload) + headers + RECORD_OVERHEAD) as u64
}
