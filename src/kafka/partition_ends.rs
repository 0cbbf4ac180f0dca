//! Detects when a consumer has read a partition up to a known offset.
//!
//! A broker reports the end of a partition when it has no more records to return. Other brokers may
//! have more records: a follower (`client.rack`) lags behind its leader, and the high watermark of
//! a newly elected leader can be lower than its predecessor's. A consumer that treats the reported
//! end as final misses the remaining records.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaResult;

use super::native;

/// Timeout for a single request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay before the consumer resumes reading a partition whose end it has reported.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Determines whether a partition has really been read to its end when a consumer reports the end
/// of the partition.
pub(super) struct PartitionEnds<'c, C: ConsumerContext + 'static> {
    consumer: &'c BaseConsumer<C>,
    topic: &'c str,
    /// Partitions that the consumer has resumed reading after it reported their end.
    again: HashMap<i32, Retry>,
}

/// State of a partition that the consumer has resumed reading after it reported the partition's
/// end.
struct Retry {
    /// The offset at which the consumer last resumed reading.
    from: i64,
    /// Whether no record has been received since the consumer last resumed reading.
    is_quiet: bool,
    /// Whether all records before the partition's known end were available from the broker when the
    /// consumer last resumed reading.
    was_complete: bool,
}

/// Configures a consumer to read only from leaders.
pub(super) fn read_from_leaders(mut config: ClientConfig) -> ClientConfig {
    config.remove("client.rack");
    config
}

impl<'c, C: ConsumerContext + 'static> PartitionEnds<'c, C> {
    /// Creates a checker for a topic that `consumer` is about to read.
    pub(super) fn new(consumer: &'c BaseConsumer<C>, topic: &'c str) -> Self {
        Self {
            consumer,
            topic,
            again: HashMap::new(),
        }
    }

    /// Notes that a record was received from the partition, so that the next time the consumer
    /// reports the partition's end, the end must be confirmed again. Must be called for each record
    /// received.
    pub(super) fn record(&mut self, partition: i32) {
        if !self.again.is_empty()
            && let Some(again) = self.again.get_mut(&partition)
        {
            again.is_quiet = false;
        }
    }

    /// Handles the consumer's report that it has reached the end of a partition, whose actual end
    /// is known to be `end`. Returns whether all records before `end` have been read.
    ///
    /// If the function returns false, the consumer resumes reading at its current position, and
    /// will report an end again. `start` is the offset at which reading started. Blocks while the
    /// brokers are queried.
    ///
    /// # Errors
    /// Returns an error if the brokers don't respond.
    pub(super) fn handle_reported_end(
        &mut self,
        partition: i32,
        start: i64,
        end: i64,
    ) -> KafkaResult<bool> {
        let position = self.consumer.position()?;
        let position = position.find_partition(self.topic, partition);
        let offset = match position.map(|found| found.offset()) {
            // The position is the offset after the last record or transaction marker. Markers are
            // not returned as records.
            Some(Offset::Offset(offset)) => offset.max(start),
            _ => start,
        };
        let previous = self.again.get(&partition);
        let offset = previous.map_or(offset, |previous| previous.from.max(offset));
        if offset >= end {
            return Ok(true);
        }
        // The broker's current state alone does not confirm an end that was reported earlier: the
        // broker may have caught up in the meantime, and records before `end` may not have been
        // polled yet.
        let is_complete = self.is_complete(partition, end)?;
        if is_complete
            && previous.is_some_and(|previous| previous.is_quiet && previous.was_complete)
        {
            return Ok(true);
        }
        std::thread::sleep(RETRY_DELAY);
        let again = Retry {
            from: offset,
            is_quiet: true,
            was_complete: is_complete,
        };
        self.again.insert(partition, again);
        // Seeking discards ends that were reported earlier.
        self.consumer.seek(
            self.topic,
            partition,
            Offset::Offset(offset),
            REQUEST_TIMEOUT,
        )?;
        Ok(false)
    }

    /// Returns `true` if the broker that the consumer reads from has all records before `end`, and
    /// can return them.
    ///
    /// If the broker can return all records before `end`, a reported end means that no unread
    /// records remain before `end`. The last record may have a much lower offset than `end`,
    /// because compaction may have removed later records.
    fn is_complete(&self, partition: i32, end: i64) -> KafkaResult<bool> {
        let (_, readable) =
            self.consumer
                .fetch_watermarks(self.topic, partition, REQUEST_TIMEOUT)?;
        let known = native::end_known_to_reader(self.consumer, self.topic, partition)?;
        Ok(readable.min(known) >= end)
    }
}
