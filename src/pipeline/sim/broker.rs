//! A simulated Kafka producer and its brokers. Deliveries are delayed, occur in any order across
//! partitions, and sometimes fail.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::world::{
    Cluster, DEAD_LETTER_TOPIC, PARTITIONS, Shared, is_oversize, is_refused, is_unroutable,
};
use crate::delivery::checkpoint::Checkpoint;
use crate::delivery::failure::{DeliveryFailure, RefusalCause, RefusedRecord, content};
use crate::delivery::isolation::Batching;
use crate::delivery::watermark::{Deliveries, Tag};
use crate::model::lsn::{Lsn, Position};
use crate::outbox::Record;
use crate::outbox::headers::POSITION_HEADER;
use crate::sink::{Answer, Commit, Preparation, Prepared, Produced, Sink, SinkError, TakeOver};

/// A simulated producer. When it is dropped, some of its queued records may still arrive.
pub(super) struct SimSink {
    producer: Arc<Producer>,
    window_records: usize,
    known: BTreeSet<String>,
    refused: Vec<RefusedRecord>,
    /// The last row that may have caused a batch to be rejected. Set only if records are sent one
    /// at a time to find the cause.
    suspected_until: Option<Position>,
    /// Commit LSNs of the transactions after `suspected_until` whose records were also sent one at
    /// a time.
    later_transactions: BTreeSet<Lsn>,
}

struct Producer {
    /// Maximum number of records in a batch. A batch belongs to one partition.
    batch: usize,
    shared: Shared,
    deliveries: Arc<Deliveries>,
    state: Mutex<State>,
    is_gone: AtomicBool,
}

#[derive(Default)]
struct State {
    /// The records that the producer has accepted but the brokers have not appended yet, by
    /// partition.
    queued: [VecDeque<Queued>; PARTITIONS],
    /// The records that the brokers have appended but the producer has not reported as delivered
    /// yet.
    appended: Vec<Tag>,
    /// With exactly-once delivery: this producer's epoch; zero until the producer has registered
    /// with the brokers.
    epoch: u64,
    /// With exactly-once delivery: the number of the open transaction.
    transaction: Option<u64>,
    has_failed: bool,
    /// The failure to report after a batch was rejected, and when to report it. Until then, the
    /// producer refuses further records without giving the reason.
    pending_failure: Option<(Instant, DeliveryFailure)>,
}

struct Queued {
    id: u64,
    tag: Tag,
    is_dead_letter: bool,
    /// Describes the record in the error that is reported if the brokers reject the record.
    record: RefusedRecord,
}

/// The configured maximum number of records in a batch.
const BATCH_RECORDS_MAX: u32 = 16;
/// Maximum number of transactions after the rejected batch from which rows may be sent one at a
/// time. After a batch is rejected, Walpost sends the suspected rows one at a time. If Walpost is
/// asked to stop, it also sends the remaining rows of the open transaction one at a time.
const TRANSACTIONS_AFTER_REJECTED_MAX: usize = 3;

impl SimSink {
    pub(super) fn new(
        shared: Shared,
        window_records: u64,
        batching: &Batching,
        deliveries: Arc<Deliveries>,
    ) -> Self {
        let batch = match batching.single {
            true => 1,
            false => (BATCH_RECORDS_MAX / batching.divisor.max(1)).max(1),
        };
        let producer = Arc::new(Producer {
            batch: usize::try_from(batch).expect("few"),
            shared,
            deliveries,
            state: Mutex::default(),
            is_gone: AtomicBool::new(false),
        });
        tokio::spawn(deliver_records(Arc::clone(&producer)));
        // If there are older rows, don't check which rows are sent one at a time, because older
        // rows get new positions each time they are copied.
        let suspected_until = match producer.shared.lock() {
            world if batching.single && !world.has_older => world.cluster.refused_until,
            _ => None,
        };
        Self {
            suspected_until,
            later_transactions: BTreeSet::new(),
            producer,
            window_records: usize::try_from(window_records).expect("few"),
            known: BTreeSet::new(),
            refused: batching.refused.clone(),
        }
    }
}

