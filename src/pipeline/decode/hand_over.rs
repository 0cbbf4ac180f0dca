//! Passes the records of events and dead letters to the sink, and adds each record to the window of
//! unacknowledged records.

use super::Step;
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::lsn::Position;
use crate::outbox::Record;
use crate::outbox::route::RouteError;
use crate::pipeline::decode::error::CoreError;
use crate::sink::{Produced, Sink, SinkError};

/// Number of bytes that each record counts toward `window_bytes`, in addition to the size of its
/// key, value and headers. Accounts for the memory that librdkafka allocates per message, and for
/// allocator overhead.
const RECORD_OVERHEAD: usize = 384;
/// Number of bytes that each header counts toward `window_bytes`, in addition to the size of its
/// name and value.
const HEADER_OVERHEAD: usize = 64;

/// The name and value of the header that identifies a record's event.
pub(crate) type Mark<'m> = (&'static str, &'m [u8]);

/// The reason why the sink has accepted neither a record nor a dead letter for an event.
#[derive(Debug)]
pub(crate) enum Undelivered {
    /// The row can't be converted to a record.
    Route(RouteError),
    /// The sink rejected the record.
    Produce(SinkError),
    /// The sink rejected the dead letter. `reason` explains why the original row was dead-lettered.
    DeadLetter { error: SinkError, reason: String },
    /// The row is not allowed at this point of the stream, for example because it is outside a
    /// transaction.
    Order(OrderError),
}

impl From<OrderError> for Undelivered {
    fn from(error: OrderError) -> Self {
        Self::Order(error)
    }
}

impl Undelivered {
    /// Converts this error to a [`CoreError`] for the event at position `at`. `row` describes the
    /// event's row.
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

/// Passes a record to the sink, and adds it to the window of unacknowledged records. The inner
/// result is an error if the sink rejected the record.
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

/// Returns how many bytes a record counts toward `window_bytes`.
fn cost(record: &Record<'_>) -> u64 {
    let len = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len);
    let headers = record
        .headers
        .iter()
        .map(|(name, value)| name.len() + len(value) + HEADER_OVERHEAD)
        .sum::<usize>();
    (len(record.key) + len(record.payload) + headers + RECORD_OVERHEAD) as u64
}
