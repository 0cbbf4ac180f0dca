//! Consumes records and timestamps their arrival.

use std::time::{Duration, Instant};

use rdkafka::Offset;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::message::Message;
use rdkafka::producer::{BaseRecord, DefaultProducerContext, ThreadedProducer};
use serde::Deserialize;

use super::{Sample, Times, latencies, now, sleep_until};
use crate::bed::{STALL_TIMEOUT, TestBed};
use crate::topic::Topic;

/// A consumer configured to fetch each record as soon as possible.
pub(super) struct Receiver {
    consumer: BaseConsumer,
}

/// The measurements taken while events are written at a steady rate.
pub(super) struct Samples {
    /// The samples taken after the warm-up.
    pub(super) counted: Vec<Sample>,
    /// The CPU time that the measured program used between the first and the last sample in
    /// `counted`.
    pub(super) cpu_seconds: f64,
}

#[derive(Deserialize)]
struct Event {
    due: i64,
    inserted: i64,
}

impl Receiver {
    pub(super) fn new(bed: &TestBed, topic: &Topic<'_>) -> Self {
        let consumer: BaseConsumer = bed
            .broker
            .client()
            .set("group.id", "bench")
            .set("enable.auto.commit", "false")
            .set("check.crcs", "false")
            .set("fetch.min.bytes", "1")
            .set("fetch.wait.max.ms", "100")
            .set("fetch.error.backoff.ms", "5")
            .create()
            .unwrap();
        consumer
            .assign(&topic.partitions_at(Offset::Beginning))
            .unwrap();
        Self { consumer }
    }

    /// Receives and discards the given number of records.
    pub(super) fn receive(&mut self, records: usize) {
        for _ in 0..records {
            self.next();
        }
    }

    /// Receives the given number of records. To exclude the warm-up, returns samples only for
    /// records whose transactions were scheduled for `counted_from` or later.
    pub(super) fn receive_from(
        &mut self,
        records: usize,
        counted_from: i64,
        cpu_seconds: impl Fn() -> f64,
    ) -> Samples {
        let mut counted = Vec::with_capacity(records);
        let mut cpu_before = None;
        for _ in 0..records {
            let sample = self.next();
            if sample.due >= counted_from {
                cpu_before.get_or_insert_with(&cpu_seconds);
                counted.push(sample);
            }
        }
        Samples {
            counted,
            cpu_seconds: cpu_seconds() - cpu_before.expect("at least one sample was counted"),
        }
    }

    fn next(&mut self) -> Sample {
        let began = Instant::now();
        while began.elapsed() < STALL_TIMEOUT {
            match self.consumer.poll(Duration::from_millis(200)) {
                None => {}
                Some(Ok(record)) => {
                    let received = now();
                    let payload = record.payload().expect("a payload");
                    let Event { due, inserted } = serde_json::from_slice(payload).unwrap();
                    return Sample {
                        due,
                        inserted,
                        received,
                    };
                }
                Some(Err(error)) => eprintln!("  consumer: {error}"),
            }
        }
        panic!("no record arrived for {STALL_TIMEOUT:?}");
    }
}

/// Measures the latency from a producer to the consumer at the given rate, in milliseconds. No
/// program that reads events from a database can achieve a lower latency.
pub(super) fn floor(bed: &TestBed, topic: &Topic<'_>, per_second: u32, times: Times) -> Vec<f64> {
    let producer: ThreadedProducer<DefaultProducerContext> = bed
        .broker
        .client()
        .set("enable.idempotence", "true")
        .set("linger.ms", "0")
        .create()
        .unwrap();
    let mut receiver = Receiver::new(bed, topic);
    // Sending one record first makes the clients fetch metadata and open their connections, which
    // would otherwise be measured too.
    send(&producer, topic, 0);
    receiver.receive(1);
    let records = u64::from(per_second) * times.warm_up.as_secs();
    let begin = now();
    let samples = std::thread::scope(|scope| {
        scope.spawn(|| {
            for record in 0..records {
                let since_begin = record * 1_000_000 / u64::from(per_second);
                sleep_until(begin + i64::try_from(since_begin).unwrap());
                send(&producer, topic, record);
            }
        });
        receiver.receive_from(usize::try_from(records).unwrap(), begin, || 0.0)
    });
    latencies(&samples.counted, |sample| sample.inserted)
}

fn send(producer: &ThreadedProducer<DefaultProducerContext>, topic: &Topic<'_>, number: u64) {
    let now = now();
    let payload = format!(r#"{{"due":{now},"inserted":{now},"pad":"{:0170}"}}"#, 0);
    let key = number.to_string();
    let record = BaseRecord::to(&topic.name).key(&key).payload(&payload);
    if let Err((error, _)) = producer.send(record) {
        panic!("failed to send: {error}");
    }
}
