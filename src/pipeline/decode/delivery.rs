//! Converts a mapped row to a record and passes it to the sink. If that fails, sends a dead letter
//! instead.

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

/// Converts rows from the stream, a snapshot or a replay to records.
pub struct Delivery {
    router: Router,
    /// For exactly-once delivery: identifies events to skip because Kafka already contains them,
    /// and keeps track of the last processed event.
    pub(super) duplicate_filter: Option<DuplicateFilter>,
    /// Creates dead letters; `None` if dead letters are disabled, in which case every undeliverable
    /// event is an error.
    pub(crate) dead_letters: Option<DeadLetters>,
    /// Whether text values may be invalid UTF-8 and must therefore be checked.
    pub(crate) checks_texts: bool,
    /// Tracks deliveries and computes the LSN that may be confirmed.
    pub watermark: Watermark,
}

impl Delivery {
    /// Creates an instance that tracks its records in `watermark`.
    pub(crate) fn new(watermark: Watermark) -> Self {
        Self {
            router: Router::default(),
            duplicate_filter: None,
            dead_letters: None,
            checks_texts: false,
            watermark,
        }
    }

    /// Passes an event of the stream (or its dead letter) to the sink, unless the duplicate filter
    /// finds that Kafka already contains the event.
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

    /// Passes the row at position `at` (or its dead letter) to the sink.
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

    /// Handles a message of the stream that is not a valid event: sends a dead letter if the
    /// settings allow one, and returns an error otherwise.
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

    /// Converts the row to a record with the header `mark`, and passes it (or its dead letter) to
    /// the sink.
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

    /// Converts the row to a record and passes it to the sink. If that fails, does not send a dead
    /// letter.
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