/// Delivers the producer's queued records, a few at a time.
async fn deliver_records(producer: Arc<Producer>) {
    loop {
        sleep(producer.pace(4000)).await;
        if producer.is_gone.load(Ordering::SeqCst) {
            return;
        }
        producer.step();
    }
}

/// Returns whether the brokers reject the batch.
fn is_batch_rejected(batch: &[Queued], cluster: &Cluster) -> bool {
    cluster.batch_max.is_some_and(|most| {
        let is_refused = |queued: &Queued| is_refused(queued.id) && !queued.is_dead_letter;
        batch.len() > most || batch.iter().any(is_refused)
    })
}

fn refusal(batch: &[Queued]) -> DeliveryFailure {
    let (first, last) = (&batch[0].record, &batch[batch.len() - 1].record);
    DeliveryFailure {
        reason: first.reason.clone(),
        permanent: true,
        refused: Some(Box::new(first.clone())),
        refused_until: Some(last.at),
    }
}

impl Producer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn step(&self) {
        let mut delivered = Vec::new();
        {
            let mut state = self.lock();
            let mut world = self.shared.lock();
            if let Some((_, failure)) = state
                .pending_failure
                .take_if(|(at, _)| Instant::now() >= *at)
            {
                self.deliveries.report_failure(failure);
            }
            if state.has_failed || !world.cluster.is_up {
                return;
            }
            if state.epoch != 0 && world.cluster.epoch != state.epoch {
                drop(world);
                self.fail(&mut state, "fenced");
                return;
            }
            // Abort an expired transaction only after checking the epoch, so that this producer
            // can't abort another producer's transaction.
            if state.epoch != 0 && world.cluster.abort_if_expired() {
                drop(world);
                self.fail(&mut state, "the transaction was open for too long");
                return;
            }
            // A slow link transfers one record at a time. Its transactions take longer, so it must
            // fail less often than a fast link. Otherwise, the transactions would never succeed.
            let (mut capacity, failure_odds) = match world.cluster.rate {
                Some(_) => (1, 20_000),
                None => (usize::MAX, 400),
            };
            let first = world.dice.usize(0..PARTITIONS);
            for partition in (first..PARTITIONS).chain(0..first) {
                let ready = state.queued[partition].len();
                let count = world.dice.usize(0..=ready).min(capacity);
                capacity -= count;
                let mut sent: VecDeque<_> = state.queued[partition].drain(..count).collect();
                while !sent.is_empty() {
                    let batch: Vec<_> = sent.drain(..self.batch.min(sent.len())).collect();
                    if is_batch_rejected(&batch, &world.cluster) {
                        // Keep the highest position of all rejected batches, because earlier rows
                        // may be resent and rejected again after a reconnect.
                        let last = batch.iter().map(|queued| queued.record.at).max();
                        world.cluster.refused_until = world.cluster.refused_until.max(last);
                        state.has_failed = true;
                        let pause = Duration::from_millis(world.dice.u64(100..300));
                        state.pending_failure = Some((Instant::now() + pause, refusal(&batch)));
                        return;
                    }
                    for queued in batch {
                        world
                            .cluster
                            .append(partition, queued.id, state.transaction);
                        state.appended.push(queued.tag);
                    }
                }
            }
            if !state.appended.is_empty() && world.dice.u16(0..failure_odds) == 0 {
                // The response for the appended records is lost, so they are not reported as
                // delivered.
                drop(world);
                self.fail(&mut state, "the connection to the broker was lost");
                return;
            }
            let count = world.dice.usize(0..=state.appended.len());
            for _ in 0..count {
                let which = world.dice.usize(0..state.appended.len());
                delivered.push(state.appended.swap_remove(which));
            }
        }
        self.deliveries.delivered(delivered);
    }

    fn fail(&self, state: &mut State, reason: &str) {
        state.has_failed = true;
        self.deliveries.report_failure(DeliveryFailure {
            refused: None,
            refused_until: None,
            reason: reason.to_owned(),
            permanent: false,
        });
    }

    fn is_flushed(&self) -> bool {
        let state = self.lock();
        state.appended.is_empty() && state.queued.iter().all(VecDeque::is_empty)
    }

    /// Returns how long to wait before the brokers can make progress: the time that a slow link
    /// takes to transfer one record, or otherwise a random delay of up to `most` microseconds.
    fn pace(&self, most: u64) -> Duration {
        let mut world = self.shared.lock();
        match world.cluster.rate {
            Some(rate) => Duration::from_micros(1_000_000 / rate),
            None => Duration::from_micros(world.dice.u64(100..most)),
        }
    }

    async fn pause(&self, micros: std::ops::Range<u64>) {
        let pause = self.shared.lock().dice.u64(micros);
        sleep(Duration::from_micros(pause)).await;
    }

    async fn take_over(&self) -> Result<Option<Checkpoint>, SinkError> {
        self.pause(100..20_000).await;
        while !self.shared.lock().cluster.is_up {
            sleep(Duration::from_millis(10)).await;
        }
        let mut world = self.shared.lock();
        if world.chance(3) {
            return Err(SinkError::Broken("take-over".to_owned()));
        }
        let epoch = world.cluster.take_over();
        let transaction = world.cluster.begin();
        let found = world.cluster.checkpoint.clone();
        drop(world);
        let mut state = self.lock();
        state.epoch = epoch;
        state.transaction = Some(transaction);
        Ok(found)
    }

    async fn commit(&self, checkpoint: Checkpoint) -> Result<(), SinkError> {
        while !self.is_flushed() {
            if self.lock().has_failed {
                return Err(SinkError::Broken("abort".to_owned()));
            }
            sleep(self.pace(1000)).await;
        }
        self.pause(100..10_000).await;
        let mut state = self.lock();
        let mut world = self.shared.lock();
        let Some(number) = state.transaction.take() else {
            return Err(SinkError::Broken("no transaction".to_owned()));
        };
        if state.has_failed {
            return Err(SinkError::Broken("abort".to_owned()));
        }
        if world.cluster.epoch != state.epoch {
            return Err(SinkError::Fenced("commit".to_owned()));
        }
        let outcome = world.dice.u8(0..100);
        let checkpoint = (outcome != 0).then_some(checkpoint);
        if !world.cluster.end_transaction(number, checkpoint) {
            return Err(SinkError::Fenced("commit".to_owned()));
        }
        if outcome < 3 {
            // Either the transaction was aborted, or it was committed but the response was lost.
            // The producer can't tell which.
            return Err(SinkError::Broken("commit".to_owned()));
        }
        state.transaction = Some(world.cluster.begin());
        Ok(())
    }
}

