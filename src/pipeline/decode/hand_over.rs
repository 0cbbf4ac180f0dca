//! Passes the record of an event or a dead letter to the sink, and counts it in the window.

use super::Step;
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::lsn::Position;
use crate::outbox::Record;
use crate::outbox::route::RouteError;
use crate::pipeline::decode::error::CoreError;
use crate::sink::{Produced, Sink, SinkError};

/// How much of the window each record uses in addition to its key, value and headers, in bytes:
/// the memory that librdkafka allocates for a message, and the overhead of the allocator.
const RECORD_OVERHEAD: usize = 384;
/// How much of the window each header uses in addition to its name and value, in bytes.
const HEADER_OVERHEAD: usize = 64;

/// A header that identifies the event of a record.
pub(crate) type Mark<'m> = (&'static str, &'m [u8]);

/// Why neither a record nor a dead letter was passed to the sink.
#[derive(Debug)]
pub(crate) enum Undelivered {
    /// The row can't be converted to a record.
    Route(RouteError),
    /// The sink rejected the record.
    Produce(SinkError),
    /// The sink rejected the dead letter. `reason` is why the original row was dead-lettered.
    DeadLetter { error: SinkError, reason: String },
    /// The record occurs at an invalid point of the stream.
    Order(OrderError),
}

impl From<OrderError> for Undelivered {
    fn from(error: OrderError) -> Self {
        Self::Order(error)
    }
}

impl Undelivered {
    /// Converts the error for the event at this position. `row` returns a description of the row.
    pub(super) fn into_core_error(self, at: Position, row: impl FnOnce() -> String) -> CoreError {
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

/// Passes a record to the sink and counts it in the window. The inner error means that the sink
/// rejected the record.
#[inline]
pub(super) fn send_record(
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

/// Returns how much of the window a record uses, in bytes.
fn cost(record: &Record<'_>) -> u64 {
    let len = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len);
    let headers = record
        .headers
        .iter()
        .map(|(name, value)| name.len() + len(value) + HEADER_OVERHEAD)
        .sum::<usize>();
    (len(record.key) + len(record.payload) + headers + RECORD_OVERHEAD) as u64
}
