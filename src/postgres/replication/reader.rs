//! A thread that reads from the socket while rows arrive quickly.
//!
//! The walsender calls `send` once per row and sleeps while the socket's buffer is full. The buffer
//! of a Unix-domain socket holds about 170 rows, so when a backlog is streamed, the buffer is full
//! after half a millisecond. A thread that also decodes rows and sends them to Kafka, or that has
//! to wait for a CPU, often takes longer than half a millisecond before it reads again. The thread
//! in this module only reads, and stores a limited number of chunks until they are requested.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::buffer::{Buffer, READ_BYTES};

/// How long the thread waits between reads. At the highest measured rate, the socket's buffer takes
/// longer than this to fill up, and the added latency is negligible.
const BUFFER_FILL_DELAY: Duration = Duration::from_micros(300);
/// If nothing arrives for this long, the thread stops reading, and the connection reads from the
/// socket directly.
const IDLE_TIMEOUT: Duration = Duration::from_millis(4);
/// A chunk with less remaining space than this is considered full.
const CHUNK_SPACE_MIN: usize = 16 << 10;
/// A requested chunk is returned once it contains this many bytes, even before [`RESPONSE_DELAY`]
/// has passed.
const RESPONSE_BYTES: usize = 64 << 10;
/// A requested chunk that contains fewer than [`RESPONSE_BYTES`] is returned after this delay.
/// Waking the receiver for a few bytes at a time would cost more than processing them.
const RESPONSE_DELAY: Duration = Duration::from_millis(1);

/// A handle to the thread. Dropping the handle stops the thread.
pub(super) struct Reader {
    shared: Arc<ReaderState>,
    thread: Option<JoinHandle<()>>,
}

struct ReaderState {
    state: Mutex<State>,
    /// Signals to the thread that it has a new task, or that there is space for another chunk.
    changed: Condvar,
    /// Signals to the receiver that a chunk is available, or that the thread has stopped reading.
    ready: Notify,
    /// Whether the receiver is waiting for a chunk.
    wanted: AtomicBool,
    /// Whether to stop as soon as the socket is empty instead of after [`IDLE_TIMEOUT`].
    finishes: AtomicBool,
    chunks_max: usize,
}

struct State {
    task: Task,
    chunks: VecDeque<Buffer>,
    /// Unused buffers for future chunks.
    spare: Vec<Buffer>,
    failure: Option<io::Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Pause,
    Read,
    End,
}

