//! Whether a consumer has read a partition as far as it is known to go.
//!
//! A consumer is told of a partition's end by the broker that it reads from, where that broker has no more
//! to give. Others may have more: a follower is behind its leader (`client.rack`), and a leader that was
//! just elected gives nothing beyond what it knows the followers to have, which can be less than its
//! predecessor gave away. Who takes that for the end misses what is behind it.

use std::collections::HashMap;
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::KafkaResult;

use super::native;

/// How long one question may take.
const ANSWER: Duration = Duration::from_secs(10);
/// Before a partition is read again from where it seemed to end.
const PAUSE: Duration = Duration::from_millis(100);

/// The ends of a topic's partitions, as they are told to one consumer.
pub(super) struct Ends<'c, C: ConsumerContext + 'static> {
    consumer: &'c BaseConsumer<C>,
    topic: &'c str,
    /// Partitions that are read again.
    again: HashMap<i32, Again>,
}

/// A partition is read again.
struct Again {
    /// From here.
    from: i64,
    /// Nothing came since.
    is_quiet: bool,
    /// The broker that was read from knew all of it before.
    was_all: bool,
}

/// Has a consumer read from leaders alone.
pub(super) fn read_from_leaders(mut config: ClientConfig) -> ClientConfig {
    config.remove("client.rack");
    config
}

impl<'c, C: ConsumerContext + 'static> Ends<'c, C> {
    /// Of a topic that `consumer` begins to read.
    pub(super) fn of(consumer: &'c BaseConsumer<C>, topic: &'c str) -> Self {
        Self {
            consumer,
            topic,
            again: HashMap::new(),
        }
    }

    /// A record of the partition came.
    pub(super) fn record(&mut self, partition: i32) {
        if !self.again.is_empty()
            && let Some(again) = self.again.get_mut(&partition)
        {
            again.is_quiet = false;
        }
    }

    /// The consumer was told that the partition has ended, which it is known to go on to `end`: whether
    /// all before that was read. If not, it is read again, from where it seemed to end: its end will be told
    /// once more. `start` is where reading began. Blocks.
    ///
    /// # Errors
    /// The brokers don't answer.
    pub(super) fn told(&mut self, partition: i32, start: i64, end: i64) -> KafkaResult<bool> {
        let position = self.consumer.position()?;
        let position = position.find_partition(self.topic, partition);
        let at = match position.map(|found| found.offset()) {
            // Behind the last record, or the last end of a transaction, which is none.
            Some(Offset::Offset(at)) => at.max(start),
            _ => start,
        };
        let before = self.again.get(&partition);
        let at = before.map_or(at, |before| before.from.max(at));
        if at >= end {
            return Ok(true);
        }
        // What the broker knows by now says nothing of an end that it told before: it can have caught up
        // since, and what it gave then is still to be polled.
        let is_all = self.is_all(partition, end)?;
        if is_all && before.is_some_and(|before| before.is_quiet && before.was_all) {
            return Ok(true);
        }
        std::thread::sleep(PAUSE);
        let again = Again {
            from: at,
            is_quiet: true,
            was_all: is_all,
        };
        self.again.insert(partition, again);
        // What was told before that is told no more.
        self.consumer
            .seek(self.topic, partition, Offset::Offset(at), ANSWER)?;
        Ok(false)
    }

    /// The last offsets need not have anything to be read: compaction removes it. They have been passed,
    /// where the broker that was read from knows them, and hides nothing before them.
    fn is_all(&self, partition: i32, end: i64) -> KafkaResult<bool> {
        let (_, to_be_read) = self
            .consumer
            .fetch_watermarks(self.topic, partition, ANSWER)?;
        let known = native::end_known_to_reader(self.consumer, self.topic, partition)?;
        Ok(to_be_read.min(known) >= end)
    }
}
