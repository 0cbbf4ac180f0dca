//! What a pipeline is asked to do while it runs.

use tokio::sync::watch;

/// What a pipeline is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Go on.
    Run,
    /// Complete the copy of older rows while it makes progress, and then drain.
    DrainAfterCopy,
    /// Stop reading, deliver what was read, confirm it, end.
    Drain,
    /// The same; then its slot is watched until it is started again.
    Pause,
}

/// The pipeline is told to end.
pub(super) fn is_drain_ordered(orders: &watch::Receiver<Order>) -> bool {
    *orders.borrow() != Order::Run
}

/// Resolves when the pipeline is asked to drain, or nobody can ask it for anything.
pub(super) async fn drain_ordered(orders: &mut watch::Receiver<Order>) {
    wait_for(orders, |order| order != Order::Run).await;
}

/// As [`drain_ordered`], but does not resolve for [`Order::DrainAfterCopy`].
pub(super) async fn drain_ordered_at_once(orders: &mut watch::Receiver<Order>) {
    wait_for(orders, |order| {
        !matches!(order, Order::Run | Order::DrainAfterCopy)
    })
    .await;
}

async fn wait_for(orders: &mut watch::Receiver<Order>, is_due: impl Fn(Order) -> bool) {
    // An error means that the sender is gone, which is an order to end as well.
    let _ = orders.wait_for(|order| is_due(*order)).await;
}
