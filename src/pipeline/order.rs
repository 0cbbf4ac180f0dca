//! What a pipeline is asked to do while it runs.

use tokio::sync::watch;

/// What a pipeline is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Go on.
    Run,
    /// Stop reading, deliver what was read, confirm it, end.
    Drain,
    /// The same; then its slot is watched until it is started again.
    Pause,
}

/// The pipeline is told to end.
pub(super) fn is_drain_ordered(orders: &watch::Receiver<Order>) -> bool {
    *orders.borrow() != Order::Run
}

/// Resolves when the pipeline is told to drain, or nobody is there to tell it anything.
pub(super) async fn drain_ordered(orders: &mut watch::Receiver<Order>) {
    // An error means that the sender is gone, which is an order to end as well.
    let _ = orders.wait_for(|order| *order != Order::Run).await;
}
