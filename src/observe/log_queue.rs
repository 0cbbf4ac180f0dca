//! The queue of log lines that are waiting to be written to standard error.
//!
//! Standard error may be a pipe from which no process reads. A blocked or failed write to the pipe
//! must neither delay nor stop replication. Threads that log therefore only append to this queue,
//! and a separate thread writes the lines. Lines that do not fit or cannot be written are dropped
//! and counted. Debug output can fill only half of the queue, so that it never displaces an error.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Limits on the number and the total size of the lines that are waiting to be written.
const MAX_LINES: usize = 8192;
const MAX_BYTES: usize = 1 << 20;
/// DEBUG and TRACE lines can fill only 1/`VERBOSE_PARTS` of the queue.
const VERBOSE_PARTS: usize = 2;
/// How long to wait before retrying a write to a nonblocking standard error.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// [`LogQueue::flush`] returns if no line has been written for this long.
const FLUSH_STALL_TIMEOUT: Duration = Duration::from_secs(1);
/// [`LogQueue::flush`] returns after this time even if lines are still being written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// The importance of a line. As the queue fills up, less important lines are dropped first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Importance {
    /// DEBUG and TRACE.
    Verbose,
    /// Lines with the level INFO, WARN or ERROR.
    Normal,
}

/// Lines that are waiting to be written.
#[derive(Debug, Default)]
pub(super) struct LogQueue {
    state: Mutex<State>,
    /// Notified when a line is added.
    added: Condvar,
    /// Notified when a line is written, or dropped because it could not be written.
    handled: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lines: VecDeque<Vec<u8>>,
    /// Total size of `lines`, in bytes.
    bytes: usize,
    /// Whether the thread is writing a line that it has removed from `lines`.
    is_writing: bool,
    /// Number of lines that were written, or dropped because writing failed.
    handled: u64,
    dropped: u64,
    /// Number of dropped lines that have not been reported yet.
    unreported: u64,
}

impl LogQueue {
    /// Appends a line, or drops it if the queue is too full for lines of this importance. Does not
    /// block.
    pub(super) fn push(&self, importance: Importance, line: &[u8]) {
        let parts = match importance {
            Importance::Verbose => VERBOSE_PARTS,
            Importance::Normal => 1,
        };
        let mut state = self.lock();
        let is_full =
            state.lines.len() >= MAX_LINES / parts || state.bytes + line.len() > MAX_BYTES / parts;
        if is_full && !state.lines.is_empty() {
            state.drop_line();
            return;
        }
        state.bytes += line.len();
        state.lines.push_back(line.to_vec());
        drop(state);
        self.added.notify_one();
    }

