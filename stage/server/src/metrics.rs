//! Prometheus metrics of a stage: the engine's counters, its links, its telemetry and, on stage 0, the scheduler and the
//! sums over all stages.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::http::header;
use axum::routing::get;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use splitmodel_chain::worker::{PrefixCounts, RefillCounts};
use splitmodel_link::Sender;
use splitmodel_link::connection::Traffic;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::coordinator::Coordinator;
use crate::meter::EngineStats;
use crate::telemetry::SpanCounts;

/// What Prometheus is told the text is.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics of this stage.
pub struct Metrics {
    registry: Registry,
    figures: Arc<Source>,
}

/// A connection of this stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// From the stage before.
    Upstream,
    /// To the stage after.
    Downstream,
    /// From the last stage to stage 0; on the last stage, its downstream.
    Return,
}

impl Line {
    const ALL: [Self; 3] = [Self::Upstream, Self::Downstream, Self::Return];

    const fn name(self) -> &'static str {
        match self {
            Self::Upstream => "upstream",
            Self::Downstream => "downstream",
            Self::Return => "return",
        }
    }
}

/// Traffic of all connections that one line had, the present one included.
#[derive(Debug, Default)]
struct LineTotals {
    over: Traffic,
    now: Option<Sender>,
}

impl LineTotals {
    fn total(&self) -> Traffic {
        self.now.as_ref().map_or(self.over, |s| add(self.over, s.traffic()))
    }
}

fn add(a: Traffic, b: Traffic) -> Traffic {
    Traffic {
        sent: a.sent + b.sent,
        received: a.received + b.received,
        sent_bytes: a.sent_bytes + b.sent_bytes,
        received_bytes: a.received_bytes + b.received_bytes,
        write: a.write + b.write,
        wait: a.wait + b.wait,
        credit_wait: a.credit_wait + b.credit_wait,
    }
}

#[derive(Debug)]
struct Source {
    engine: Arc<EngineStats>,
    spans: Arc<SpanCounts>,
    coordinator: OnceLock<Arc<Coordinator>>,
    cells: AtomicU64,
    activation_bytes: AtomicU64,
    formations: AtomicU64,
    lines: Mutex<[LineTotals; Line::ALL.len()]>,
}

impl Metrics {
    /// Metrics of a stage.
    #[must_use]
    pub fn new(stage: u32, engine: Arc<EngineStats>, spans: Arc<SpanCounts>) -> Self {
        let labels = [("stage".into(), stage.to_string().into())];
        let mut registry = Registry::with_prefix_and_labels("splitmodel", labels.into_iter());
        engine.register(&mut registry);
        let figures = Arc::new(Source {
            engine,
            spans,
            coordinator: OnceLock::new(),
            cells: AtomicU64::new(0),
            activation_bytes: AtomicU64::new(0),
            formations: AtomicU64::new(0),
            lines: Mutex::default(),
        });
        registry.register_collector(Box::new(Collected(figures.clone())));
        Self { registry, figures }
    }

    /// Adds the scheduler's figures (stage 0).
    pub fn set_coordinator(&self, coordinator: Arc<Coordinator>) {
        let _ = self.figures.coordinator.set(coordinator); // set once, at the start
    }

    /// Says how many KV cells the stage has, and the bytes of a token's activations (f32) at one stage.
    pub fn set_model(&self, cells: u32, activation_bytes: u64) {
        self.figures.cells.store(cells.into(), Relaxed);
        self.figures.activation_bytes.store(activation_bytes, Relaxed);
    }

    /// Counts a formation that is whole.
    pub fn formed(&self) {
        self.figures.formations.fetch_add(1, Relaxed);
    }

