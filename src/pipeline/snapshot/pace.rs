//! Reads less often, but more data at a time, when many rows arrive.
//!
//! The walsender calls `send` once for each row. A reader that waits on the socket is woken for
//! each call, which takes the client and the server more time than all other processing of a row.
//! Therefore, while rows arrive quickly, the reader waits until more data is in the socket's buffer
//! before it reads again, or another thread reads
//! ([`crate::postgres::replication::Connection::read_ahead`]). While rows arrive slowly, the reader
//! does not wait.
//!
//! This module performs no I/O, and receives the current time as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum duration of the span over which the rate is measured.
const MEASUREMENT_MIN: Duration = Duration::from_millis(1);
/// Minimum number of frames in a span for traffic to count as fast: 20,000 per second.
const FAST_FRAMES: u32 = 20;
/// Minimum number of bytes in a span for traffic with fewer but large frames to count as fast: 64 MB
/// per second. The span must also contain [`FAST_LARGE_FRAMES`].
const FAST_BYTES: u64 = 64 << 10;
/// Minimum number of large frames in a span for traffic to count as fast. With fewer frames, waking
/// the reader for each frame takes little time compared to copying the frame, and reading ahead
/// copies the frame once more.
const FAST_LARGE_FRAMES: u32 = 5;
/// Minimum duration of a span that contains a lull.
const LULL_DURATION: Duration = Duration::from_millis(4);
/// Traffic that has been fast for a shorter time than this may be a burst, for example after the
/// disk or the scheduler was slow for a moment. Records of a burst should not wait to share a
/// batch, because they are already late.
const BURST_DURATION: Duration = Duration::from_millis(10);
/// Initial delay in which rows accumulate at the sender, with a small receive buffer.
const ACCUMULATION_DELAY: Duration = Duration::from_millis(1);
/// Minimum and maximum of the delay that starts at [`ACCUMULATION_DELAY`].
const ACCUMULATION_DELAY_LIMITS: (Duration, Duration) =
    (Duration::from_micros(50), Duration::from_millis(2));
/// Delay before the next read, in which the socket's buffer fills. At the highest rate observed,
/// the buffer does not become full in this time, and the delay is imperceptible.
const BUFFER_FILL_DELAY: Duration = Duration::from_micros(300);

/// The rate at which frames arrive.
#[derive(Debug)]
pub(crate) struct Pace {
    span_began: Instant,
    frames: u32,
    bytes: u64,
    fast: bool,
    /// When the current period of fast traffic started.
    fast_since: Instant,
    small_buffer: Option<SmallBuffer>,
}

/// A receive buffer whose size was reduced
/// ([`crate::postgres::replication::Connection::shrink_receive_buffer`]). Data that does not fit
/// into the receive buffer accumulates in the sender's buffer, which takes the sender little time.
/// Therefore, the receive buffer should be full when it is read, but the sender's buffer should not
/// be full, because the sender would have to wait. Each read from a full receive buffer shortens
/// the pause before the next read slightly, and each other read lengthens the pause by more.
#[derive(Debug)]
struct SmallBuffer {
    pause: Duration,
    /// Size of the largest recent read, in bytes.
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

    /// Records that the size of the receive buffer was reduced.
    pub(crate) fn record_small_buffer(&mut self) {
        self.small_buffer = Some(SmallBuffer {
            pause: ACCUMULATION_DELAY,
            full: 0,
        });
    }

    /// Records that a frame has arrived.
    pub(crate) fn record_frame(&mut self) {
        self.frames = self.frames.saturating_add(1);
    }

    /// Records that this many bytes were read.
    pub(crate) fn record_bytes(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(buffer) = &mut self.small_buffer
            && bytes > 0
            && self.fast
        {
            buffer.received(bytes);
        }
    }

    /// Returns whether frames have been arriving quickly for a while, so that more frames are
    /// likely to follow. The rate before a lull is ignored.
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

    /// Returns the number of pauses in 100 reads if `frames` frames arrive in each `interval`.
    fn pauses(frames: u32, interval: Duration) -> usize {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let read = |n: &u32| {
            (0..frames).for_each(|_| pace.record_frame());
            pace.pause(start + interval * *n).is_some()
        };
        (1..=100).filter(read).count()
    }

    /// Returns an instance after `spans` spans of fast frames, and the end of the last span.
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
    fn ends_a_busy_period_at_a_lull() {
        let (mut pace, now) = fast(10);
        assert!(pace.is_busy(now + MEASUREMENT_MIN));
        // The next frame arrives much later.
        pace.record_frame();
        assert!(!pace.is_busy(now + MEASUREMENT_MIN * 1000));
        // The first fast frames after the lull do not count as busy immediately.
        assert!(pace.pause(now + MEASUREMENT_MIN * 1000).is_none());
        (0..FAST_FRAMES).for_each(|_| pace.record_frame());
        assert!(pace.pause(now + MEASUREMENT_MIN * 1001).is_some());
        assert!(!pace.is_busy(now + MEASUREMENT_MIN * 1001));
    }

    #[test]
    fn does_not_count_a_burst_as_busy() {
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
            "single bursts are read immediately"
        );
    }

    #[test]
    fn counts_a_few_large_frames_as_fast() {
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
                "bytes of several spans are added"
            );
        }
    }

    /// Returns how long to wait, with a small receive buffer, after `reads` of the given numbers of
    /// bytes while rows arrive quickly.
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
    fn adapts_the_pause_so_that_a_small_buffer_is_just_full() {
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
        // The size of a full buffer changes with the size of rows.
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
        // A small read does not show the capacity of the buffer.
        (0..FAST_FRAMES).for_each(|_| pace.record_frame());
        assert_eq!(
            pace.pause(start + MEASUREMENT_MIN * 100),
            Some(ACCUMULATION_DELAY)
        );
    }

    #[test]
    fn does_not_count_traffic_with_a_lull_as_fast() {
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
