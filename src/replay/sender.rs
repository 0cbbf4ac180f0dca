//! Sends rows from the table through the window to the sink.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use uuid::Uuid;

use super::run::State;
use super::{ReplayEnd, ReplayError, ReplayPlan};
use crate::delivery::watermark::{OrderError, Watermark};
use crate::model::dead_letters::DeadLetterCounts;
use crate::outbox::columns::Row;
use crate::outbox::headers::REPLAY_HEADER;
use crate::pipeline::decode::Step;
use crate::pipeline::decode::dead_letters::DeadLetters;
use crate::pipeline::decode::delivery::Delivery;
use crate::postgres::catalog::copy::Copied;
use crate::sink::Sink;

/// Maximum interval between journal entries about the progress. The first ones are written sooner.
const JOURNAL_INTERVAL: Duration = Duration::from_secs(10);
const FIRST_JOURNAL_INTERVAL: Duration = Duration::from_secs(1);
/// How often a row is remembered for the journal.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How often the sink is tended while waiting for it.
const SINK_MAINTENANCE_INTERVAL: Duration = Duration::from_secs(1);
/// A run that fell behind its rate catches up by at most the rows of this duration.
const CATCH_UP_LIMIT: Duration = Duration::from_millis(100);

/// Sends the rows of a run.
pub(super) struct Sender<'p, S, F> {
    plan: &'p ReplayPlan<'p>,
    sink: &'p mut S,
    delivery: Delivery,
    /// Number of rows that the sink has accepted.
    taken: u64,
    /// Key of the last of them.
    latest: Vec<String>,
    /// Rows that the journal could record: their number, starting at one, and their key.
    marks: VecDeque<(u64, Vec<String>)>,
    /// Number of rows that Kafka has, without gaps.
    pub(super) acknowledged: u64,
    /// The last mark that Kafka has.
    pub(super) last: Option<(u64, Vec<String>)>,
    marked_at: Instant,
    noted_at: Instant,
    note_pause: Duration,
    on_progress: F,
}

/// The result of waiting.
enum SendReadiness {
    Enough,
    Stop,
}

impl<'p, S: Sink, F: FnMut(u64)> Sender<'p, S, F> {
    pub(super) fn new(
        plan: &'p ReplayPlan<'p>,
        sink: &'p mut S,
        watermark: Watermark,
        told: F,
    ) -> Self {
        let now = Instant::now();
        let mut delivery = Delivery::new(watermark);
        delivery.dead_letters = plan.dead_letters();
        Self {
            plan,
            sink,
            delivery,
            taken: 0,
            latest: vec![String::new(); plan.planned.order.len()],
            marks: VecDeque::new(),
            acknowledged: 0,
            last: None,
            marked_at: now,
            noted_at: now,
            note_pause: FIRST_JOURNAL_INTERVAL,
            on_progress: told,
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
            if let SendReadiness::Stop = self.row(&copied, stop).await? {
                return Ok(ReplayEnd::Stopped);
            }
            self.mark(&copied).await?;
        }
        match self.drained(stop).await? {
            SendReadiness::Enough => Ok(ReplayEnd::Complete),
            SendReadiness::Stop => Ok(ReplayEnd::Stopped),
        }
    }

    /// Waits for rows in flight, for at most the drain timeout. Rows that are not acknowledged by
    /// then are sent again when the run is resumed.
    pub(super) async fn settle(&mut self) {
        let limit = self.plan.settings.drain_timeout;
        let (_never, mut stop) = watch::channel(false);
        if self.taken > 0 {
            self.marks.push_back((self.taken, self.latest.clone()));
        }
        // The cause of a failure is known already.
        let _ = timeout(limit, self.drained(&mut stop)).await;
        self.update_sent();
    }

