//! One record, an event's or a dead letter's, is counted and given to the sink.

use super::Step;
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::lsn::Position;
use crate::outbox::Record;
use crate::outbox::route::RouteError;
use crate::pipeline::decode::error::CoreError;
use crate::sink::{Produced, Sink, SinkError};

/// Bytes of the window that a record takes beside its key, value and headers: what librdkafka
/// keeps for each message and for each header, and what the allocator has left over beside them.
const RECORD_OVERHEAD: usize = 384;
const HEADER_OVERHEAD: usize = 64;

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
    pub(super) fn at(self, at: Position, row: impl FnOnce() -> String) -> CoreError {
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
