//! Starts chains of stage processes, asks them, and takes them down again.

pub mod certificates;
pub mod chain;
pub mod client;
#[path = "../../../../fetch/tests/common/server.rs"]
#[allow(dead_code, reason = "shared with the tests of downloads")]
pub mod files;
pub mod history;
pub mod models;
pub mod peer;
pub mod plan;
pub mod process;
pub mod proxy;
pub mod reference;

use std::time::{Duration, Instant};

/// Longest wait for anything: a machine with two busy cores is slow.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `check` gives something, asking every 50 ms.
pub async fn until<T>(what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = check().await {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "waited {PATIENCE:?} in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
