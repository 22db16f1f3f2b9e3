//! The way of spans to a collector: a bounded queue that whoever has a span pushes into without waiting, and a task that
//! sends batches. A dead or slow collector costs spans, which are counted, and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Most spans of one request to the collector.
const BATCH: usize = 512;
/// A batch waits this long for company.
const LINGER: Duration = Duration::from_secs(1);
/// Longest wait for the collector.
const EXPORT: Duration = Duration::from_secs(5);
/// Longest wait for the collector when the process ends.
const LAST: Duration = Duration::from_secs(2);

/// What became of spans.
#[derive(Debug, Default)]
pub struct SpanCounts {
    /// Taken by the collector.
    pub exported: AtomicU64,
    /// Dropped because the queue was full.
    pub queue_full: AtomicU64,
    /// Dropped because the collector did not take them.
    pub refused: AtomicU64,
}

/// The queue's near end.
#[derive(Clone, Debug)]
pub struct SpanQueue {
    spans: mpsc::Sender<SpanData>,
    counts: Arc<SpanCounts>,
    /// What made the spans; every span names it.
    pub scope: InstrumentationScope,
}

impl SpanQueue {
    /// Hands a span over, or counts it as dropped. Never waits.
    pub fn push(&self, span: SpanData) {
        if self.spans.try_send(span).is_err() {
            self.counts.queue_full.fetch_add(1, Relaxed);
        }
    }
}

/// The export's end.
#[derive(Debug)]
pub struct Flush {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Flush {
    /// Sends what waits, as far as the collector takes it at once.
    pub async fn finish(self) {
        self.stop.cancel();
        let _ = tokio::time::timeout(LAST, self.task).await; // a dead collector must not keep the process
    }
}

/// Starts the export of spans to `endpoint`, at most `queue` of which wait at a time. To be called within a tokio runtime.
///
/// # Errors
/// When the endpoint is no URL of a gRPC service.
pub fn start(
    endpoint: &str,
    queue: usize,
    resource: Vec<KeyValue>,
    counts: Arc<SpanCounts>,
) -> Result<(SpanQueue, Flush), ExporterBuildError> {
    let mut exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT).build()?;
    exporter.set_resource(&Resource::builder_empty().with_attributes(resource).build());
    let (spans, received) = mpsc::channel(queue);
    let stop = CancellationToken::new();
    let task = tokio::spawn(export(exporter, received, counts.clone(), stop.clone()));
    let scope = InstrumentationScope::builder("splitmodel").with_version(env!("CARGO_PKG_VERSION")).build();
    Ok((SpanQueue { spans, counts, scope }, Flush { stop, task }))
}

async fn export(
    exporter: SpanExporter,
    mut spans: mpsc::Receiver<SpanData>,
    counts: Arc<SpanCounts>,
    stop: CancellationToken,
) {
    let mut reachable = true;
    loop {
        let mut batch = Vec::with_capacity(BATCH);
        let ending = tokio::select! {
            n = spans.recv_many(&mut batch, BATCH) => n == 0,
            () = stop.cancelled() => true,
        };
        if !ending && batch.len() < BATCH {
            tokio::select! {
                () = tokio::time::sleep(LINGER) => {}
                () = stop.cancelled() => {}
            }
        }
        while batch.len() < BATCH
            && let Ok(span) = spans.try_recv()
        {
            batch.push(span);
        }
        if !batch.is_empty() {
            let n = batch.len() as u64;
            let limit = if stop.is_cancelled() { LAST } else { EXPORT };
            let sent = tokio::time::timeout(limit, exporter.export(batch)).await;
            let error = match sent {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some(format!("no answer in {limit:?}")),
            };
            let counter = if error.is_none() { &counts.exported } else { &counts.refused };
            counter.fetch_add(n, Relaxed);
            show(&mut reachable, error);
        } else if ending {
            return;
        }
    }
}

/// Logs when the collector goes and when it comes back, not every batch.
fn show(reachable: &mut bool, error: Option<String>) {
    match (std::mem::replace(reachable, error.is_none()), error) {
        (true, Some(error)) => tracing::warn!(error, "the trace collector takes no spans; they are dropped"),
        (false, None) => tracing::info!("the trace collector takes spans again"),
        _ => {}
    }
}
