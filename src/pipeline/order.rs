//! Instructions from the supervisor to a running pipeline.

use tokio::sync::watch;

/// An instruction to a running pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Keep running.
    Run,
    /// Drain. If older rows are being copied, first complete the copy, unless it stalls.
    DrainAfterCopy,
    /// Stop reading, deliver and confirm the events that have been read, and stop the pipeline.
    Drain,
    /// Like [`Order::Drain`], but keep monitoring the slot until the pipeline is started again.
    Pause,
}

/// Returns whether the pipeline has been asked to drain.
pub(super) fn is_drain_ordered(orders: &watch::Receiver<Order>) -> bool {
    *orders.borrow() != Order::Run
}

/// Waits until the pipeline is asked to drain, or the sender of `orders` is dropped.
pub(super) async fn drain_ordered(orders: &mut watch::Receiver<Order>) {
    wait_for(orders, |order| order != Order::Run).await;
}

/// Like [`drain_ordered`], but keeps waiting if the order is [`Order::DrainAfterCopy`].
pub(super) async fn drain_ordered_at_once(orders: &mut watch::Receiver<Order>) {
    wait_for(orders, |order| {
        !matches!(order, Order::Run | Order::DrainAfterCopy)
    })
    .await;
}

async fn wait_for(orders: &mut watch::Receiver<Order>, is_due: impl Fn(Order) -> bool) {
    // An error means that the sender has been dropped, which also counts as a request to drain.
    let _ = orders.wait_for(|order| is_due(*order)).await;
}
