//! Receives the notifications (`NOTIFY`) that a session listens for.

use std::sync::OnceLock;

use tokio::sync::Notify;

/// Lets a task wait for the next notification with a given payload. Other notifications are
/// ignored.
#[derive(Debug, Default)]
pub(crate) struct Notifications {
    payload: OnceLock<String>,
    received: Notify,
}

impl Notifications {
    /// Sets the payload to wait for. Only the first call has an effect.
    pub(crate) fn expect(&self, payload: &str) {
        let _ = self.payload.set(payload.to_owned());
    }

    /// Wakes the waiting task if the notification has the expected payload.
    pub(super) fn receive(&self, payload: &str) {
        if self
            .payload
            .get()
            .is_some_and(|expected| expected == payload)
        {
            self.received.notify_one();
        }
    }

    /// Waits for a notification. Returns immediately if one has arrived since the last call. Cancel
    /// safe.
    pub(crate) async fn next(&self) {
        self.received.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn wakes_the_waiter_once_for_several_notifications_with_the_expected_payload() {
        let notifications = Notifications::default();
        let has_next = || notifications.next().now_or_never().is_some();
        notifications.receive("slot");
        assert!(
            !has_next(),
            "notifications are ignored until a payload is expected"
        );
        notifications.expect("slot");
        notifications.receive("other");
        assert!(!has_next());
        notifications.receive("slot");
        notifications.receive("slot");
        assert!(has_next());
        assert!(!has_next());
    }
}
