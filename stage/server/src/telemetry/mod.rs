//! Traces and what is measured of requests. Off the token path: spans are made when a session starts, gets its first token
//! and ends, and pushed into a queue that never makes anybody wait.

mod export;
mod request;
pub mod timeline;

use std::sync::Arc;

use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;
use splitmodel_chain::observe::{Observer, Share, Stay};
use splitmodel_control::StageConfig;
use splitmodel_control::config::Tier;
use splitmodel_openai::GenerateRequest;

pub use export::{Flush, SpanCounts, SpanQueue};
pub use request::{Ended, RequestTrace};
use request::{Place, Sampler, number, span};

/// Environment variables that name a collector, in OpenTelemetry's order.
const ENVIRONMENT: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Why telemetry cannot begin.
#[derive(Debug, thiserror::Error)]
#[error("telemetry.otlp_endpoint: `{endpoint}` cannot be used: {source}; write a URL such as http://collector:4317")]
pub struct TelemetryError {
    endpoint: String,
    source: opentelemetry_otlp::ExporterBuildError,
}

/// A collector that the environment names; what is no URL of one is left out with a warning.
fn from_environment(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let url = ENVIRONMENT.into_iter().find_map(|name| variable(name).filter(|url| !url.is_empty()))?;
    let good = url.starts_with("http://") || url.starts_with("https://");
    if !good {
        tracing::warn!(url, "OTEL_EXPORTER_OTLP_ENDPOINT is no http:// or https:// URL; no traces are sent");
    }
    good.then_some(url)
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Telemetry {
    tier: Tier,
    stage: u32,
    model: String,
    counts: Arc<SpanCounts>,
    queue: Option<SpanQueue>,
    sampler: Sampler,
}

impl Telemetry {
    /// Telemetry of a stage, and what ends it where there is a collector. To be called within a tokio runtime.
    ///
    /// # Errors
    /// [`TelemetryError`].
    pub fn start(config: &StageConfig, instance: &str) -> Result<(Self, Option<Flush>), TelemetryError> {
        let t = &config.telemetry;
        let counts = Arc::new(SpanCounts::default());
        let endpoint = t
            .otlp_endpoint
            .clone()
            .or_else(|| from_environment(|v| std::env::var(v).ok()))
            .filter(|_| t.tier != Tier::Off);
        let resource = vec![
            KeyValue::new("service.name", "splitmodel"),
            KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            KeyValue::new("service.instance.id", instance.to_owned()),
            KeyValue::new("splitmodel.chain", config.chain.clone()),
            KeyValue::new("splitmodel.stage", i64::from(config.stage)),
        ];
        let start = |endpoint: String| {
            tracing::info!(endpoint, tier = ?t.tier, "traces go to the collector");
            export::start(&endpoint, t.queue as usize, resource, counts.clone())
                .map_err(|source| TelemetryError { endpoint, source })
        };
        let started = endpoint.map(start).transpose();
        // What the environment says was perhaps meant for others: it must not keep the model from being served.
        let started = match started {
            Err(error) if t.otlp_endpoint.is_none() => {
                tracing::warn!(%error, "no traces are sent");
                None
            }
            started => started?,
        };
        let (queue, flush) = started.unzip();
        let model = config.api.as_ref().map_or_else(|| config.chain.clone(), |a| a.model.clone());
        let sampler = Sampler::new(t.sample_ratio);
        Ok((Self { tier: t.tier, stage: config.stage, model, counts, queue, sampler }, flush))
    }

    /// Whether requests are measured one by one.
    #[must_use]
    pub fn measures(&self) -> bool {
        self.tier != Tier::Off
    }

    /// Whether traces tell of single steps, too.
    #[must_use]
    pub fn details(&self) -> bool {
        self.tier == Tier::Debug
    }

    /// What became of spans.
    #[must_use]
    pub fn counts(&self) -> Arc<SpanCounts> {
        self.counts.clone()
    }

    /// The trace of a generation, if it is traced.
    #[must_use]
    pub fn request(&self, request: &GenerateRequest) -> Option<Box<RequestTrace>> {
        let queue = self.queue.clone()?;
        let place = self.sampler.place(request)?;
        Some(Box::new(RequestTrace::new(queue, place, request, &self.model)))
    }

    /// What the worker of this stage tells, if it is wanted.
    #[must_use]
    pub fn observer(&self) -> Option<Box<dyn Observer>> {
        let queue = self.queue.clone()?;
        Some(Box::new(StageSpans { queue, stage: self.stage, shares: self.details() }))
    }
}

/// Makes a span of each session's stay on this stage and, at the debug tier, of its share in each frame.
struct StageSpans {
    queue: SpanQueue,
    stage: u32,
    shares: bool,
}

impl Observer for StageSpans {
    fn stay(&mut self, stay: Stay) {
        let w = &stay.work;
        let mut attributes = vec![
            KeyValue::new("splitmodel.stage", i64::from(self.stage)),
            number("splitmodel.session", stay.session),
            KeyValue::new("splitmodel.lane", i64::from(stay.lane)),
            number("splitmodel.frames", w.frames),
            number("splitmodel.rows", w.rows),
            number("splitmodel.wait_us", w.wait_us),
            number("splitmodel.compute_us", w.compute_us),
            number("splitmodel.encode_us", w.encode_us),
        ];
        if let Some(time) = stay.restoring.filter(|_| self.shares) {
            attributes.push(KeyValue::new("splitmodel.cache.restore_ms", time.as_secs_f64() * 1e3));
        }
        let name = (format!("stage {}", self.stage), SpanKind::Internal);
        self.queue.push(span(&self.queue, Place::below(&stay.context), name, (stay.began, stay.ended), attributes));
    }

    fn wants_shares(&self) -> bool {
        self.shares
    }

    fn share(&mut self, share: Share) {
        let s = &share.stats;
        let attributes = vec![
            KeyValue::new("splitmodel.stage", i64::from(self.stage)),
            number("splitmodel.session", share.session),
            number("splitmodel.frame", share.seq),
            number("splitmodel.rows", share.rows as u64),
            number("splitmodel.frame.rows", s.rows.into()),
            number("splitmodel.wait_us", s.wait_us.into()),
            number("splitmodel.compute_us", s.compute_us.into()),
            number("splitmodel.encode_us", s.encode_us.into()),
        ];
        let name = (format!("frame at stage {}", self.stage), SpanKind::Internal);
        self.queue.push(span(&self.queue, Place::below(&share.context), name, (share.began, share.ended), attributes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_names_a_collector_or_costs_traces_only() {
        let from = |set: &[(&str, &str)]| {
            from_environment(|name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
        };
        let [traces, general] = ENVIRONMENT;
        assert_eq!(from(&[]), None);
        assert_eq!(from(&[(general, "http://a:4317")]).as_deref(), Some("http://a:4317"));
        assert_eq!(from(&[(general, "http://a:4317"), (traces, "https://b")]).as_deref(), Some("https://b"));
        assert_eq!(from(&[(traces, ""), (general, "http://a:4317")]).as_deref(), Some("http://a:4317"));
        for wrong in ["collector:4317", "grpc://collector", "/var/run/collector"] {
            assert_eq!(from(&[(general, wrong)]), None, "{wrong}");
        }
        // A URL by its scheme alone, which no exporter takes: the stage starts all the same.
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let _inside = runtime.enter();
        let counts = Arc::new(SpanCounts::default());
        assert!(export::start("http://", 1, Vec::new(), counts).is_err());
    }
}
