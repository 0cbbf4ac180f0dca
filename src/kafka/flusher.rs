//! Sends queued records immediately while traffic is low.
//!
//! librdkafka has a single setting for how long it waits to fill a batch (`linger.ms`), and Walpost
//! sets a value that suits high traffic. While traffic is low, Walpost calls `rd_kafka_flush` after
//! every transaction to send the queued records without waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::producer::BaseProducer;

use super::context::Context;
use super::native;

/// Maximum time that a flush waits for delivery reports. The limit is short because records queued
/// during a flush are also sent without lingering, even if traffic has increased.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(5);

/// A thread that flushes on request. A separate thread is used because `rd_kafka_flush` blocks.
pub(super) struct Flusher {
    request: Arc<FlushRequest>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct FlushRequest {
    flush: AtomicBool,
    end: AtomicBool,
}

impl Flusher {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns an error if the operating system can't create a thread.
    pub(super) fn start(producer: Arc<BaseProducer<Context>>) -> std::io::Result<Self> {
        let request = Arc::new(FlushRequest::default());
        let thread_request = Arc::clone(&request);
        let thread = thread::Builder::new()
            .name("kafka-flush".to_owned())
            .spawn(move || {
                while !thread_request.end.load(Ordering::SeqCst) {
                    if thread_request.flush.swap(false, Ordering::SeqCst) {
                        native::flush(&producer, FLUSH_TIMEOUT);
                    } else {
                        thread::park();
                    }
                }
            })?;
        Ok(Self {
            request,
            thread: Some(thread),
        })
    }

    /// Requests that all records queued so far be sent. Does not block.
    pub(super) fn flush(&self) {
        self.request.flush.store(true, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.request.end.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // Ignore an error, which means that the thread panicked. The thread has ended in any
            // case.
            let _ = thread.join();
        }
    }
}