impl Sink for SimSink {
    fn produce(&mut self, record: &Record<'_>, tag: Tag) -> Result<Produced, SinkError> {
        if !self.known.contains(record.topic) {
            return Ok(Produced::NewTopic);
        }
        {
            let mut world = self.producer.shared.lock();
            // With a slow link, only the window limits how many records are accepted.
            if world.cluster.rate.is_none() && world.chance(2) {
                return Ok(Produced::Full);
            }
        }
        let number = |bytes: Option<&[u8]>| -> u64 {
            let text = std::str::from_utf8(bytes.unwrap_or_default());
            text.ok()
                .and_then(|text| text.parse().ok())
                .expect("a number")
        };
        let partition = usize::try_from(number(record.key)).expect("a partition");
        let mut headers = record.headers.iter();
        let id = number(headers.find(|(name, _)| *name == "id").and_then(|id| id.1));
        let is_dead_letter = record.topic == DEAD_LETTER_TOPIC;
        if let Some(refused) = self.refused.iter().find(|refused| refused.is(record)) {
            return Err(SinkError::from(refused));
        }
        if is_oversize(id) && !is_dead_letter {
            return Err(SinkError::TooLarge {
                topic: record.topic.to_owned(),
                bytes: 0,
                limit: 0,
                brokers: String::new(),
            });
        }
        let is_refused = is_refused(id) && self.producer.shared.lock().cluster.batch_max.is_some();
        let must_be_dead_letter =
            is_oversize(id) || is_unroutable(id) || is_refused && is_dead_letter;
        let is_too_large = is_oversize(id) || is_refused && is_dead_letter;
        let payload = record.payload.map(|_| number(record.payload));
        if is_dead_letter != must_be_dead_letter || payload != (!is_too_large).then_some(id) {
            let text = format!(
                "event {id} has the wrong topic or payload: topic {:?}, payload {payload:?}",
                record.topic
            );
            self.producer.shared.lock().break_rule(text);
        }
        let mut state = self.producer.lock();
        if state.has_failed {
            return Err(SinkError::Broken("the producer has failed".to_owned()));
        }
        let mut headers = record.headers.iter();
        let at = headers.find(|(name, _)| *name == POSITION_HEADER);
        let at = std::str::from_utf8(at.and_then(|at| at.1).unwrap_or_default());
        let at = at.ok().and_then(|at| at.parse().ok()).expect("a position");
        self.producer.shared.lock().check_position(id, at);
        if self.suspected_until.is_some_and(|until| until < at) {
            self.later_transactions.insert(at.commit);
            if self.later_transactions.len() > TRANSACTIONS_AFTER_REJECTED_MAX {
                let text = format!(
                    "event {id} was sent in a batch of its own, although it was not in a rejected batch"
                );
                self.producer.shared.lock().break_rule(text);
            }
        }
        state.queued[partition].push_back(Queued {
            id,
            tag,
            is_dead_letter,
            record: RefusedRecord {
                at,
                topic: record.topic.to_owned(),
                bytes: 0,
                content: content(record.key, record.payload),
                cause: RefusalCause::Size,
                reason: format!("event {id} was rejected"),
            },
        });
        let queued = state.queued.iter().map(VecDeque::len).sum::<usize>();
        let in_flight = queued + state.appended.len();
        if in_flight > self.window_records {
            let text = format!(
                "{in_flight} records are in flight, but the window allows only {}",
                self.window_records
            );
            self.producer.shared.lock().break_rule(text);
        }
        Ok(Produced::Taken)
    }

