//! Sends at once what was queued while little comes.
//!
//! librdkafka has one waiting time for batches to fill (`linger.ms`), for busy and quiet times
//! alike. So Walpost sets one that is good when much comes, and while little comes it ends the
//! wait after every transaction with `rd_kafka_flush`, which is what that call is for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rdkafka::producer::BaseProducer;

use super::context::Context;
use super::native;

/// How long one flush may wait for deliveries. Records that are queued meanwhile
/// don't wait for company either, so it is short: a busy time may begin.
const FLUSH: Duration = Duration::from_millis(5);

/// A thread that flushes when it is asked to, because the call blocks.
pub(super) struct Flusher {
    asked: Arc<Asked>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Asked {
    flush: AtomicBool,
    end: AtomicBool,
}

impl Flusher {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system has no thread for it.
    pub(super) fn start(producer: Arc<BaseProducer<Context>>) -> std::io::Result<Self> {
        let asked = Arc::new(Asked::default());
        let orders = Arc::clone(&asked);
        let thread = thread::Builder::new()
            .name("kafka-flush".to_owned())
            .spawn(move || {
                while !orders.end.load(Ordering::SeqCst) {
                    if orders.flush.swap(false, Ordering::SeqCst) {
                        native::flush(&producer, FLUSH);
                    } else {
                        thread::park();
                    }
                }
            })?;
        Ok(Self {
            asked,
            thread: Some(thread),
        })
    }

    /// What was queued by now is sent. Does not block.
    pub(super) fn flush(&self) {
        self.asked.flush.store(true, Ordering::SeqCst);
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
        self.asked.end.store(true, Ordering::SeqCst);
        self.wake();
        if let Some(thread) = self.thread.take() {
            // It can't fail but by a panic, and then it has ended too.
            let _ = thread.join();
        }
    }
}
