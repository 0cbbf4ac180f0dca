//! Sends rows from the table to the sink. The number of unacknowledged records is limited by a
//! window.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::run::RunState;
use super::{ReplayEnd, ReplayError, ReplayPlan};
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::dead_letters::DeadLetterCounts;
use crate::outbox::columns::Row;
use crate::outbox::headers::REPLAY_HEADER;
use crate::pipeline::decode::Step;
use crate::pipeline::decode::dead_letters::DeadLetters;
use crate::pipeline::decode::delivery::Delivery;
use crate::postgres::catalog::copy::CopiedRow;
use crate::sink::Sink;

/// Maximum interval between journal entries about the progress of a replay. The first entries are
/// written at shorter intervals.
const JOURNAL_INTERVAL: Duration = Duration::from_secs(10);
const FIRST_JOURNAL_INTERVAL: Duration = Duration::from_secs(1);
/// How often the key of the most recently sent row is saved. The journal can record a saved key
/// once Kafka has acknowledged the row.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How often the sink performs maintenance while the sender waits.
const SINK_MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// Limits how many rows are sent at once after a replay has fallen behind its rate: at most the
/// rows that are due in a period of this length.
const CATCH_UP_LIMIT: Duration = Duration::from_millis(100);

/// Sends the rows of a replay.
pub(super) struct Sender<'p, S, F> {
    plan: &'p ReplayPlan<'p>,
    sink: &'p mut S,
    delivery: Delivery,
    /// The number of rows that the sink has accepted.
    accepted: u64,
    /// The key of the last accepted row.
    latest_key: Vec<String>,
    /// Rows that can be recorded in the journal once Kafka has acknowledged them. Each entry is the
    /// one-based number and the key of a row.
    marks: VecDeque<(u64, Vec<String>)>,
    /// The number of rows that Kafka has acknowledged, not counting any row after the first
    /// unacknowledged one.
    pub(super) acknowledged: u64,
    /// The number and key of the last row that Kafka has acknowledged, among the rows that were in
    /// `marks`.
    pub(super) last: Option<(u64, Vec<String>)>,
    marked_at: Instant,
    recorded_at: Instant,
    record_interval: Duration,
    on_progress: F,
}

/// The reason why the sender stopped waiting.
enum SendReadiness {
    Ready,
    Stop,
}

impl<'p, S: Sink, F: FnMut(u64)> Sender<'p, S, F> {
    pub(super) fn new(
        plan: &'p ReplayPlan<'p>,
        sink: &'p mut S,
        watermark: Watermark,
        on_progress: F,
    ) -> Self {
        let now = Instant::now();
        let mut delivery = Delivery::new(watermark);
        delivery.dead_letters = plan.dead_letters();
        Self {
            plan,
            sink,
            delivery,
            accepted: 0,
            latest_key: vec![String::new(); plan.planned.order.len()],
            marks: VecDeque::new(),
            acknowledged: 0,
            last: None,
            marked_at: now,
            recorded_at: now,
            record_interval: FIRST_JOURNAL_INTERVAL,
            on_progress,
        }
    }

