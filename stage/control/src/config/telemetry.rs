use serde::{Deserialize, Serialize};

/// What is measured of requests, and where traces go. Counters at `/metrics` are always there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TelemetryConfig {
    /// How much.
    pub tier: Tier,
    /// OTLP collector that takes gRPC, such as `http://collector:4317`. Absent: the environment variables
    /// `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` and `OTEL_EXPORTER_OTLP_ENDPOINT` say it, or no traces are sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub otlp_endpoint: Option<String>,
    /// Share of requests to trace, from 0 to 1, of those that bring no decision of their own in `traceparent`.
    pub sample_ratio: f64,
    /// Spans that may wait for the collector; more are dropped and counted.
    pub queue: u32,
}

impl Default for TelemetryConfig {
    fn default() -> Self {
        Self { tier: Tier::Summary, otlp_endpoint: None, sample_ratio: 1.0, queue: 4096 }
    }
}

/// How much is measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tier {
    /// Nothing but counters.
    Off,
    /// Per request and per stage.
    #[default]
    Summary,
    /// Per frame as well.
    Debug,
}
