//! Drops Kafka clients without blocking the caller.

use std::ops::Deref;
use std::thread;

/// A client that is dropped on a separate thread.
///
/// Dropping a client blocks for up to 100 ms: rdkafka polls at that interval while it waits for a
/// consumer to leave its group, or for an admin client's thread to exit.
pub(super) struct DropInBackground<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> DropInBackground<T> {
    pub(super) fn new(client: T) -> Self {
        Self(Some(client))
    }
}

impl<T: Send + 'static> Deref for DropInBackground<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("the client is removed only on drop")
    }
}

impl<T: Send + 'static> Drop for DropInBackground<T> {
    fn drop(&mut self) {
        let client = self.0.take();
        // If the thread can't be created, the client is dropped on the current thread.
        let _ = thread::Builder::new()
            .name("kafka-close".to_owned())
            .spawn(|| drop(client));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    /// A client that waits for a signal when dropped, and then reports whether the signal arrived.
    struct SlowClient {
        signal_rx: Receiver<()>,
        result_tx: Sender<bool>,
    }

    impl Drop for SlowClient {
        fn drop(&mut self) {
            let signal = self.signal_rx.recv_timeout(Duration::from_secs(10));
            let _ = self.result_tx.send(signal.is_ok());
        }
    }

    #[test]
    fn drops_a_client_without_blocking() {
        let (signal_tx, signal_rx) = channel();
        let (result_tx, result_rx) = channel();
        drop(DropInBackground::new(SlowClient {
            signal_rx,
            result_tx,
        }));
        let _ = signal_tx.send(());
        assert_eq!(result_rx.recv(), Ok(true));
    }
}