    /// A line has a new connection; what the one before carried stays counted.
    pub fn connected(&self, line: Line, sender: Sender) {
        let mut lines = self.figures.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = &mut lines[line as usize];
        totals.over = totals.total();
        totals.now = Some(sender);
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

/// Serves `/metrics`, and nothing else, until `stop`.
///
/// # Errors
/// When the listener fails.
pub async fn serve(listener: TcpListener, metrics: Arc<Metrics>, stop: CancellationToken) -> std::io::Result<()> {
    let text = move || async move {
        let text = metrics.render() + "# EOF\n";
        ([(header::CONTENT_TYPE, CONTENT_TYPE)], text)
    };
    let router = Router::new().route("/metrics", get(text));
    axum::serve(listener, router).with_graceful_shutdown(stop.cancelled_owned()).await
}

#[derive(Debug)]
struct Collected(Arc<Source>);

impl Collector for Collected {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let count = |n: &AtomicU64| n.load(Relaxed) as f64;
        let (source, e) = (&self.0, &self.0.engine);
        let mut out = Out(&mut encoder);
        out.counter("frames", "Frames computed", count(&e.frames))?;
        out.counter("rows", "Rows of computed frames", count(&e.rows))?;
        out.counter("rows_wanted", "Rows a token was wanted from", count(&e.wanted))?;
        out.counter("rows_dropped", "Rows that could not be computed here or upstream", count(&e.dropped))?;
        out.counter("formations", "Times the chain was formed", count(&source.formations))?;
        out.gauge("lanes_in_use", "Lanes in use", count(&e.lanes))?;
        out.gauge("kv_cells", "KV cells of this stage", count(&source.cells))?;
        let spans = [
            ("exported", count(&source.spans.exported)),
            ("dropped_queue_full", count(&source.spans.queue_full)),
            ("dropped_not_taken", count(&source.spans.refused)),
        ];
        out.family("telemetry_spans", "Spans of traces by what became of them", "outcome", spans)?;
        prefix_figures(&e.prefixes(), &mut out)?;
        source.lines(&mut out)?;
        match source.coordinator.get() {
            Some(coordinator) => coordinator_figures(coordinator, source.activation_bytes.load(Relaxed), &mut out),
            None => Ok(()),
        }
    }
}

impl Source {
    fn lines(&self, out: &mut Out<'_, '_>) -> std::fmt::Result {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let traffic: Vec<_> =
            Line::ALL.iter().zip(lines.iter()).map(|(line, totals)| (line.name(), totals.total())).collect();
        drop(lines);
        type Get = fn(&Traffic) -> f64;
        let families: [(&str, &str, Get); 7] = [
            ("link_sent_messages", "Messages sent", |t| t.sent as f64),
            ("link_received_messages", "Messages received", |t| t.received as f64),
            ("link_sent_bytes", "Bytes sent, before TLS", |t| t.sent_bytes as f64),
            ("link_received_bytes", "Bytes received, after TLS", |t| t.received_bytes as f64),
            ("link_write_seconds", "Time in encoding and writing messages", |t| t.write.as_secs_f64()),
            ("link_wait_seconds", "Time messages waited to be written", |t| t.wait.as_secs_f64()),
            ("link_credit_wait_seconds", "Of that, time without a credit", |t| t.credit_wait.as_secs_f64()),
        ];
        for (name, help, get) in families {
            out.family(name, help, "line", traffic.iter().map(|(line, t)| (*line, get(t))))?;
        }
        Ok(())
    }
}

fn prefix_figures(p: &PrefixCounts, out: &mut Out<'_, '_>) -> std::fmt::Result {
    let restores = [("hit", p.hits as f64), ("miss", p.misses as f64), ("error", p.errors as f64)];
    out.family(
        "kv_restores",
        "Restores of prefixes on this stage; error: a state could not be kept or set",
        "outcome",
        restores,
    )?;
    out.counter("kv_restores_in_place", "Of the hits, those of cells that the lane still held", p.in_place as f64)?;
    out.counter("kv_restored_tokens", "Cells that they brought back", p.tokens as f64)?;
    out.counter("kv_restore_seconds", "Time in restoring prefixes", p.restoring.as_secs_f64())?;
    out.counter("kv_record_seconds", "Time in recording prefixes", p.recording.as_secs_f64())?;
    out.gauge("kv_prefixes", "Prefixes that this stage keeps", p.kept as f64)?;
    out.gauge("kv_state_bytes", "Bytes of exact states that this stage keeps", p.bytes as f64)?;
    out.counter("kv_state_evictions", "Exact states given up for others, for want of bytes", p.store.evictions as f64)?;
    let blocks = [("new", p.store.new_blocks as f64), ("reused", p.store.reused_blocks as f64)];
    out.family("kv_state_blocks", "Blocks of recorded exact states by whether they were there", "found", blocks)?;
    let d = &p.disk;
    let files = [
        ("written", d.written as f64),
        ("read", d.read as f64),
        ("dropped", d.dropped as f64),
        ("error", d.errors as f64),
        ("quarantined", d.quarantined as f64),
        ("evicted", d.evictions as f64),
    ];
    out.gauge("kv_disk_bytes", "Bytes of prefixes on this stage's disk", p.disk_bytes as f64)?;
    out.family("kv_disk", "Prefixes on this stage's disk by what became of them", "outcome", files)?;
    p.refills.as_ref().map_or(Ok(()), |r| refill_figures(r, out))
}

fn refill_figures(r: &RefillCounts, out: &mut Out<'_, '_>) -> std::fmt::Result {
    let help = "Bytes of activations that stage 0 keeps: of prefixes, and of sessions under way";
    out.gauge("kv_activation_bytes", help, r.bytes as f64)?;
    let records = [("stored", r.store.stored as f64), ("skipped", r.store.skipped as f64)];
    let help = "Recorded prefixes by whether their activations were kept, too";
    out.family("kv_activation_records", help, "outcome", records)?;
    let help = "Prefixes whose activations were given up for others, for want of bytes";
    out.counter("kv_activation_evictions", help, r.store.evictions as f64)?;
    let refills = [("served", r.served as f64), ("missed", r.missed as f64)];
    let help = "Prompts of which a stage had lost the prefix, by whether stage 0 had its cells and activations";
    out.family("kv_refills", help, "outcome", refills)?;
    let help = "Prompt tokens that stage 0 gave kept activations of, and did not compute again";
    out.counter("kv_refilled_tokens", help, r.tokens as f64)
}

fn coordinator_figures(coordinator: &Coordinator, activation_bytes: u64, out: &mut Out<'_, '_>) -> std::fmt::Result {
    let (now, figures) = coordinator.counts();
    out.counter("prompt_tokens", "Prompt tokens of admitted requests", figures.prompt as f64)?;
    out.counter("cached_tokens", "Of those, tokens that came from kept prefixes", figures.cached as f64)?;
    // A prefix is restored by every stage or by none.
    let saved = (figures.cached * activation_bytes) as f64;
    let links = figures.stages.len().saturating_sub(1) as f64;
    let saved = [("stage_0", saved), ("links", saved * links)];
    let help = "Activations (f32) that kept prefixes made superfluous: computed by stage 0, and sent over the links";
    out.family("kv_saved_activation_bytes", help, "where", saved)?;
    let lookups = [("hit", now.hits as f64), ("miss", now.misses as f64), ("shortened", now.shortened as f64)];
    let help = "Prompts by whether they began with a kept prefix; shortened: a stage had lost the longest, and it was tried again";
    out.family("kv_lookups", help, "outcome", lookups)?;
    out.counter("kv_replays", "Deterministic requests whose first tokens were known", now.replays as f64)?;
    out.counter("kv_replayed_tokens", "Those tokens", now.replayed_tokens as f64)?;
    let kind = now.payload.name();
    out.family("kv_evictions", "Prefixes given up to make room", "kind", [(kind, now.evictions as f64)])?;
    out.gauge("kv_residents", "Prefixes that the chain keeps", now.kept as f64)?;
    out.gauge("kv_resident_tokens", "Tokens of them", now.kept_tokens as f64)?;
    out.gauge("kv_resident_cells", "KV cells that they use, as if none were shared", now.kept_cells as f64)?;
    out.counter("generated_tokens", "Tokens generated", figures.generated as f64)?;
    out.counter("first_tokens", "First tokens whose time was divided into parts", figures.first_tokens as f64)?;
    let parts = figures.ttft.iter().map(|(part, time)| (*part, time.as_secs_f64()));
    out.family("ttft_seconds", "Time to first tokens, divided into its parts", "part", parts)?;
    out.gauge("sessions_running", "Sessions with a lane", now.running as f64)?;
    out.gauge("sessions_queued", "Sessions waiting for a lane", now.queued as f64)?;
    out.gauge("frames_in_flight", "Frames under way in the chain", now.in_flight as f64)?;
    out.gauge("kv_cells_used", "KV cells that running sessions use", now.cells as f64)?;
    let stages: Vec<_> = (0..figures.stages.len()).map(|i| i.to_string()).collect();
    let all = || stages.iter().map(String::as_str).zip(&figures.stages);
    let seconds = |time: Duration| time.as_secs_f64();
    out.family("chain_frames", "Answered frames, as each stage says", "of", all().map(|(i, s)| (i, s.frames as f64)))?;
    out.family("chain_rows", "Rows of answered frames", "of", all().map(|(i, s)| (i, s.rows as f64)))?;
    let wait = all().map(|(i, s)| (i, seconds(s.wait)));
    out.family("chain_wait_seconds", "Time answered frames waited for each engine", "of", wait)?;
    let compute = all().map(|(i, s)| (i, seconds(s.compute)));
    out.family("chain_compute_seconds", "Time answered frames were computed", "of", compute)?;
    let encode = all().map(|(i, s)| (i, seconds(s.encode)));
    out.family("chain_encode_seconds", "Time activations were brought out", "of", encode)
}

/// Writes metrics one by one.
struct Out<'a, 'b>(&'a mut DescriptorEncoder<'b>);

impl Out<'_, '_> {
    fn counter(&mut self, name: &str, help: &str, value: f64) -> std::fmt::Result {
        ConstCounter::new(value).encode(self.0.encode_descriptor(name, help, None, MetricType::Counter)?)
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) -> std::fmt::Result {
        ConstGauge::new(value).encode(self.0.encode_descriptor(name, help, None, MetricType::Gauge)?)
    }

    /// Counters that differ in one label.
    fn family<'s>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'s str, f64)>,
    ) -> std::fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (value, n) in values {
            ConstCounter::new(n).encode(metric.encode_family(&[(label, value)])?)?;
        }
        Ok(())
    }
}