    pub(super) async fn send_all(
        &mut self,
        rate: Option<u32>,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<ReplayEnd, ReplayError> {
        let plan = self.plan;
        let mut rows = plan.copy().await?;
        let mut rate = rate.map(Rate::new);
        while let Some(copied) = rows.next().await? {
            if let Some(rate) = &mut rate
                && let Some(due) = rate.due(Instant::now())
                && let SendReadiness::Stop = self.wait_until(due, stop).await?
            {
                return Ok(ReplayEnd::Stopped);
            }
            if *stop.borrow() {
                return Ok(ReplayEnd::Stopped);
            }
            if let SendReadiness::Stop = self.send_row(&copied, stop).await? {
                return Ok(ReplayEnd::Stopped);
            }
            self.update_progress(&copied).await?;
        }
        match self.wait_until_empty(stop).await? {
            SendReadiness::Ready => Ok(ReplayEnd::Complete),
            SendReadiness::Stop => Ok(ReplayEnd::Stopped),
        }
    }

    /// Waits until Kafka has acknowledged the rows in flight, but no longer than the drain timeout.
    /// Rows that are not acknowledged within this time are resent when the replay is resumed.
    pub(super) async fn settle(&mut self) {
        let limit = self.plan.settings.drain_timeout;
        let (_never, mut stop) = watch::channel(false);
        if self.accepted > 0 {
            self.marks
                .push_back((self.accepted, self.latest_key.clone()));
        }
        // Ignore errors, because the caller already has the error that caused the replay to fail.
        let _ = timeout(limit, self.wait_until_empty(&mut stop)).await;
        self.update_sent();
    }

    /// Passes a row to the sink, or a dead letter that replaces the row.
    async fn send_row(
        &mut self,
        copied: &CopiedRow<'_>,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<SendReadiness, ReplayError> {
        self.delivery.watermark.begin_row()?;
        loop {
            check_failure(&self.delivery.watermark)?;
            match self.hand_over(&copied.row)? {
                Step::Done | Step::Answer => break,
                Step::Full => {
                    if let SendReadiness::Stop =
                        wait_for_space(&self.delivery.watermark, self.sink, stop).await?
                    {
                        return Ok(SendReadiness::Stop);
                    }
                }
                Step::NewTopic(topic) => {
                    let preparation = self.sink.prepare(&topic, Vec::new);
                    let prepared = tokio::select! {
                        biased;
                        () = stopped(stop) => return Ok(SendReadiness::Stop),
                        prepared = preparation => prepared,
                    };
                    let ready = prepared.and_then(|state| self.sink.prepared(&topic, state));
                    ready.map_err(|error| ReplayError::Produce {
                        row: self.plan.mapping.describe(&copied.row),
                        error,
                    })?;
                }
                // `NewTable` and `SetAside` are returned only for frames from the replication
                // stream.
                Step::NewTable(_) | Step::SetAside(_) => return Err(OrderError::Stray.into()),
            }
        }
        self.delivery.watermark.end_row()?;
        self.accepted += 1;
        Ok(SendReadiness::Ready)
    }

    fn hand_over(&mut self, row: &Row<'_>) -> Result<Step, ReplayError> {
        let mapping = &self.plan.mapping;
        let mut run = Uuid::encode_buffer();
        let run = self.plan.run.hyphenated().encode_lower(&mut run).as_bytes();
        let mark = (REPLAY_HEADER, run);
        let handed = self.delivery.hand_over(mapping, row, mark, self.sink);
        handed.map_err(|error| ReplayError::from_undelivered(error, || mapping.describe(row)))
    }

    /// Saves the key of the row and records the progress in the journal, each at its own interval.
    async fn update_progress(&mut self, copied: &CopiedRow<'_>) -> Result<(), ReplayError> {
        for (index, value) in self.latest_key.iter_mut().enumerate() {
            value.clear();
            value.push_str(&String::from_utf8_lossy(copied.key(index)));
        }
        let now = Instant::now();
        if now.duration_since(self.marked_at) < PROGRESS_INTERVAL {
            return Ok(());
        }
        self.marked_at = now;
        self.marks
            .push_back((self.accepted, self.latest_key.clone()));
        self.update_sent();
        if now.duration_since(self.recorded_at) >= self.record_interval {
            self.recorded_at = now;
            self.record_interval = (self.record_interval * 2).min(JOURNAL_INTERVAL);
            let sent = self.plan.sent_before + self.last_number();
            let last = self.last.as_ref();
            self.plan
                .record_progress(RunState::Going, sent, last, None)
                .await?;
        }
        Ok(())
    }

    /// Updates the number of rows that Kafka has acknowledged.
    pub(super) fn update_sent(&mut self) {
        let acknowledged = self.delivery.watermark.durable_rows();
        (self.on_progress)(acknowledged - self.acknowledged);
        self.acknowledged = acknowledged;
        while self
            .marks
            .front()
            .is_some_and(|(number, _)| *number <= acknowledged)
        {
            self.last = self.marks.pop_front();
        }
    }

    /// Returns the number of acknowledged rows that the journal can record.
    pub(super) fn last_number(&self) -> u64 {
        self.last.as_ref().map_or(0, |(number, _)| *number)
    }

    /// Returns the number of dead letters that the sink has accepted.
    pub(super) fn dead_letters(&self) -> DeadLetterCounts {
        let letters = self.delivery.dead_letters.as_ref();
        letters.map(DeadLetters::counts).unwrap_or_default()
    }

    async fn wait_until(
        &mut self,
        due: Instant,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<SendReadiness, ReplayError> {
        self.sink.flush(false)?;
        loop {
            check_failure(&self.delivery.watermark)?;
            tokio::select! {
                biased;
                () = stopped(stop) => return Ok(SendReadiness::Stop),
                () = sleep_until(due) => return Ok(SendReadiness::Ready),
                () = sleep(SINK_MAINTENANCE_INTERVAL) => self.sink.tend(),
            }
        }
    }

    /// Resolves when Kafka has acknowledged all records that the sink accepted.
    async fn wait_until_empty(
        &mut self,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<SendReadiness, ReplayError> {
        self.sink.flush(false)?;
        loop {
            check_failure(&self.delivery.watermark)?;
            self.update_sent();
            if self.delivery.watermark.in_flight().records == 0 {
                return Ok(SendReadiness::Ready);
            }
            tokio::select! {
                biased;
                () = stopped(stop) => return Ok(SendReadiness::Stop),
                () = self.delivery.watermark.empty() => {}
                () = sleep(SINK_MAINTENANCE_INTERVAL) => self.sink.tend(),
            }
        }
    }
}

/// Waits until the window may have space for another record, until the sink is due for maintenance,
/// or until the replay is asked to stop.
async fn wait_for_space(
    watermark: &Watermark,
    sink: &mut impl Sink,
    stop: &mut watch::Receiver<bool>,
) -> Result<SendReadiness, ReplayError> {
    sink.flush(false)?;
    tokio::select! {
        biased;
        () = stopped(stop) => return Ok(SendReadiness::Stop),
        () = watermark.wait_for_space() => {}
        () = sleep(SINK_MAINTENANCE_INTERVAL) => sink.tend(),
    }
    Ok(SendReadiness::Ready)
}

/// Returns an error if a record was rejected, because a rejected record blocks all later records.
fn check_failure(watermark: &Watermark) -> Result<(), ReplayError> {
    match watermark.deliveries().failure() {
        Some(failure) => Err(ReplayError::Delivery(failure)),
        None => Ok(()),
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // If the channel's sender was dropped, the replay can no longer be asked to stop, so wait
    // indefinitely.
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending().await
    }
}

/// Limits the number of rows per second.
struct Rate {
    interval: Duration,
    due: Option<Instant>,
}

impl Rate {
    fn new(per_second: u32) -> Self {
        Self {
            interval: Duration::from_secs(1) / per_second.max(1),
            due: None,
        }
    }

    /// Returns the time at which the next row is due, or `None` if the row is due now.
    fn due(&mut self, now: Instant) -> Option<Instant> {
        let due = self.due.unwrap_or(now);
        let earliest = now.checked_sub(CATCH_UP_LIMIT).unwrap_or(now);
        self.due = Some(due.max(earliest) + self.interval);
        (due > now).then_some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_the_send_rate_and_the_burst_after_a_delay() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rate = Rate::new(10);
        assert_eq!(rate.due(at(0)), None, "the first row is sent immediately");
        assert_eq!(rate.due(at(0)), Some(at(100)));
        assert_eq!(rate.due(at(100)), Some(at(200)));
        // After a long delay, a short burst is allowed.
        assert_eq!(rate.due(at(10_000)), None);
        assert_eq!(rate.due(at(10_000)), None);
        assert_eq!(rate.due(at(10_000)), Some(at(10_100)));
    }
}
