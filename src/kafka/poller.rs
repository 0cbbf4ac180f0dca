//! The thread on which librdkafka's deliveries, errors and log lines are heard.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::producer::BaseProducer;

use super::context::Context;

/// How long one poll waits when nothing happens. rdkafka's poll spins through the last millisecond,
/// which its `ThreadedProducer` does ten times a second, and an idle connector should cost nothing.
/// Ending takes as long at most.
const POLL: Duration = Duration::from_millis(500);

/// Polls a producer until it is dropped.
pub(super) struct Poller {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Poller {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(super) fn start(producer: Arc<BaseProducer<Context>>) -> std::io::Result<Self> {
        let end = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&end);
        let thread = thread::Builder::new()
            .name("kafka-poll".to_owned())
            .spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    producer.poll(POLL);
                }
            })?;
        Ok(Self {
            end,
            thread: Some(thread),
        })
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It can't fail but by a panic, and then it has ended too.
            let _ = thread.join();
        }
    }
}
