use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::proto::{Phase, StageStatus};

/// The status of a stage: written from any thread, without waiting; read by the control service.
///
/// Cloning gives another handle to the same status.
#[derive(Clone, Debug)]
pub struct StatusHub {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: watch::Sender<State>,
    started: Instant,
}

#[derive(Clone, Debug)]
struct State {
    status: StageStatus,
    closed: bool,
}

impl StatusHub {
    /// Starts with `initial`; uptime counts from now.
    #[must_use]
    pub fn new(initial: StageStatus) -> Self {
        let (state, _) = watch::channel(State { status: initial, closed: false });
        Self { shared: Arc::new(Shared { state, started: Instant::now() }) }
    }

    /// Changes the status. Watchers hear of it only if something differs afterwards.
    pub fn update(&self, change: impl FnOnce(&mut StageStatus)) {
        self.shared.state.send_if_modified(|state| {
            let before = state.status.clone();
            change(&mut state.status);
            state.status != before
        });
    }

    /// Sets the phase.
    pub fn set_phase(&self, phase: Phase) {
        self.update(|status| status.set_phase(phase));
    }

    /// Records an error, and the phase it leads to if it ends the stage.
    pub fn set_error(&self, message: &str, fatal: bool) {
        self.update(|status| {
            message.clone_into(&mut status.last_error);
            if fatal {
                status.set_phase(Phase::Failed);
            }
        });
    }

    /// The status now, with its uptime.
    #[must_use]
    pub fn snapshot(&self) -> StageStatus {
        let status = self.shared.state.borrow().status.clone();
        self.stamped(status)
    }

    /// Ends the streams of all watchers after a last message, so that the server can shut down.
    pub fn close(&self) {
        self.shared.state.send_modify(|state| state.closed = true);
    }

    fn stamped(&self, mut status: StageStatus) -> StageStatus {
        status.uptime_ms = u64::try_from(self.shared.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        status
    }

    pub(crate) fn watch(&self) -> Watcher {
        let mut changes = self.shared.state.subscribe();
        changes.mark_changed();
        Watcher { hub: self.clone(), changes, ended: false }
    }
}

/// One reader of a hub.
pub(crate) struct Watcher {
    hub: StatusHub,
    changes: watch::Receiver<State>,
    ended: bool,
}

impl Watcher {
    /// The next status that differs from the last one given; the first at once. `None` after the hub was closed.
    pub(crate) async fn next(&mut self) -> Option<StageStatus> {
        if self.ended {
            return None;
        }
        self.changes.changed().await.ok()?;
        let state = self.changes.borrow_and_update().clone();
        self.ended = state.closed;
        Some(self.hub.stamped(state.status))
    }

    /// Waits for `pause`, or until the hub is closed.
    pub(crate) async fn pause(&mut self, pause: Duration) {
        if self.ended {
            return;
        }
        let mut changes = self.changes.clone();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = changes.wait_for(|state| state.closed) => {}
        }
    }
}
