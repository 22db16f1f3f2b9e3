//! Signs of life of the engine thread and of what comes before it, for the liveness probe: progress while fetching and
//! loading, the end of every job after that.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use splitmodel_control::config::SchedulingConfig;

/// Longest job of the engine; the chain is taken for hung then, too.
pub const STEP: Duration = Duration::from_secs(120);

/// See the module.
#[derive(Debug)]
pub struct Heartbeat {
    start: Instant,
    /// Milliseconds after the start.
    last: AtomicU64,
    working: AtomicBool,
    loaded: AtomicBool,
    /// Longest silence in seconds while a slice is fetched, checked or loaded.
    loading: AtomicU64,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self {
            start: Instant::now(),
            last: AtomicU64::new(0),
            working: AtomicBool::new(true),
            loaded: AtomicBool::new(false),
            loading: AtomicU64::new(SchedulingConfig::default().progress_deadline_s.into()),
        }
    }
}

impl Heartbeat {
    /// Longest silence before the slice is loaded.
    pub fn set_loading(&self, seconds: u32) {
        self.loading.store(seconds.into(), Relaxed);
    }

    /// Something went on.
    pub fn beat(&self) {
        self.last.store(u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX), Relaxed);
    }

    /// The engine begins (`true`) or has ended (`false`) a job; from the first call on the slice is loaded.
    pub fn work(&self, working: bool) {
        self.beat();
        self.working.store(working, Relaxed);
        self.loaded.store(true, Relaxed);
    }

    /// Whether the process is alive: waiting for work, or not silent for too long.
    #[must_use]
    pub fn alive(&self) -> bool {
        let bound = if self.loaded.load(Relaxed) { STEP } else { Duration::from_secs(self.loading.load(Relaxed)) };
        !self.working.load(Relaxed) || self.silent_for() < bound
    }

    fn silent_for(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.last.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn started(ago: Duration) -> Heartbeat {
        Heartbeat { start: Instant::now().checked_sub(ago).unwrap(), ..Heartbeat::default() }
    }

    #[test]
    fn silence_counts_while_there_is_work() {
        let heartbeat = started(STEP * 2);
        assert!(heartbeat.alive(), "loading may take longer than a step");
        heartbeat.work(true);
        assert!(heartbeat.alive());
        heartbeat.last.store(0, Relaxed);
        assert!(!heartbeat.alive(), "a step that does not end");
        heartbeat.work(false);
        heartbeat.last.store(0, Relaxed);
        assert!(heartbeat.alive(), "waiting for work is no silence");
        let loading = started(Duration::from_secs(1200));
        assert!(!loading.alive());
        loading.set_loading(3600);
        assert!(loading.alive(), "who waits longer for a slow source says so");
        loading.set_loading(600);
        loading.beat();
        assert!(loading.alive());
    }
}
