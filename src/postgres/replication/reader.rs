//! A thread that does nothing but empty the socket while rows come fast.
//!
//! The walsender does one `send` for each row and sleeps while the socket's buffer is full, which on a unix-domain socket
//! it is after some 170 rows: half a millisecond at the rate of a drain. Whoever decodes and produces, or waits for a
//! processor, is away for longer than that. This thread is not: what it has read it keeps in chunks, so many at most, until
//! they are asked for.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::buffer::{Buffer, READ_BYTES};

/// How long the socket may fill: less than its buffer takes at the fastest rate seen, and less than anybody notices.
const PAUSE: Duration = Duration::from_micros(300);
/// When nothing has come for so long, the socket is left to its owner again.
const LULL: Duration = Duration::from_millis(4);
/// A chunk with less room than that is full.
const ROOM_MIN: usize = 16 << 10;
/// Whoever waits for a chunk gets one with that much, ...
const PIECE: usize = 64 << 10;
/// ... or what has come in that time: to be woken for less costs more than what is done with it.
const SOON: Duration = Duration::from_millis(1);

/// The thread, which ends with it.
pub(super) struct Reader {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    /// The thread has something to do, or room.
    changed: Condvar,
    /// There is a chunk, or there will be none.
    ready: Notify,
    /// Whoever asks for chunks has nothing to do.
    wanted: AtomicBool,
    /// No lull is waited for.
    finishes: AtomicBool,
    chunks_max: usize,
}

struct State {
    task: Task,
    chunks: VecDeque<Buffer>,
    /// Memory for chunks.
    spare: Vec<Buffer>,
    failure: Option<io::Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Task {
    Rest,
    Read,
    End,
}

impl Reader {
    /// A thread that reads from `socket`, which does not block, once it is told to. It holds about `bytes_max` at most, and never
    /// less than two chunks.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(super) fn start(socket: impl Read + Send + 'static, bytes_max: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                task: Task::Rest,
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

    /// Has it read from now on, until nothing has come for a moment. Nobody else may read before [`Reader::next`] has
    /// given nothing.
    pub(super) fn read(&self) {
        self.go_on();
        self.shared.lock().task = Task::Read;
        self.shared.changed.notify_one();
    }

    /// Has it read until the socket is empty, and no longer.
    pub(super) fn finish(&self) {
        self.shared.finishes.store(true, Ordering::Relaxed);
    }

    /// Takes [`Reader::finish`] back, if it is not too late.
    pub(super) fn go_on(&self) {
        self.shared.finishes.store(false, Ordering::Relaxed);
    }

    /// What was read next; nothing when the thread has stopped, and all that it had was given. Nothing is lost if the
    /// future is dropped.
    ///
    /// # Errors
    /// The socket's, behind all that was read before.
    pub(super) async fn next(&self) -> io::Result<Option<Buffer>> {
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

    /// Takes memory that chunks can be made of.
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
            // It has panicked, or it has not: it is over.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for a chunk, once there is something to read and room for it; nothing at the end.
    fn chunk(&self) -> Option<Buffer> {
        let mut state = self.lock();
        loop {
            match state.task {
                Task::End => return None,
                Task::Read if state.chunks.len() < self.chunks_max => {
                    return Some(state.spare.pop().unwrap_or_default().into_chunk());
                }
                Task::Read | Task::Rest => {}
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, mut socket: impl Read) {
        // When something last came, while it reads.
        let mut came = None;
        while let Some(mut chunk) = self.chunk() {
            match self.fill(
                &mut chunk,
                &mut socket,
                came.get_or_insert_with(Instant::now),
            ) {
                Continue(()) => {
                    self.lock().chunks.push_back(chunk);
                    self.ready.notify_one();
                }
                Break(failure) => {
                    self.rest(chunk, failure);
                    came = None;
                }
            }
        }
    }

    /// Reads until the chunk is full, or wanted, or nothing more is to be read for now.
    fn fill(
        &self,
        chunk: &mut Buffer,
        socket: &mut impl Read,
        came: &mut Instant,
    ) -> ControlFlow<Option<io::Error>> {
        // When the first of the chunk came.
        let mut since = None;
        loop {
            thread::sleep(PAUSE);
            match socket.read(chunk.rest()) {
                // Whoever reads next finds that too.
                Ok(0) => return Break(None),
                Ok(count) => {
                    chunk.filled(count);
                    *came = Instant::now();
                    since.get_or_insert(*came);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if came.elapsed() >= LULL || self.finishes.load(Ordering::Relaxed) {
                        return Break(None);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Break(Some(error)),
            }
            let is_full = chunk.rest().len() < ROOM_MIN;
            let is_due =
                chunk.unread().len() >= PIECE || since.is_some_and(|since| since.elapsed() >= SOON);
            if is_full || is_due && self.wanted.swap(false, Ordering::Relaxed) {
                return Continue(());
            }
        }
    }

    /// Hands over the last of what was read, and reads nothing until it is told to.
    fn rest(&self, chunk: Buffer, failure: Option<io::Error>) {
        let mut state = self.lock();
        match chunk.unread().is_empty() {
            true => state.spare.push(chunk),
            false => state.chunks.push_back(chunk),
        }
        if state.task == Task::Read {
            state.task = Task::Rest;
        }
        state.failure = failure;
        drop(state);
        self.ready.notify_one();
    }
}

#[cfg(test)]
mod tests;
