//! Prometheus metrics of a stage: the engine's counters and, on stage 0, the scheduler's.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::coordinator::Coordinator;
use crate::engine::EngineStats;

/// The metrics of this stage.
pub struct Metrics {
    registry: Registry,
    figures: Arc<Figures>,
}

#[derive(Debug)]
struct Figures {
    engine: Arc<EngineStats>,
    coordinator: OnceLock<Arc<Coordinator>>,
    formations: AtomicU64,
}

impl Metrics {
    /// Metrics of a stage.
    #[must_use]
    pub fn new(stage: u32, engine: Arc<EngineStats>) -> Self {
        let figures = Arc::new(Figures { engine, coordinator: OnceLock::new(), formations: AtomicU64::new(0) });
        let labels = [("stage".into(), stage.to_string().into())];
        let mut registry = Registry::with_prefix_and_labels("splitmodel", labels.into_iter());
        registry.register_collector(Box::new(Source(figures.clone())));
        Self { registry, figures }
    }

    /// Adds the scheduler's figures (stage 0).
    pub fn set_coordinator(&self, coordinator: Arc<Coordinator>) {
        let _ = self.figures.coordinator.set(coordinator); // set once, at the start
    }

    /// Counts a formation that is whole.
    pub fn formed(&self) {
        self.figures.formations.fetch_add(1, Relaxed);
    }

    /// Text in Prometheus' exposition format, without the end marker.
    #[must_use]
    pub fn render(&self) -> String {
        let mut out = String::new();
        if let Err(error) = text::encode_registry(&mut out, &self.registry) {
            tracing::error!(%error, "metrics cannot be written");
        }
        out
    }
}

#[derive(Debug)]
struct Source(Arc<Figures>);

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let count = |n: &AtomicU64| n.load(Relaxed) as f64;
        let seconds = |us: &AtomicU64| count(us) / 1e6;
        let e = &self.0.engine;
        let mut counters = vec![
            ("frames", "Frames computed", count(&e.frames)),
            ("rows", "Rows computed", count(&e.rows)),
            ("rows_wanted", "Rows a token was wanted from", count(&e.wanted)),
            ("rows_dropped", "Rows that could not be computed here or upstream", count(&e.dropped)),
            ("engine_wait_seconds", "Time frames waited for the engine", seconds(&e.wait_us)),
            ("engine_hold_seconds", "Time frames held the engine", seconds(&e.hold_us)),
            ("engine_send_seconds", "Time finished frames waited for the next stage", seconds(&e.send_us)),
            ("formations", "Times the chain was formed", count(&self.0.formations)),
        ];
        let mut gauges = vec![("lanes_in_use", "Lanes in use", count(&e.lanes))];
        if let Some(coordinator) = self.0.coordinator.get() {
            let (now, tokens) = coordinator.counts();
            counters.push(("prompt_tokens", "Prompt tokens of admitted requests", tokens.prompt as f64));
            counters.push(("generated_tokens", "Tokens generated", tokens.generated as f64));
            gauges.push(("sessions_running", "Sessions with a lane", now.running as f64));
            gauges.push(("sessions_queued", "Sessions waiting for a lane", now.queued as f64));
            gauges.push(("frames_in_flight", "Frames under way in the chain", now.in_flight as f64));
            gauges.push(("kv_cells_used", "KV cells that running sessions use", now.cells as f64));
        }
        for (name, help, value) in counters {
            let metric = ConstCounter::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        for (name, help, value) in gauges {
            let metric = ConstGauge::new(value);
            metric.encode(encoder.encode_descriptor(name, help, None, metric.metric_type())?)?;
        }
        Ok(())
    }
}
