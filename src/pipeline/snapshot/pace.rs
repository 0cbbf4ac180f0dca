//! When much comes, reads less often and more at a time.
//!
//! The walsender does one `send` for each row. A reader that waits on the socket is woken for each
//! of them, and what that costs, on both sides, is more than everything else that is done with a
//! row. So while rows come fast, the reader lets the socket's buffer fill for a moment before it
//! reads again, or has another thread do so ([`crate::postgres::replication::Connection::read_ahead`]);
//! while they come slowly, it never waits.
//!
//! Pure: time comes in as an argument.

use std::time::Duration;

use tokio::time::Instant;

/// Over which time the rate is taken.
const SPAN: Duration = Duration::from_millis(1);
/// Frames in a span from which on they count as fast: 20,000 a second.
const FAST: u32 = 20;
/// Fewer that are large are fast too, from 64 MB a second on, ...
const FAST_BYTES: u64 = 64 << 10;
/// ... if there are so many: with fewer, a wake-up for each costs little beside copying it, and reading ahead copies once more.
const FAST_LARGE: u32 = 5;
/// A span that is this long had a lull in it.
const LULL: Duration = Duration::from_millis(4);
/// What has been fast for so long is no burst, such as the backlog of a moment in which the disk or the scheduler was slow.
/// Records of a burst shall not wait for company: they are late already.
const BURST: Duration = Duration::from_millis(10);
/// Where the receive buffer is small, how long the sender's rows may gather: at first, at least and at most.
const GATHER: Duration = Duration::from_millis(1);
const GATHER_LIMITS: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
/// How long the socket may fill: less than its buffer takes at the fastest rate seen, and less than
/// anybody notices.
const PAUSE: Duration = Duration::from_micros(300);

/// The rate of frames, as far as it is needed.
#[derive(Debug)]
pub(crate) struct Pace {
    span_began: Instant,
    frames: u32,
    bytes: u64,
    fast: bool,
    /// When what is fast now began to be.
    fast_since: Instant,
    small_buffer: Option<SmallBuffer>,
}

/// A receive buffer that was made small ([`crate::postgres::replication::Connection::shrink_receive_buffer`]). What it has no
/// room for gathers in the sender's buffer, for whom that is cheap: so ours has to be full when it is read, but that one not, or
/// the sender waits. Each read that finds ours full shortens the pause before the next a little, and each that does not lengthens
/// it, by more.
#[derive(Debug)]
struct SmallBuffer {
    pause: Duration,
    /// The largest read of late.
    full: u64,
}

impl SmallBuffer {
    fn received(&mut self, bytes: u64) {
        self.full = bytes.max(self.full - self.full / 64);
        let (least, most) = GATHER_LIMITS;
        let pause = match bytes >= self.full - self.full / 8 {
            true => self.pause - self.pause / 16,
            false => self.pause + self.pause / 4,
        };
        self.pause = pause.clamp(least, most);
    }
}

impl Pace {
    /// Nothing has come yet.
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

    /// The receive buffer was made small.
    pub(crate) fn buffer_is_small(&mut self) {
        self.small_buffer = Some(SmallBuffer {
            pause: GATHER,
            full: 0,
        });
    }

    /// A frame has come.
    pub(crate) fn frame(&mut self) {
        self.frames = self.frames.saturating_add(1);
    }

    /// So many bytes were read.
    pub(crate) fn received(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(buffer) = &mut self.small_buffer
            && bytes > 0
            && self.fast
        {
            buffer.received(bytes);
        }
    }

    /// Frames have come fast for a while, and more will. What was fast before a lull says nothing about now.
    pub(crate) fn is_busy(&self, now: Instant) -> bool {
        self.fast
            && now.duration_since(self.span_began) < LULL
            && now.duration_since(self.fast_since) >= BURST
    }

