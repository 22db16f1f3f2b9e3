//! Follows the status of one stage over its control service, across restarts.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use splitmodel_control::{ControlClient, Phase, StageStatus};
use tokio::sync::mpsc;

/// Time a connection or a call may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before asking a stage again that does not answer: it is starting, or gone.
const RETRY: Duration = Duration::from_millis(150);
/// Least time between two messages of a stage.
const INTERVAL: Duration = Duration::from_millis(150);

/// Sends what the stage at `address` reports, and `None` when it stops answering, until the receiver goes away.
pub async fn follow(
    stage: u32,
    address: String,
    linked: Arc<AtomicBool>,
    reports: mpsc::Sender<(u32, Option<StageStatus>)>,
) {
    while !reports.is_closed() {
        let mut seen = false;
        if let Ok(mut client) = ControlClient::connect(&address, TIMEOUT).await
            && let Ok(mut stream) = client.watch(INTERVAL).await
        {
            while let Ok(Some(status)) = stream.next().await {
                seen = true;
                if matches!(status.phase(), Phase::Linked | Phase::Serving) {
                    linked.store(true, Ordering::Relaxed);
                }
                if reports.send((stage, Some(status))).await.is_err() {
                    return;
                }
            }
        }
        if seen && reports.send((stage, None)).await.is_err() {
            return;
        }
        tokio::time::sleep(RETRY).await;
    }
}
