//! Reads less often and more at a time when many rows arrive.
//!
//! The walsender calls `send` once for each row. A reader that waits on the socket is woken for
//! each call, which costs both sides more than all other processing of a row. So while rows arrive
//! quickly, the reader lets the socket's buffer fill for a moment before it reads again, or lets
//! another thread read ([`crate::postgres::replication::Connection::read_ahead`]). While they
//! arrive slowly, it never waits.
//!
//! Pure: the time is passed as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum duration of the span over which the rate is measured.
const MEASUREMENT_MIN: Duration = Duration::from_millis(1);
/// Number of frames in a span from which traffic counts as fast: 20,000 per second.
const FAST_FRAMES: u32 = 20;
/// Traffic with fewer but large frames also counts as fast from this many bytes in a span, which is
/// 64 MB/s, ...
const FAST_BYTES: u64 = 64 << 10;
/// ... and this many frames. With fewer frames, a wakeup for each costs little compared to copying
/// it, and reading ahead copies it once more.
const FAST_LARGE_FRAMES: u32 = 5;
/// A span that is at least this long contains a lull.
const LULL_DURATION: Duration = Duration::from_millis(4);
/// Traffic that has been fast for a shorter time may be a burst, such as the backlog of a moment in
/// which the disk or the scheduler was slow. Records of a burst should not wait to share a batch,
/// because they are late already.
const BURST_DURATION: Duration = Duration::from_millis(10);
/// With a small receive buffer, how long to let rows accumulate at the sender: initially, at least
/// and at most.
const ACCUMULATION_DELAY: Duration = Duration::from_millis(1);
const ACCUMULATION_DELAY_LIMITS: (Duration, Duration) =
    (Duration::from_micros(50), Duration::from_millis(2));
/// How long to let the socket's buffer fill. At the highest rate observed, the buffer does not
/// become full in this time, and the delay is imperceptible.
const BUFFER_FILL_DELAY: Duration = Duration::from_micros(300);

/// The rate at which frames arrive.
#[derive(Debug)]
pub(crate) struct Pace {
    span_began: Instant,
    frames: u32,
    bytes: u64,
    fast: bool,
    /// When the traffic that is fast now became fast.
    fast_since: Instant,
    small_buffer: Option<SmallBuffer>,
}

/// A receive buffer that was made small
/// ([`crate::postgres::replication::Connection::shrink_receive_buffer`]). Data that does not fit
/// into it accumulates in the sender's buffer, which is cheap for the sender. So the receive buffer
/// should be full when it is read, but the sender's buffer should not be, because the sender would
/// wait. Each read that finds the receive buffer full shortens the pause before the next read a
/// little, and each other read lengthens it by more.
#[derive(Debug)]
struct SmallBuffer {
    pause: Duration,
    /// Size of the largest recent read, in bytes.
    full: u64,
}

impl SmallBuffer {
    fn received(&mut self, bytes: u64) {
        self.full = bytes.max(self.full - self.full / 64);
        let (least, most) = ACCUMULATION_DELAY_LIMITS;
        let pause = match bytes >= self.full - self.full / 8 {
            true => self.pause - self.pause / 16,
            false => self.pause + self.pause / 4,
        };
        self.pause = pause.clamp(least, most);
    }
}

impl Pace {
    /// Creates an instance to which no frames have been reported yet.
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

    /// Records that the receive buffer was made small.
    pub(crate) fn buffer_is_small(&mut self) {
        self.small_buffer = Some(SmallBuffer {
            pause: ACCUMULATION_DELAY,
            full: 0,
        });
    }

    /// Records that a frame has arrived.
    pub(crate) fn frame(&mut self) {
        self.frames = self.frames.saturating_add(1);
    }

    /// Records that this many bytes were read.
    pub(crate) fn received(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(buffer) = &mut self.small_buffer
            && bytes > 0
            && self.fast
        {
            buffer.received(bytes);
        }
    }

    /// Returns whether frames have been arriving quickly for a while, so that more are likely to
    /// follow. The rate before a lull does not count.
    pub(crate) fn is_busy(&self, now: Instant) -> bool {
        self.fast
            && now.duration_since(self.span_began) < LULL_DURATION
            && now.duration_since(self.fast_since) >= BURST_DURATION
    }