    /// How long to wait before the next read, if at all.
    pub(crate) fn pause(&mut self, now: Instant) -> Option<Duration> {
        let elapsed = now.duration_since(self.span_began);
        if elapsed >= SPAN {
            let is_much =
                self.frames >= FAST || self.frames >= FAST_LARGE && self.bytes >= FAST_BYTES;
            let was_fast = std::mem::replace(&mut self.fast, is_much && elapsed < LULL);
            if !was_fast {
                self.fast_since = self.span_began;
            }
            self.span_began = now;
            (self.frames, self.bytes) = (0, 0);
        }
        let pause = self
            .small_buffer
            .as_ref()
            .map_or(PAUSE, |buffer| buffer.pause);
        self.fast.then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pauses when `frames` come every `every` for 100 reads.
    fn pauses(frames: u32, every: Duration) -> usize {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let read = |n: &u32| {
            (0..frames).for_each(|_| pace.frame());
            pace.pause(start + every * *n).is_some()
        };
        (1..=100).filter(read).count()
    }

    /// One that has had `spans` of fast frames, and when the last of them ended.
    fn fast(spans: u32) -> (Pace, Instant) {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        for span in 1..=spans {
            (0..FAST).for_each(|_| pace.frame());
            assert!(pace.pause(start + SPAN * span).is_some());
        }
        (pace, start + SPAN * spans)
    }

    #[test]
    fn a_lull_ends_a_busy_time() {
        let (mut pace, now) = fast(10);
        assert!(pace.is_busy(now + SPAN));
        // The next frame comes long after.
        pace.frame();
        assert!(!pace.is_busy(now + SPAN * 1000));
        // Nor is it busy at once with the next ones that are fast.
        assert!(pace.pause(now + SPAN * 1000).is_none());
        (0..FAST).for_each(|_| pace.frame());
        assert!(pace.pause(now + SPAN * 1001).is_some());
        assert!(!pace.is_busy(now + SPAN * 1001));
    }

    #[test]
    fn a_burst_is_no_busy_time() {
        let moment = Duration::from_nanos(1);
        let (pace, now) = fast(1);
        assert!(!pace.is_busy(now));
        let (pace, now) = fast(10);
        assert_eq!(SPAN * 10, BURST);
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
            pace.pause(start + SPAN).is_some()
        };
        assert!(is_fast(FAST_LARGE, FAST_BYTES));
        assert!(!is_fast(FAST_LARGE, FAST_BYTES - 1));
        assert!(!is_fast(FAST_LARGE - 1, 100 * FAST_BYTES));
        let mut pace = Pace::new(start);
        for span in 1..10 {
            (0..FAST_LARGE).for_each(|_| pace.frame());
            pace.received(FAST_BYTES / 2);
            assert!(pace.pause(start + SPAN * span).is_none(), "it adds up");
        }
    }

    /// With a small receive buffer, how long to wait after `reads` of so many bytes each, all while rows come fast.
    fn with_small_buffer(reads: &[u64]) -> Duration {
        let (mut pace, mut now) = fast(1);
        pace.buffer_is_small();
        for bytes in reads {
            pace.received(*bytes);
            now += SPAN;
            (0..FAST).for_each(|_| pace.frame());
            pace.pause(now);
        }
        pace.pause(now).expect("fast")
    }

    #[test]
    fn a_small_buffer_is_read_when_it_is_full_and_no_later() {
        const FULL: u64 = 64_000;
        let (least, most) = GATHER_LIMITS;
        assert_eq!(with_small_buffer(&[]), GATHER);
        assert!(with_small_buffer(&[FULL]) < GATHER);
        assert!(with_small_buffer(&[FULL, FULL / 2]) > GATHER, "too early");
        assert_eq!(with_small_buffer(&[FULL; 100]), least);
        let little: Vec<_> = std::iter::once(FULL).chain([FULL / 10; 12]).collect();
        assert_eq!(with_small_buffer(&little), most);
        // What full is changes with the size of rows.
        let smaller: Vec<_> = std::iter::once(FULL).chain([FULL / 2; 200]).collect();
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
            assert_eq!(pace.pause(start + SPAN * span), None);
        }
        // And that little was read says nothing about how much it takes.
        (0..FAST).for_each(|_| pace.frame());
        assert_eq!(pace.pause(start + SPAN * 100), Some(GATHER));
    }

    #[test]
    fn what_comes_in_a_lull_is_not_fast_however_much_it_is() {
        let is_fast = |after| {
            let start = Instant::now();
            let mut pace = Pace::new(start);
            (0..FAST).for_each(|_| pace.frame());
            pace.pause(start + after).is_some()
        };
        let moment = Duration::from_nanos(1);
        assert!(is_fast(LULL - moment));
        assert!(!is_fast(LULL));
        let (pace, now) = fast(10);
        assert!(pace.is_busy(now + LULL - moment));
        assert!(!pace.is_busy(now + LULL));
    }
}
