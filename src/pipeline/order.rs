//! Requests to a running pipeline.

use tokio::sync::watch;

/// A request to a running pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Continue.
    Run,
    /// Complete the copy of older rows as long as it makes progress, and then drain.
    DrainAfterCopy,
    /// Stop reading, deliver and confirm the events that were read, and end.
    Drain,
    /// Like [`Order::Drain`], but afterwards monitor the slot until the pipeline is started again.
    Pause,
}

/// Returns whether the pipeline is asked to end.
pub(super) fn is_drain_ordered(orders: &watch::Receiver<Order>) -> bool {
    *orders.borrow() != Order::Run
}

/// Resolves when the pipeline is asked to drain, or when the sender of orders has been dropped.
pub(super) async fn drain_ordered(orders: &mut watch::Receiver<Order>) {
    wait_for(orders, |order| order != Order::Run).await;
}

/// Like [`drain_ordered`], but does not resolve for [`Order::DrainAfterCopy`].
pub(super) async fn drain_ordered_at_once(orders: &mut watch::Receiver<Order>) {
    wait_for(orders, |order| {
        !matches!(order, Order::Run | Order::DrainAfterCopy)
    })
    .await;
}

async fn wait_for(orders: &mut watch::Receiver<Order>, is_due: impl Fn(Order) -> bool) {
    // An error means that the sender has been dropped, which is also a request to end.
    let _ = orders.wait_for(|order| is_due(*order)).await;
}