    /// Returns how long to wait before the next read, if at all.
    pub(crate) fn pause(&mut self, now: Instant) -> Option<Duration> {
        let elapsed = now.duration_since(self.span_began);
        if elapsed >= MEASUREMENT_MIN {
            let is_much = self.frames >= FAST_FRAMES
                || self.frames >= FAST_LARGE_FRAMES && self.bytes >= FAST_BYTES;
            let was_fast = std::mem::replace(&mut self.fast, is_much && elapsed < LULL_DURATION);
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

    /// Returns the number of pauses in 100 reads if `frames` arrive every `every`.
    fn pauses(frames: u32, every: Duration) -> usize {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let read = |n: &u32| {
            (0..frames).for_each(|_| pace.frame());
            pace.pause(start + every * *n).is_some()
        };
        (1..=100).filter(read).count()
    }

    /// Returns an instance after `spans` spans of fast frames, and the end of the last span.
    fn fast(spans: u32) -> (Pace, Instant) {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for span in 1..=spans {
            (0..FAST_FRAMES).for_each(|_| pace.frame());
            assert!(pace.pause(start + MEASUREMENT_MIN * span).is_some());
        }
        (pace, start + MEASUREMENT_MIN * spans)
    }

    #[test]
    fn a_lull_ends_a_busy_time() {
        let (mut pace, now) = fast(10);
        assert!(pace.is_busy(now + MEASUREMENT_MIN));
        // The next frame arrives much later.
        pace.frame();
        assert!(!pace.is_busy(now + MEASUREMENT_MIN * 1000));
        // The first fast frames after that do not make it busy immediately.
        assert!(pace.pause(now + MEASUREMENT_MIN * 1000).is_none());
        (0..FAST_FRAMES).for_each(|_| pace.frame());
        assert!(pace.pause(now + MEASUREMENT_MIN * 1001).is_some());
        assert!(!pace.is_busy(now + MEASUREMENT_MIN * 1001));
    }

    #[test]
    fn burst_does_not_count_as_busy() {
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
    fn fast_frames_are_gathered_and_slow_ones_are_not() {
        assert_eq!(pauses(1, Duration::from_micros(5)), 0, "too short to tell");
        assert!(pauses(3, Duration::from_micros(50)) > 50);
        assert_eq!(pauses(3, Duration::from_micros(500)), 0);
        assert_eq!(
            pauses(30, Duration::from_millis(50)),
            0,
            "single bursts are read at once"
        );
    }

    #[test]
    fn large_frames_are_fast_when_they_are_few() {
        let start = Instant::now();
        let is_fast = |frames, bytes| {
            let mut pace = Pace::new(start);
            (0..frames).for_each(|_| pace.frame());
            pace.received(bytes);
            pace.pause(start + MEASUREMENT_MIN).is_some()
        };
        assert!(is_fast(FAST_LARGE_FRAMES, FAST_BYTES));
        assert!(!is_fast(FAST_LARGE_FRAMES, FAST_BYTES - 1));
        assert!(!is_fast(FAST_LARGE_FRAMES - 1, 100 * FAST_BYTES));
        let mut pace = Pace::new(start);
        for span in 1..10 {
            (0..FAST_LARGE_FRAMES).for_each(|_| pace.frame());
            pace.received(FAST_BYTES / 2);
            assert!(
                pace.pause(start + MEASUREMENT_MIN * span).is_none(),
                "it adds up"
            );
        }
    }

    /// Returns how long to wait, with a small receive buffer, after `reads` of the given numbers of
    /// bytes while rows arrive quickly.
    fn with_small_buffer(reads: &[u64]) -> Duration {
        let (mut pace, mut now) = fast(1);
        pace.buffer_is_small();
        for bytes in reads {
            pace.received(*bytes);
            now += MEASUREMENT_MIN;
            (0..FAST_FRAMES).for_each(|_| pace.frame());
            pace.pause(now);
        }
        pace.pause(now).expect("fast")
    }

    #[test]
    fn a_small_buffer_is_read_when_it_is_full_and_no_later() {
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
    fn a_small_buffer_is_read_at_once_while_rows_come_slowly() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        pace.buffer_is_small();
        for span in 1..100 {
            pace.frame();
            pace.received(500);
            assert_eq!(pace.pause(start + MEASUREMENT_MIN * span), None);
        }
        // A small read does not show how much the buffer can hold.
        (0..FAST_FRAMES).for_each(|_| pace.frame());
        assert_eq!(
            pace.pause(start + MEASUREMENT_MIN * 100),
            Some(ACCUMULATION_DELAY)
        );
    }

    #[test]
    fn traffic_with_a_lull_is_not_fast_regardless_of_its_size() {
        let is_fast = |after| {
            let start = Instant::now();
            let mut pace = Pace::new(start);
            (0..FAST_FRAMES).for_each(|_| pace.frame());
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
