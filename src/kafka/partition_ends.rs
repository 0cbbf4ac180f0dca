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
/// Delay before a partition is read again from its reported end.
const RETRY_DELAY: Duration = Duration::from_millis(100);

/// Checks whether a partition has really been read to its end when a consumer reports that end.
pub(super) struct PartitionEnds<'c, C: ConsumerContext + 'static> {
    consumer: &'c BaseConsumer<C>,
    topic: &'c str,
    /// Partitions that are being read again from their reported ends.
    again: HashMap<i32, Retry>,
}

/// State of a partition that is being read again from its reported end.
struct Retry {
    /// The offset from which the partition is read again.
    from: i64,
    /// Whether no record has been received since the consumer last returned to `from`.
    is_quiet: bool,
    /// Whether the broker could return all records before the partition's known end when the
    /// consumer last returned to `from`.
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

    /// Marks the partition as still returning records, so that it is not considered finished. Must
    /// be called for each record received.
    pub(super) fn record(&mut self, partition: i32) {
        if !self.again.is_empty()
            && let Some(again) = self.again.get_mut(&partition)
        {
            again.is_quiet = false;
        }
    }

    /// Handles a reported end of a partition whose actual end is known to be `end`. Returns whether
    /// everything before `end` has been read.
    ///
    /// If the function returns false, the consumer reads again from the reported end, and then
    /// reports an end again. `start` is the offset at which reading started. Blocks while the
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

    /// Returns `true` if the broker that the consumer reads from has the partition up to `end`, and
    /// can return all records before `end`.
    ///
    /// If the broker can return all records before `end`, a reported end means that everything was
    /// read, even if the last record has a lower offset: compaction may have removed the records
    /// after it.
    fn is_complete(&self, partition: i32, end: i64) -> KafkaResult<bool> {
        let (_, readable) =
            self.consumer
                .fetch_watermarks(self.topic, partition, REQUEST_TIMEOUT)?;
        let known = native::end_known_to_reader(self.consumer, self.topic, partition)?;
        Ok(readable.min(known) >= end)
    }
}
