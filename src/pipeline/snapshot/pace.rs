//! Decides when to read from the connection, so that each read returns more data while rows arrive
//! quickly.
//!
//! The walsender calls `send` once per row. A reader that waits on the socket is woken for every
//! call, which costs both client and server more time than all other processing of a row.
//! Therefore, while rows arrive quickly, the reader lets more data accumulate in the socket's
//! buffer before it reads again, or a separate thread reads ahead
//! ([`crate::postgres::replication::Connection::read_ahead`]). While rows arrive slowly, each one
//! is read immediately.
//!
//! This module performs no I/O, and takes the current time as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum duration of one measurement of the rate at which frames arrive.
const MEASUREMENT_MIN: Duration = Duration::from_millis(1);
/// Traffic counts as fast if at least this many frames arrive during a measurement. For a
/// measurement of [`MEASUREMENT_MIN`], this is 20,000 frames per second.
const FAST_FRAMES: u32 = 20;
/// Traffic with fewer frames also counts as fast if they are large: at least this many bytes per
/// measurement (64 MB per second for a measurement of [`MEASUREMENT_MIN`]), in at least
/// [`FAST_LARGE_FRAMES`] frames.
const FAST_BYTES: u64 = 64 << 10;
/// Minimum number of frames per measurement for [`FAST_BYTES`] to apply. With fewer and therefore
/// larger frames, reading ahead is not worthwhile: copying each frame once more costs more than
/// waking the reader.
const FAST_LARGE_FRAMES: u32 = 5;
/// If a measurement takes at least this long, there was a pause in the traffic, so the traffic does
/// not count as fast.
const LULL_DURATION: Duration = Duration::from_millis(4);
/// Traffic must have been fast for this long to count as busy. Otherwise, it may be a burst, for
/// example after the disk or the scheduler stalled for a moment. The records in a burst are already
/// late, so they should not be delayed further to form larger batches.
const BURST_DURATION: Duration = Duration::from_millis(10);
/// With a small receive buffer: initial delay before the next read, during which rows accumulate on
/// the sender's side.
const ACCUMULATION_DELAY: Duration = Duration::from_millis(1);
/// Minimum and maximum of the delay that starts at [`ACCUMULATION_DELAY`] and then adapts to the
/// traffic.
const ACCUMULATION_DELAY_LIMITS: (Duration, Duration) =
    (Duration::from_micros(50), Duration::from_millis(2));
/// With a normal receive buffer: delay before the next read, during which data accumulates in the
/// buffer. The delay is so short that the buffer does not fill up, even at the highest rate
/// observed, and that the additional latency is negligible.
const BUFFER_FILL_DELAY: Duration = Duration::from_micros(300);

/// Measures the rate at which frames arrive, and computes the delay before the next read.
#[derive(Debug)]
pub(crate) struct Pace {
    span_began: Instant,
    frames: u32,
    bytes: u64,
    fast: bool,
    /// When the current period of fast traffic began.
    fast_since: Instant,
    small_buffer: Option<SmallBuffer>,
}

/// The timing of reads from a receive buffer whose size was reduced
/// ([`crate::postgres::replication::Connection::shrink_receive_buffer`]). Data that does not fit
/// into the receive buffer accumulates in the sender's buffer, which is cheap for the sender as
/// long as its buffer is not full. Ideally, the receive buffer is therefore just full when it is
/// read. To achieve this, each read from a full buffer shortens the pause before the next read
/// slightly, and any other read lengthens it by more.
#[derive(Debug)]
struct SmallBuffer {
    pause: Duration,
    /// Size in bytes of the largest recent read, which is taken as the size of a full buffer.
    full: u64,
}

impl SmallBuffer {
    fn received(&mut self, bytes: u64) {
        self.full = bytes.max(self.full - self.full / 64);
        let (min, max) = ACCUMULATION_DELAY_LIMITS;
        let pause = match bytes >= self.full - self.full / 8 {
            true => self.pause - self.pause / 16,
            false => self.pause + self.pause / 4,
        };
        self.pause = pause.clamp(min, max);
    }
}