impl Reader {
    /// Starts a thread that reads from `socket` when requested. The socket must be non-blocking.
    /// The thread stores at most about `bytes_max` bytes, or two chunks if that is more.
    ///
    /// # Errors
    /// Returns an error if the thread can't be started.
    pub(super) fn start(socket: impl Read + Send + 'static, bytes_max: usize) -> io::Result<Self> {
        let shared = Arc::new(ReaderState {
            state: Mutex::new(State {
                task: Task::Pause,
                chunks: VecDeque::new(),
                spare: Vec::new(),
                failure: None,
            }),
            changed: Condvar::new(),
            ready: Notify::new(),
            wanted: AtomicBool::new(false),
            finishes: AtomicBool::new(false),
            chunks_max: (bytes_max / READ_BYTES).max(2),
        });
        let theirs = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("wal-reader".to_owned())
            .spawn(move || theirs.run(socket))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Makes the thread read until no data arrives for [`IDLE_TIMEOUT`]. The caller must not read
    /// from the socket until [`Reader::next_chunk`] has returned `None`.
    pub(super) fn read(&self) {
        self.cancel_finish();
        self.shared.lock().task = Task::Read;
        self.shared.changed.notify_one();
    }

    /// Makes the thread stop reading as soon as the socket is empty.
    pub(super) fn finish(&self) {
        self.shared.finishes.store(true, Ordering::Relaxed);
    }

    /// Cancels a request made by [`Reader::finish`]. Has no effect if the thread has already
    /// stopped reading.
    pub(super) fn cancel_finish(&self) {
        self.shared.finishes.store(false, Ordering::Relaxed);
    }

    /// Returns the next chunk, or `None` once the thread has stopped reading and all chunks have
    /// been returned. Cancel safe.
    ///
    /// # Errors
    /// Returns an error if reading from the socket failed, after all bytes that were read before
    /// the failure have been returned.
    pub(super) async fn next_chunk(&self) -> io::Result<Option<Buffer>> {
        loop {
            {
                let mut state = self.shared.lock();
                if let Some(chunk) = state.chunks.pop_front() {
                    self.shared.changed.notify_one();
                    return Ok(Some(chunk));
                }
                if let Some(failure) = state.failure.take() {
                    return Err(failure);
                }
                if state.task != Task::Read {
                    return Ok(None);
                }
            }
            self.shared.wanted.store(true, Ordering::Relaxed);
            self.shared.ready.notified().await;
        }
    }

    /// Gives a buffer back to the thread, which reuses its memory for another chunk.
    pub(super) fn reuse(&self, memory: Buffer) {
        let mut state = self.shared.lock();
        if state.chunks.len() + state.spare.len() < self.shared.chunks_max {
            state.spare.push(memory);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.lock().task = Task::End;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // `join` returns an error if the thread panicked, but in that case the thread has
            // terminated as well.
            let _ = thread.join();
        }
    }
}

impl ReaderState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until reading is requested and there is space for another chunk, and returns an empty
    /// chunk. Returns `None` if the thread should terminate.
    fn wait_for_request(&self) -> Option<Buffer> {
        let mut state = self.lock();
        loop {
            match state.task {
                Task::End => return None,
                Task::Read if state.chunks.len() < self.chunks_max => {
                    return Some(state.spare.pop().unwrap_or_default().into_chunk());
                }
                Task::Read | Task::Pause => {}
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, mut socket: impl Read) {
        // When data last arrived; `None` while reading is paused.
        let mut last_arrival = None;
        while let Some(mut chunk) = self.wait_for_request() {
            match self.fill_chunk(
                &mut chunk,
                &mut socket,
                last_arrival.get_or_insert_with(Instant::now),
            ) {
                Continue(()) => {
                    self.lock().chunks.push_back(chunk);
                    self.ready.notify_one();
                }
                Break(failure) => {
                    self.hand_over_last(chunk, failure);
                    last_arrival = None;
                }
            }
        }
    }

    /// Reads from the socket until the chunk is full, until a receiver is waiting and the chunk is
    /// due, or until the thread should stop reading.
    fn fill_chunk(
        &self,
        chunk: &mut Buffer,
        socket: &mut impl Read,
        last_arrival: &mut Instant,
    ) -> ControlFlow<Option<io::Error>> {
        // When the chunk's first bytes arrived.
        let mut since = None;
        loop {
            thread::sleep(BUFFER_FILL_DELAY);
            match socket.read(chunk.remaining_space()) {
                // The end of the stream does not have to be stored, because the connection's next
                // read from the socket also returns zero bytes.
                Ok(0) => return Break(None),
                Ok(count) => {
                    chunk.filled(count);
                    *last_arrival = Instant::now();
                    since.get_or_insert(*last_arrival);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if last_arrival.elapsed() >= IDLE_TIMEOUT
                        || self.finishes.load(Ordering::Relaxed)
                    {
                        return Break(None);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Break(Some(error)),
            }
            let is_full = chunk.remaining_space().len() < CHUNK_SPACE_MIN;
            let is_due = chunk.unread().len() >= RESPONSE_BYTES
                || since.is_some_and(|since| since.elapsed() >= RESPONSE_DELAY);
            if is_full || is_due && self.wanted.swap(false, Ordering::Relaxed) {
                return Continue(());
            }
        }
    }

    /// Makes the last chunk available to the receiver, and pauses until reading is requested again.
    fn hand_over_last(&self, chunk: Buffer, failure: Option<io::Error>) {
        let mut state = self.lock();
        match chunk.unread().is_empty() {
            true => state.spare.push(chunk),
            false => state.chunks.push_back(chunk),
        }
        if state.task == Task::Read {
            state.task = Task::Pause;
        }
        state.failure = failure;
        drop(state);
        self.ready.notify_one();
    }
}

#[cfg(test)]
mod tests;
