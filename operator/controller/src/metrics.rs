//! What the operator measures of itself, in Prometheus' text format.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use splitmodel_api::Phase;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: String,
}

/// See the module.
pub struct Metrics {
    registry: Registry,
    reconciles: Histogram,
    errors: Counter,
    writes: Family<KindLabel, Counter>,
    phases: Family<PhaseLabel, Gauge>,
    in_phase: Family<PhaseLabel, Histogram>,
    ready: Histogram,
    leader: Gauge,
    seen: Mutex<HashMap<String, Seen>>,
}

struct Seen {
    phase: Phase,
    since: jiff::Timestamp,
    /// When it last began to become ready.
    began: Option<jiff::Timestamp>,
}

impl Default for Metrics {
    fn default() -> Self {
        let seconds = |buckets: &[f64]| Histogram::new(buckets.iter().copied());
        let mut metrics = Self {
            registry: Registry::with_prefix("splitmodel_operator"),
            reconciles: seconds(&[0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0]),
            errors: Counter::default(),
            writes: Family::default(),
            phases: Family::default(),
            in_phase: Family::new_with_constructor(|| {
                Histogram::new([0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0])
            }),
            ready: seconds(&[1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 3600.0]),
            leader: Gauge::default(),
            seen: Mutex::default(),
        };
        metrics.registry.register("reconcile_seconds", "Time of one look at a SplitModel", metrics.reconciles.clone());
        metrics.registry.register("reconcile_errors", "Looks that failed and are repeated", metrics.errors.clone());
        metrics.registry.register("writes", "Objects written or deleted, by kind", metrics.writes.clone());
        metrics.registry.register("models", "SplitModels, by phase", metrics.phases.clone());
        metrics.registry.register("phase_seconds", "Time that SplitModels spent in a phase", metrics.in_phase.clone());
        metrics.registry.register(
            "ready_seconds",
            "Time from a new SplitModel, or one that lost readiness, to the first token",
            metrics.ready.clone(),
        );
        metrics.registry.register("leader", "1 where this replica writes", metrics.leader.clone());
        metrics
    }
}

impl Metrics {
    /// An object is written.
    pub fn write(&self, kind: &str) {
        self.writes.get_or_create(&KindLabel { kind: kind.to_owned() }).inc();
    }

    /// A look at a SplitModel took this long.
    pub fn reconciled(&self, took: Duration, failed: bool) {
        self.reconciles.observe(took.as_secs_f64());
        if failed {
            self.errors.inc();
        }
    }

    /// Whether this replica writes.
    pub fn set_leader(&self, leader: bool) {
        self.leader.set(i64::from(leader));
    }

    /// A SplitModel, by its uid, is in `phase` now.
    pub fn phase(&self, uid: &str, phase: Phase, now: jiff::Timestamp) {
        let mut seen = self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let label = |phase: Phase| PhaseLabel { phase: format!("{phase:?}") };
        let seconds = |since: jiff::Timestamp| now.duration_since(since).as_secs_f64().max(0.0);
        let before = seen.get(uid);
        if before.is_some_and(|s| s.phase == phase) {
            return;
        }
        let mut began = before.and_then(|s| s.began).or(Some(now));
        if let Some(before) = before {
            self.phases.get_or_create(&label(before.phase)).dec();
            self.in_phase.get_or_create(&label(before.phase)).observe(seconds(before.since));
        }
        self.phases.get_or_create(&label(phase)).inc();
        if phase == Phase::Serving {
            // What served when the operator began is nobody's time to ready.
            if let (Some(_), Some(began)) = (before, began.take()) {
                self.ready.observe(seconds(began));
            }
        }
        seen.insert(uid.to_owned(), Seen { phase, since: now, began });
    }

    /// A SplitModel is gone.
    pub fn forget(&self, uid: &str) {
        let mut seen = self.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(gone) = seen.remove(uid) {
            self.phases.get_or_create(&PhaseLabel { phase: format!("{:?}", gone.phase) }).dec();
        }
    }

    /// The text of `/metrics`.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_counted_and_timed() {
        let metrics = Metrics::default();
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        metrics.phase("a", Phase::Pending, at(0));
        metrics.phase("a", Phase::Fetching, at(3));
        metrics.phase("a", Phase::Fetching, at(5));
        metrics.phase("a", Phase::Serving, at(8));
        metrics.phase("b", Phase::Serving, at(8));
        metrics.write("Service");
        let text = metrics.render();
        for line in [
            "splitmodel_operator_models{phase=\"Serving\"} 2",
            "splitmodel_operator_models{phase=\"Fetching\"} 0",
            "splitmodel_operator_phase_seconds_sum{phase=\"Fetching\"} 5.0",
            "splitmodel_operator_ready_seconds_sum 8.0",
            "splitmodel_operator_ready_seconds_count 1",
            "splitmodel_operator_writes_total{kind=\"Service\"} 1",
        ] {
            assert!(text.contains(line), "{line} in:\n{text}");
        }
        metrics.forget("a");
        assert!(metrics.render().contains("splitmodel_operator_models{phase=\"Serving\"} 1"));
    }
}
