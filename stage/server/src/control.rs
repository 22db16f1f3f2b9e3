//! What the control service can make a stage do.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use splitmodel_control::{Conditioning as Ordered, ControlHandler, HandlerError};
use splitmodel_link::connection::Conditioning;
use tokio::sync::watch;

use crate::coordinator::Coordinator;

/// Longest wait for a probe.
const PROBE_DEADLINE: Duration = Duration::from_secs(30);

/// See the module.
pub struct Handler {
    drain: watch::Sender<Option<Duration>>,
    grace: Duration,
    conditioning: Arc<Conditioning>,
    coordinator: OnceLock<Arc<Coordinator>>,
}

impl Handler {
    /// A handler; `grace` is what a drain without one gets.
    #[must_use]
    pub fn new(drain: watch::Sender<Option<Duration>>, grace: Duration, conditioning: Arc<Conditioning>) -> Self {
        Self { drain, grace, conditioning, coordinator: OnceLock::new() }
    }

    /// Stage 0's coordinator, once there is one.
    pub fn set_coordinator(&self, coordinator: Arc<Coordinator>) {
        let _ = self.coordinator.set(coordinator); // set once, at the start
    }

    fn coordinator(&self, otherwise: &str) -> Result<&Arc<Coordinator>, HandlerError> {
        self.coordinator.get().ok_or_else(|| HandlerError::Unsupported(otherwise.to_owned()))
    }
}

impl ControlHandler for Handler {
    async fn drain(&self, grace: Option<Duration>) -> Result<(), HandlerError> {
        self.drain.send_replace(Some(grace.unwrap_or(self.grace)));
        Ok(())
    }

    async fn probe(&self) -> Result<Duration, HandlerError> {
        let coordinator = self.coordinator("probes start at stage 0, once it is loaded")?;
        let broken = || HandlerError::Unavailable("the chain is not formed".to_owned());
        let answer = coordinator.probe().ok_or_else(broken)?;
        match tokio::time::timeout(PROBE_DEADLINE, answer).await {
            Ok(Ok(round_trip)) => Ok(round_trip),
            Ok(Err(_)) => Err(broken()),
            Err(_) => Err(HandlerError::Timeout(format!("no answer from the chain in {PROBE_DEADLINE:?}"))),
        }
    }

    async fn form_again(&self, formation: u64, reason: String) -> Result<bool, HandlerError> {
        let coordinator = self.coordinator("stage 0 forms the chain, once it is loaded")?;
        Ok(coordinator.form_again(formation, &reason))
    }

    async fn set_conditioning(&self, ordered: Ordered) -> Result<(), HandlerError> {
        let bandwidth = (ordered.bytes_per_second > 0).then_some(ordered.bytes_per_second as f64);
        self.conditioning
            .set(ordered.delay.as_secs_f64() * 1e6, bandwidth)
            .map_err(|e| HandlerError::Invalid(e.to_string()))
    }
}
