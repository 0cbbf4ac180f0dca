//! Clients that are dropped without blocking the caller.

use std::ops::Deref;
use std::thread;

/// A client that is dropped on a separate thread.
///
/// Dropping a client blocks for up to 100 ms: rdkafka polls at that interval while it waits for a
/// consumer to leave its group, or for the thread of an admin client to end.
pub(super) struct DropInBackground<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> DropInBackground<T> {
    pub(super) fn new(client: T) -> Self {
        Self(Some(client))
    }
}

impl<T: Send + 'static> Deref for DropInBackground<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until it is dropped")
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

    /// A client whose drop waits for a signal, then reports whether the signal arrived.
    struct Slow {
        may_go: Receiver<()>,
        was_told: Sender<bool>,
    }

    impl Drop for Slow {
        fn drop(&mut self) {
            let told = self.may_go.recv_timeout(Duration::from_secs(10));
            let _ = self.was_told.send(told.is_ok());
        }
    }

    #[test]
    fn dropping_a_client_does_not_block() {
        let (go, may_go) = channel();
        let (was_told, told) = channel();
        drop(DropInBackground::new(Slow { may_go, was_told }));
        let _ = go.send(());
        assert_eq!(told.recv(), Ok(true));
    }
}