    /// Passes one row, or a dead letter in its place, to the sink.
    async fn row(
        &mut self,
        copied: &Copied<'_>,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<SendReadiness, ReplayError> {
        self.delivery.watermark.begin_row()?;
        loop {
            check(&self.delivery.watermark)?;
            match self.hand_over(&copied.row)? {
                Step::Done | Step::Answer => break,
                Step::Full => {
                    if let SendReadiness::Stop =
                        wait_for_room(&self.delivery.watermark, self.sink, stop).await?
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
                // These steps occur only in the stream.
                Step::NewTable(_) | Step::SetAside(_) => return Err(OrderError::Stray.into()),
            }
        }
        self.delivery.watermark.end_row()?;
        self.taken += 1;
        Ok(SendReadiness::Enough)
    }

    fn hand_over(&mut self, row: &Row<'_>) -> Result<Step, ReplayError> {
        let mapping = &self.plan.mapping;
        let mut run = Uuid::encode_buffer();
        let run = self.plan.run.hyphenated().encode_lower(&mut run).as_bytes();
        let mark = (REPLAY_HEADER, run);
        let handed = self.delivery.hand_over(mapping, row, mark, self.sink);
        handed.map_err(|error| ReplayError::from_undelivered(error, || mapping.describe(row)))
    }

    /// Remembers the row at intervals, and records the progress in the journal.
    async fn mark(&mut self, copied: &Copied<'_>) -> Result<(), ReplayError> {
        for (index, value) in self.latest.iter_mut().enumerate() {
            value.clear();
            value.push_str(&String::from_utf8_lossy(copied.key(index)));
        }
        let now = Instant::now();
        if now.duration_since(self.marked_at) < PROGRESS_INTERVAL {
            return Ok(());
        }
        self.marked_at = now;
        self.marks.push_back((self.taken, self.latest.clone()));
        self.update_sent();
        if now.duration_since(self.noted_at) >= self.note_pause {
            self.noted_at = now;
            self.note_pause = (self.note_pause * 2).min(JOURNAL_INTERVAL);
            let sent = self.plan.sent_before + self.last_number();
            let last = self.last.as_ref();
            self.plan
                .record_progress(State::Going, sent, last, None)
                .await?;
        }
        Ok(())
    }

    /// Updates how many rows Kafka has.
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

    /// Returns the number of rows up to the last mark that Kafka has.
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
            check(&self.delivery.watermark)?;
            tokio::select! {
                biased;
                () = stopped(stop) => return Ok(SendReadiness::Stop),
                () = sleep_until(due) => return Ok(SendReadiness::Enough),
                () = sleep(SINK_MAINTENANCE_INTERVAL) => self.sink.tend(),
            }
        }
    }

    /// Resolves when everything that the sink accepted is in Kafka.
    async fn drained(
        &mut self,
        stop: &mut watch::Receiver<bool>,
    ) -> Result<SendReadiness, ReplayError> {
        self.sink.flush(false)?;
        loop {
            check(&self.delivery.watermark)?;
            self.update_sent();
            if self.delivery.watermark.in_flight().records == 0 {
                return Ok(SendReadiness::Enough);
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

/// Resolves when there may be space for another record.
async fn wait_for_room(
    watermark: &Watermark,
    sink: &mut impl Sink,
    stop: &mut watch::Receiver<bool>,
) -> Result<SendReadiness, ReplayError> {
    sink.flush(false)?;
    tokio::select! {
        biased;
        () = stopped(stop) => return Ok(SendReadiness::Stop),
        () = watermark.wait_for_room() => {}
        () = sleep(SINK_MAINTENANCE_INTERVAL) => sink.tend(),
    }
    Ok(SendReadiness::Enough)
}

/// Returns an error if a record was rejected, because this blocks all later records.
fn check(watermark: &Watermark) -> Result<(), ReplayError> {
    match watermark.deliveries().failure() {
        Some(failure) => Err(ReplayError::Delivery(failure)),
        None => Ok(()),
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // The sender was dropped, so there can be no request to stop.
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending().await
    }
}

/// Limits the number of rows per second.
struct Rate {
    pause: Duration,
    due: Option<Instant>,
}

impl Rate {
    fn new(per_second: u32) -> Self {
        Self {
            pause: Duration::from_secs(1) / per_second.max(1),
            due: None,
        }
    }

    /// Returns when the next row is due, or `None` if it is due now.
    fn due(&mut self, now: Instant) -> Option<Instant> {
        let due = self.due.unwrap_or(now);
        let earliest = now.checked_sub(CATCH_UP_LIMIT).unwrap_or(now);
        self.due = Some(due.max(earliest) + self.pause);
        (due > now).then_some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_and_lost_time_is_not_made_up_for() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut rate = Rate::new(10);
        assert_eq!(rate.due(at(0)), None, "the first at once");
        assert_eq!(rate.due(at(0)), Some(at(100)));
        assert_eq!(rate.due(at(100)), Some(at(200)));
        // After a long wait, one burst is allowed.
        assert_eq!(rate.due(at(10_000)), None);
        assert_eq!(rate.due(at(10_000)), None);
        assert_eq!(rate.due(at(10_000)), Some(at(10_100)));
    }
}