impl Pace {
    /// Creates an instance that has not received any frames yet.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            span_began: now,
            frames: 0,
            bytes: 0,
            fast: false,
            fast_since: now,
            small_buffer: None,
        }
    }

    /// Records that the connection's receive buffer is small.
    pub(crate) fn record_small_buffer(&mut self) {
        self.small_buffer = Some(SmallBuffer {
            pause: ACCUMULATION_DELAY,
            full: 0,
        });
    }

    /// Counts a frame that has arrived.
    pub(crate) fn record_frame(&mut self) {
        self.frames = self.frames.saturating_add(1);
    }

    /// Records that a read returned `bytes` bytes.
    pub(crate) fn record_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(buffer) = &mut self.small_buffer
            && bytes > 0
            && self.fast
        {
            buffer.received(bytes);
        }
    }

    /// Returns whether frames have been arriving quickly for a while without a pause, which makes
    /// it likely that more will follow.
    pub(crate) fn is_busy(&self, now: Instant) -> bool {
        self.fast
            && now.duration_since(self.span_began) < LULL_DURATION
            && now.duration_since(self.fast_since) >= BURST_DURATION
    }

    /// Returns how long to wait before the next read, or `None` to read immediately.
    pub(crate) fn pause(&mut self, now: Instant) -> Option<Duration> {
        let elapsed = now.duration_since(self.span_began);
        if elapsed >= MEASUREMENT_MIN {
            let is_fast = self.frames >= FAST_FRAMES
                || self.frames >= FAST_LARGE_FRAMES && self.bytes >= FAST_BYTES;
            let was_fast = std::mem::replace(&mut self.fast, is_fast && elapsed < LULL_DURATION);
            if !was_fast {
                self.fast_since = self.span_began;
            }
            self.span_began = now;
            (self.frames, self.bytes) = (0, 0);
        }
        let pause = self
            .small_buffer
            .as_ref()
            .map_or(BUFFER_FILL_DELAY, |buffer| buffer.pause);
        self.fast.then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how many of 100 reads are followed by a pause if `frames` frames arrive per
    /// `interval`.
    fn pauses(frames: u32, interval: Duration) -> usize {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let read = |n: &u32| {
            (0..frames).for_each(|_| pace.record_frame());
            pace.pause(start + interval * *n).is_some()
        };
        (1..=100).filter(read).count()
    }

    /// Returns an instance after `spans` measurements of fast traffic, and the time at which the
    /// last measurement ended.
    fn fast(spans: u32) -> (Pace, Instant) {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for span in 1..=spans {
            (0..FAST_FRAMES).for_each(|_| pace.record_frame());
            assert!(pace.pause(start + MEASUREMENT_MIN * span).is_some());
        }
        (pace, start + MEASUREMENT_MIN * spans)
    }

    #[test]
    fn a_lull_ends_a_busy_period() {
        let (mut pace, now) = fast(10);
        assert!(pace.is_busy(now + MEASUREMENT_MIN));
        // The next frame arrives after a long pause in the traffic.
        pace.record_frame();
        assert!(!pace.is_busy(now + MEASUREMENT_MIN * 1000));
        // Fast traffic after a pause does not immediately count as busy.
        assert!(pace.pause(now + MEASUREMENT_MIN * 1000).is_none());
        (0..FAST_FRAMES).for_each(|_| pace.record_frame());
        assert!(pace.pause(now + MEASUREMENT_MIN * 1001).is_some());
        assert!(!pace.is_busy(now + MEASUREMENT_MIN * 1001));
    }

    #[test]
    fn does_not_treat_a_burst_as_a_busy_period() {
        let moment = Duration::from_nanos(1);
        let (pace, now) = fast(1);
        assert!(!pace.is_busy(now));
        let (pace, now) = fast(10);
        assert_eq!(MEASUREMENT_MIN * 10, BURST_DURATION);
        assert!(!pace.is_busy(now - moment));
        assert!(pace.is_busy(now));
        let (pace, now) = fast(9);
        assert!(!pace.is_busy(now));
    }

    #[test]
    fn pauses_between_reads_only_while_frames_arrive_quickly() {
        assert_eq!(
            pauses(1, Duration::from_micros(5)),
            0,
            "shorter than the measurement"
        );
        assert!(pauses(3, Duration::from_micros(50)) > 50);
        assert_eq!(pauses(3, Duration::from_micros(500)), 0);
        assert_eq!(
            pauses(30, Duration::from_millis(50)),
            0,
            "a single burst is read immediately"
        );
    }

    #[test]
    fn treats_a_few_large_frames_as_fast_traffic() {
        let start = Instant::now();
        let is_fast = |frames, bytes| {
            let mut pace = Pace::new(start);
            (0..frames).for_each(|_| pace.record_frame());
            pace.record_bytes(bytes);
            pace.pause(start + MEASUREMENT_MIN).is_some()
        };
        assert!(is_fast(FAST_LARGE_FRAMES, FAST_BYTES));
        assert!(!is_fast(FAST_LARGE_FRAMES, FAST_BYTES - 1));
        assert!(!is_fast(FAST_LARGE_FRAMES - 1, 100 * FAST_BYTES));
        let mut pace = Pace::new(start);
        for span in 1..10 {
            (0..FAST_LARGE_FRAMES).for_each(|_| pace.record_frame());
            pace.record_bytes(FAST_BYTES / 2);
            assert!(
                pace.pause(start + MEASUREMENT_MIN * span).is_none(),
                "the bytes of consecutive spans are added up"
            );
        }
    }

    /// Returns the pause after several reads from a small receive buffer while rows arrive quickly.
    /// Each element of `reads` is the number of bytes that one read returned.
    fn with_small_buffer(reads: &[u64]) -> Duration {
        let (mut pace, mut now) = fast(1);
        pace.record_small_buffer();
        for bytes in reads {
            pace.record_bytes(*bytes);
            now += MEASUREMENT_MIN;
            (0..FAST_FRAMES).for_each(|_| pace.record_frame());
            pace.pause(now);
        }
        pace.pause(now).expect("fast")
    }

    #[test]
    fn adjusts_the_pause_so_that_each_read_just_fills_a_small_buffer() {
        const FULL_READ_BYTES: u64 = 64_000;
        let (least, most) = ACCUMULATION_DELAY_LIMITS;
        assert_eq!(with_small_buffer(&[]), ACCUMULATION_DELAY);
        assert!(with_small_buffer(&[FULL_READ_BYTES]) < ACCUMULATION_DELAY);
        assert!(
            with_small_buffer(&[FULL_READ_BYTES, FULL_READ_BYTES / 2]) > ACCUMULATION_DELAY,
            "too early"
        );
        assert_eq!(with_small_buffer(&[FULL_READ_BYTES; 100]), least);
        let little: Vec<_> = std::iter::once(FULL_READ_BYTES)
            .chain([FULL_READ_BYTES / 10; 12])
            .collect();
        assert_eq!(with_small_buffer(&little), most);
        // The recorded size of the largest read decreases gradually, because the amount of data in
        // a full buffer depends on the size of the rows.
        let smaller: Vec<_> = std::iter::once(FULL_READ_BYTES)
            .chain([FULL_READ_BYTES / 2; 200])
            .collect();
        assert_eq!(with_small_buffer(&smaller), least);
    }

    #[test]
    fn reads_a_small_buffer_immediately_while_rows_arrive_slowly() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        pace.record_small_buffer();
        for span in 1..100 {
            pace.record_frame();
            pace.record_bytes(500);
            assert_eq!(pace.pause(start + MEASUREMENT_MIN * span), None);
        }
        // Reads that return slowly arriving rows are ignored, because they do not show how much a
        // full buffer contains.
        (0..FAST_FRAMES).for_each(|_| pace.record_frame());
        assert_eq!(
            pace.pause(start + MEASUREMENT_MIN * 100),
            Some(ACCUMULATION_DELAY)
        );
    }

    #[test]
    fn does_not_treat_traffic_as_fast_if_it_contains_a_lull() {
        let is_fast = |after| {
            let start = Instant::now();
            let mut pace = Pace::new(start);
            (0..FAST_FRAMES).for_each(|_| pace.record_frame());
            pace.pause(start + after).is_some()
        };
        let moment = Duration::from_nanos(1);
        assert!(is_fast(LULL_DURATION - moment));
        assert!(!is_fast(LULL_DURATION));
        let (pace, now) = fast(10);
        assert!(pace.is_busy(now + LULL_DURATION - moment));
        assert!(!pace.is_busy(now + LULL_DURATION));
    }
}
