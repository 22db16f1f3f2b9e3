//! Finds a stage that hangs: stopped, stuck in a device, or out of breath. Only a process that ends is seen by itself.
use std::net::SocketAddr;
use std::time::Duration;

use splitmodel_control::health::{HealthChecker, Probe};
use tokio::time::{Instant, sleep_until};

/// Checks in a row that fail before a stage is taken as hung: one may fail because this program stood still.
const CHECKS: u32 = 3;

/// Resolves, with why, when the checks that fit into `deadline` have failed in a row; never if that is zero. A stage's
/// health service answers as soon as it has read its configuration, long before it serves.
pub async fn hung(health: SocketAddr, deadline: Duration) -> String {
    let period = deadline / CHECKS;
    let mut checker = match HealthChecker::new(&health.to_string(), period) {
        Ok(checker) if !period.is_zero() => checker,
        _ => return std::future::pending().await,
    };
    let mut failed = 0;
    loop {
        let next = Instant::now() + period;
        let why = match checker.check(Probe::Liveness).await {
            Ok(true) => None,
            Ok(false) => Some("it says that its work stands still".to_owned()),
            Err(error) => Some(error.to_string()),
        };
        failed = why.as_ref().map_or(0, |_| failed + 1);
        if let Some(why) = why.filter(|_| failed >= CHECKS) {
            return why;
        }
        sleep_until(next).await;
    }
}
