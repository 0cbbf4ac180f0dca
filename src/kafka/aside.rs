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