    /// Returns the number of dropped lines.
    pub(super) fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Starts a thread that writes lines to `out` until the process ends. If lines are dropped, the
    /// thread calls `report` with their number as soon as writing succeeds and the queue is empty.
    ///
    /// # Errors
    /// Returns an error if the thread cannot be started.
    pub(super) fn write_to(
        &'static self,
        mut out: impl Write + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<()> {
        let write = move || loop {
            let line = self.next_line();
            let written = write_line(&mut out, &line);
            let unreported = self.finish(written.is_ok());
            if unreported > 0 {
                report(unreported);
            }
        };
        let thread = thread::Builder::new().name("log".to_owned());
        thread.spawn(write).map(drop)
    }

    /// Waits until all lines are written, or no line has been written for
    /// [`FLUSH_STALL_TIMEOUT`].
    pub(super) fn flush(&self) {
        let deadline = Instant::now() + FLUSH_TIMEOUT;
        let mut state = self.lock();
        while !state.is_empty() {
            let handled = state.handled;
            let left = deadline.saturating_duration_since(Instant::now());
            let is_stalled = |state: &mut State| !state.is_empty() && state.handled == handled;
            let waited =
                self.handled
                    .wait_timeout_while(state, left.min(FLUSH_STALL_TIMEOUT), is_stalled);
            let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            if timeout.timed_out() {
                return;
            }
            state = after;
        }
    }

    /// Waits for the next line and removes it from the queue.
    fn next_line(&self) -> Vec<u8> {
        let mut state = self.lock();
        loop {
            if let Some(line) = state.lines.pop_front() {
                state.bytes -= line.len();
                state.is_writing = true;
                return line;
            }
            let waited = self.added.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records whether the line was written. Returns the number of dropped lines to report now.
    fn finish(&self, is_written: bool) -> u64 {
        let mut state = self.lock();
        state.is_writing = false;
        state.handled += 1;
        if !is_written {
            state.drop_line();
        }
        // Report only if the queue is empty. Otherwise, the report itself might be dropped.
        let can_report = is_written && state.lines.is_empty();
        let unreported = match can_report {
            true => std::mem::take(&mut state.unreported),
            false => 0,
        };
        drop(state);
        self.handled.notify_all();
        unreported
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_empty(&self) -> bool {
        self.lines.is_empty() && !self.is_writing
    }

    fn drop_line(&mut self) {
        self.dropped += 1;
        self.unreported += 1;
    }
}

/// Writes the whole line, even if another process that shares standard error has made it
/// nonblocking.
fn write_line(out: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    while !line.is_empty() {
        match out.write(line) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => line = &line[written..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY_INTERVAL),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

    use super::*;

    /// A writer that passes each line to a channel.
    struct Pipe(SyncSender<Vec<u8>>);

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let sent = self.0.send(bytes.to_vec());
            sent.map_err(|_| io::Error::from(ErrorKind::BrokenPipe))?;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Creates a queue. The first receiver yields the lines that were written, and the second
    /// receiver yields each reported number of dropped lines.
    fn queue() -> (&'static LogQueue, Receiver<Vec<u8>>, Receiver<u64>) {
        let queue: &'static LogQueue = Box::leak(Box::default());
        let (lines, read) = sync_channel(0);
        let (reports, reported) = sync_channel(1);
        let report = move |dropped| reports.try_send(dropped).expect("space for one report");
        queue.write_to(Pipe(lines), report).expect("a thread");
        (queue, read, reported)
    }

    #[test]
    fn writes_lines_in_order() {
        let (queue, read, _reported) = queue();
        for line in [b"one\n", b"two\n"] {
            queue.push(Importance::Normal, line);
        }
        assert_eq!(read.recv().as_deref(), Ok(&b"one\n"[..]));
        assert_eq!(read.recv().as_deref(), Ok(&b"two\n"[..]));
        queue.flush();
        assert_eq!(queue.dropped(), 0);
    }

    #[test]
    fn drops_lines_that_are_not_read_in_time_and_reports_their_number() {
        let (queue, read, reported) = queue();
        // The log thread may already have removed one line from the queue.
        for _ in 0..MAX_LINES + 5 {
            queue.push(Importance::Normal, b"line\n");
        }
        let dropped = queue.dropped();
        assert!((4..=5).contains(&dropped), "{dropped}");
        for _ in 0..MAX_LINES + 5 - usize::try_from(dropped).expect("a small number") {
            read.recv().expect("a line");
        }
        assert_eq!(reported.recv(), Ok(dropped));
    }

    #[test]
    fn reserves_space_for_errors_when_debug_output_fills_the_queue() {
        let (queue, read, _reported) = queue();
        for _ in 0..2 * MAX_LINES {
            queue.push(Importance::Verbose, b"debug\n");
        }
        let dropped = queue.dropped();
        assert!(dropped > 0, "{dropped}");
        queue.push(Importance::Normal, b"error\n");
        assert_eq!(queue.dropped(), dropped);
        assert!(read.iter().any(|line| line == b"error\n"));
    }

    #[test]
    fn limits_the_size_of_queued_lines() {
        let (queue, read, _reported) = queue();
        let line = vec![b'x'; MAX_BYTES / 2];
        for _ in 0..10 {
            queue.push(Importance::Normal, &line);
        }
        assert!(queue.dropped() >= 7, "{}", queue.dropped());
        read.recv().expect("a line");
    }

    #[test]
    fn accepts_a_line_larger_than_the_queue_when_the_queue_is_empty() {
        let (queue, read, _reported) = queue();
        queue.push(Importance::Normal, &vec![b'x'; 2 * MAX_BYTES]);
        assert_eq!(read.recv().map(|line| line.len()), Ok(2 * MAX_BYTES));
        assert_eq!(queue.dropped(), 0);
    }

    #[test]
    fn counts_lines_dropped_after_the_reader_has_closed() {
        let (queue, read, _reported) = queue();
        drop(read);
        queue.push(Importance::Normal, b"line\n");
        queue.flush();
        assert_eq!(queue.dropped(), 1);
    }

    #[test]
    fn stops_flushing_if_the_reader_stalls() {
        let (queue, _read, _reported) = queue();
        queue.push(Importance::Normal, b"line\n");
        let started_at = Instant::now();
        queue.flush();
        assert!(
            started_at.elapsed() < FLUSH_TIMEOUT,
            "{:?}",
            started_at.elapsed()
        );
    }
}
