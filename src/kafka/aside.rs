//! Clients that nobody waits for when they go.

use std::ops::Deref;
use std::thread;

/// A client that is dropped on a thread of its own. It takes up to 100 ms: rdkafka waits that long at once for
/// the end of a group's member, and for that of the thread of an admin client.
pub(super) struct Aside<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Aside<T> {
    /// Of `client`.
    pub(super) fn new(client: T) -> Self {
        Self(Some(client))
    }
}

impl<T: Send + 'static> Deref for Aside<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().expect("it is there until it is dropped")
    }
}

impl<T: Send + 'static> Drop for Aside<T> {
    fn drop(&mut self) {
        let client = self.0.take();
        // Where there is no thread for it, it is dropped here.
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

    /// Goes when it is told to, and says whether it was.
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
    fn whoever_drops_a_client_goes_on_while_it_goes() {
        let (go, may_go) = channel();
        let (was_told, told) = channel();
        drop(Aside::new(Slow { may_go, was_told }));
        let _ = go.send(());
        assert_eq!(told.recv(), Ok(true));
    }
}
