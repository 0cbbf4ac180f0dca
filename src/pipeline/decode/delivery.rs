//! Converts a mapped row to a record, or to a dead letter in its place, and passes it to the sink.

use super::Step;
use super::dead_letters::{DeadLetters, Failure};
use super::hand_over::{Mark, Undelivered, send_record};
use crate::delivery::watermark::Watermark;
use crate::model::lsn::Position;
use crate::outbox::columns::{Mapping, Row};
use crate::outbox::dead_letter::EventContent;
use crate::outbox::envelope::EnvelopeError;
use crate::outbox::headers::POSITION_HEADER;
use crate::outbox::route::{RouteError, Router};
use crate::pipeline::decode::error::CoreError;
use crate::pipeline::exactly_once::duplicate_filter::DuplicateFilter;
use crate::sink::Sink;

/// Converts rows to records. The rows come from the stream, a snapshot or a replay.
pub struct Delivery {
    router: Router,
    /// With exactly-once delivery: determines which events are omitted because Kafka already
    /// contains them, and tracks the last processed event.
    pub(super) duplicate_filter: Option<DuplicateFilter>,
    /// Creates dead letters; `None` if every event that can't be delivered results in an error.
    pub(crate) dead_letters: Option<DeadLetters>,
    /// Whether text values may contain invalid UTF-8.
    pub(crate) checks_texts: bool,
    /// Tracks deliveries, and determines the LSN that may be confirmed.
    pub watermark: Watermark,
}

impl Delivery {
    /// Creates an instance whose records are counted in `watermark`.
    pub(crate) fn new(watermark: Watermark) -> Self {
        Self {
            router: Router::default(),
            duplicate_filter: None,
            dead_letters: None,
            checks_texts: false,
            watermark,
        }
    }

    /// Passes an event of the stream, or a dead letter in its place, to the sink, unless the
    /// duplicate filter finds that Kafka already contains the event.
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
            && duplicate_filter.is_delivered(at, id)?
        {
            return Ok(Step::Done);
        }
        let step = self.row(at, mapping, row, sink)?;
        if let (Some(duplicate_filter), Step::Done) = (&mut self.duplicate_filter, &step) {
            duplicate_filter.record_delivered(at, id());
        }
        Ok(step)
    }

    /// Passes the row at this position, or a dead letter in its place, to the sink.
    #[inline]
    pub(super) fn row(
        &mut self,
        at: Position,
        mapping: &Mapping,
        row: &Row<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        self.hand_over(mapping, row, (POSITION_HEADER, &at.text()), sink)
            .map_err(|error| error.into_core_error(at, || mapping.describe(row)))
    }

    /// Processes a message of the stream that is not a valid event. Sends a dead letter, or returns
    /// an error if the settings do not allow a dead letter.
    pub(super) fn malformed(
        &mut self,
        at: Position,
        prefix: &str,
        error: EnvelopeError,
        content: EventContent<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, CoreError> {
        if let Some(duplicate_filter) = &mut self.duplicate_filter
            && duplicate_filter.is_delivered(at, || None)?
        {
            return Ok(Step::Done);
        }
        let failure = Failure::malformed(&error);
        let letters = self.dead_letters.as_mut();
        let Some(letters) = letters.filter(|letters| letters.is_sent_for(&failure)) else {
            return Err(CoreError::Envelope {
                at,
                prefix: prefix.to_owned(),
                error,
            });
        };
        let mark = (POSITION_HEADER, &at.text()[..]);
        let step = letters
            .deliver(&failure, mark, content, &mut self.watermark, sink)
            .map_err(|error| error.into_core_error(at, || "message".to_owned()))?;
        if let (Some(duplicate_filter), Step::Done) = (&mut self.duplicate_filter, &step) {
            duplicate_filter.record_delivered(at, None);
        }
        Ok(step)
    }

    /// Passes a record of the row with this header, or a dead letter in its place, to the sink.
    #[inline]
    pub(crate) fn hand_over(
        &mut self,
        mapping: &Mapping,
        row: &Row<'_>,
        mark: Mark<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        match self.record(mapping, row, mark, sink) {
            Err(error) => self.dead_letter(error, mark, EventContent::Row(mapping, row), sink),
            step => step,
        }
    }

    /// Creates a record of the row and passes it to the sink.
    #[inline]
    fn record(
        &mut self,
        mapping: &Mapping,
        row: &Row<'_>,
        (name, value): Mark<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        if self.checks_texts && has_invalid_text(row) {
            return Err(Undelivered::Route(RouteError::Encoding));
        }
        let routed = self.router.route_with(mapping, row, name, value);
        let record = routed.map_err(Undelivered::Route)?;
        send_record(&record, &mut self.watermark, sink)?.map_err(Undelivered::Produce)
    }

    fn dead_letter(
        &mut self,
        error: Undelivered,
        mark: Mark<'_>,
        content: EventContent<'_>,
        sink: &mut impl Sink,
    ) -> Result<Step, Undelivered> {
        let (Some(letters), Some(failure)) =
            (&mut self.dead_letters, Failure::from_undelivered(&error))
        else {
            return Err(error);
        };
        match letters.is_sent_for(&failure) {
            true => letters.deliver(&failure, mark, content, &mut self.watermark, sink),
            false => Err(error),
        }
    }
}

fn has_invalid_text(row: &Row<'_>) -> bool {
    let mut values = row.iter().flatten();
    values.any(|value| std::str::from_utf8(value).is_err())
}
