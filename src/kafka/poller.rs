//! The thread that processes librdkafka's delivery reports, errors and log lines.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use rdkafka::producer::BaseProducer;

use super::context::Context;
use super::events::Events;

/// Processes a producer's events on a thread, until the poller is dropped.
pub(super) struct Poller {
    shared: Arc<PollerState>,
    thread: Option<JoinHandle<()>>,
}

struct PollerState {
    events: Events,
    end: AtomicBool,
}

impl Poller {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns an error if the operating system can't create a thread.
    pub(super) fn start(producer: Arc<BaseProducer<Context>>) -> std::io::Result<Self> {
        let shared = Arc::new(PollerState {
            events: Events::open(producer),
            end: AtomicBool::new(false),
        });
        let thread_state = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("kafka-poll".to_owned())
            .spawn(move || {
                while !thread_state.end.load(Ordering::SeqCst) {
                    thread_state.events.serve();
                }
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.shared.end.store(true, Ordering::SeqCst);
        self.shared.events.wake();
        if let Some(thread) = self.thread.take() {
            // Ignore an error, which means that the thread panicked. The thread has ended in any
            // case.
            let _ = thread.join();
        }
    }
}