    fn flush(&mut self, _busy: bool) -> Result<(), SinkError> {
        Ok(())
    }

    fn prepare(&mut self, _topic: &str, _ahead: impl FnOnce() -> Vec<String>) -> Preparation {
        let producer = Arc::clone(&self.producer);
        Box::pin(async move {
            producer.pause(100..5000).await;
            Ok(Prepared::Usable {
                partitions: PARTITIONS,
            })
        })
    }

    fn prepared(&mut self, topic: &str, _prepared: Prepared) -> Result<(), SinkError> {
        self.known.insert(topic.to_owned());
        Ok(())
    }

    fn wait_for_response(&mut self) -> Answer {
        let producer = Arc::clone(&self.producer);
        Box::pin(async move {
            while !producer.shared.lock().cluster.is_up {
                producer.pause(100..20_000).await;
            }
        })
    }

    fn take_over(&mut self) -> TakeOver<'_> {
        let producer = Arc::clone(&self.producer);
        Box::pin(async move { producer.take_over().await })
    }

    fn commit(&mut self, checkpoint: &mut Checkpoint) -> Commit {
        let producer = Arc::clone(&self.producer);
        let checkpoint = checkpoint.clone();
        Box::pin(async move { producer.commit(checkpoint).await })
    }
}

impl Drop for SimSink {
    fn drop(&mut self) {
        self.producer.is_gone.store(true, Ordering::SeqCst);
        let mut state = self.producer.lock();
        let mut world = self.producer.shared.lock();
        if state.has_failed || world.exactly_once && world.cluster.epoch != state.epoch {
            return;
        }
        // Some of the queued records still arrive, but are not reported as delivered.
        for partition in 0..PARTITIONS {
            let ready = state.queued[partition].len();
            let count = world.dice.usize(0..=ready);
            let mut sent: VecDeque<_> = state.queued[partition].drain(..count).collect();
            while !sent.is_empty() {
                let batch: Vec<_> = sent.drain(..self.producer.batch.min(sent.len())).collect();
                if is_batch_rejected(&batch, &world.cluster) {
                    return;
                }
                for queued in batch {
                    world
                        .cluster
                        .append(partition, queued.id, state.transaction);
                }
            }
        }
    }
}
