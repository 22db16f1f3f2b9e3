//! Traces at a real collector's interface, metrics as Prometheus reads them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::json;
use splitmodel_control::config::Tier;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

use crate::harness::chain::Chain;
use crate::harness::client::{Client, request};
use crate::harness::models::prompt;
use crate::harness::plan::Plan;
use crate::harness::until;

const CUTS: [u32; 4] = [0, 10, 20, 30];
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Takes spans, and notes which stage sent them.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(i64, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut all = self.0.lock().unwrap();
        for sent in request.into_inner().resource_spans {
            let resource = sent.resource.unwrap();
            let stage = resource.attributes.iter().find(|a| a.key == "splitmodel.stage").unwrap();
            let Some(Any::IntValue(stage)) = stage.value.clone().unwrap().value else { panic!("{stage:?}") };
            all.extend(sent.scope_spans.into_iter().flat_map(|s| s.spans).map(|s| (stage, s)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn serve(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = TraceServiceServer::new(self.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        address
    }

    /// Spans of the test's trace, once `complete` says that all are there.
    async fn spans(&self, complete: impl Fn(&[(i64, Span)]) -> bool) -> Vec<(i64, Span)> {
        until("all spans of the trace", async || {
            let ours = |(_, s): &&(i64, Span)| hex(&s.trace_id) == TRACE;
            let spans: Vec<_> = self.0.lock().unwrap().iter().filter(ours).cloned().collect();
            complete(&spans).then_some(spans)
        })
        .await
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn attribute(span: &Span, key: &str) -> Option<Any> {
    span.attributes.iter().find(|a| a.key == key)?.value.clone()?.value
}

fn number(span: &Span, key: &str) -> i64 {
    match attribute(span, key) {
        Some(Any::IntValue(n)) => n,
        other => panic!("{key} of {}: {other:?}", span.name),
    }
}

fn seconds(span: &Span, key: &str) -> f64 {
    match attribute(span, key) {
        Some(Any::DoubleValue(n)) => n,
        other => panic!("{key} of {}: {other:?}", span.name),
    }
}

/// A chain that sends its traces to `collector`, with a queue of `queue` spans.
async fn traced(collector: SocketAddr, tier: Tier, queue: u32) -> Chain {
    let chain = Chain::spawn_with(&Plan::sample(&CUTS), |configs| {
        for config in configs {
            config.telemetry.otlp_endpoint = Some(format!("http://{collector}"));
            (config.telemetry.tier, config.telemetry.queue) = (tier, queue);
            config.scheduling.prefill_chunk = Some(64);
        }
    });
    chain.ready().await;
    chain
}

/// Asks for `max_tokens` tokens after 300 that nobody sent before, as part of the test's trace.
async fn ask(chain: &Chain, max_tokens: usize, flags: &str) {
    static ASKED: AtomicU64 = AtomicU64::new(1);
    ask_with(chain, ASKED.fetch_add(1, Ordering::Relaxed), max_tokens, flags).await;
}

/// Asks as part of the test's trace; seeds are prompts. Tokens of it that were kept.
async fn ask_with(chain: &Chain, seed: u64, max_tokens: usize, flags: &str) -> i64 {
    let api = chain.configs[0].api.as_ref().unwrap().bind;
    let mut body = request(seed, &prompt(700 + seed, 300), max_tokens);
    body["stream"] = json!(false);
    let response = reqwest::Client::builder().no_proxy().build().unwrap();
    let response = response.post(format!("http://{api}/v1/completions")).json(&body);
    let response = response.header("traceparent", format!("00-{TRACE}-{PARENT}-{flags}")).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let answer: serde_json::Value = response.json().await.unwrap();
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_i64().unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trace_says_what_came_from_a_cache_as_the_answer_does() {
    let collector = Collector::default();
    let mut chain = traced(collector.serve().await, Tier::Summary, 4096).await;
    let told = [ask_with(&chain, 90, 3, "01").await, ask_with(&chain, 90, 3, "01").await];
    assert!(told[0] == 0 && told[1] >= 299, "{told:?}");
    let spans = collector.spans(|s| s.len() >= 14).await;
    let mut roots: Vec<_> = spans.iter().map(|(_, s)| s).filter(|s| s.name == "text_completion e2e").collect();
    roots.sort_by_key(|s| s.start_time_unix_nano);
    for (root, (cached, outcome)) in roots.iter().zip(told.iter().zip(["miss", "hit"])) {
        assert_eq!(number(root, "gen_ai.usage.cache_read.input_tokens"), *cached);
        assert_eq!(attribute(root, "splitmodel.cache.outcome"), Some(Any::StringValue(outcome.into())));
        assert_eq!(attribute(root, "splitmodel.cache.kind"), Some(Any::StringValue("copied".into())));
    }
    assert_eq!((roots.len(), timed(&spans)), (2, [0; 3]), "times are for the debug tier");
    // 576 floats a token at stage 0 and over each of two links.
    let saved = chain.client.metric("splitmodel_kv_saved_activation_bytes_total").await;
    assert_eq!(saved as i64, told[1] * 576 * 4 * 3);
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_tree_over_all_stages_whose_parts_sum_to_the_first_token() {
    let collector = Collector::default();
    let mut chain = traced(collector.serve().await, Tier::Summary, 4096).await;
    ask(&chain, 9, "00").await; // the client records nothing, so nobody does
    ask(&chain, 12, "01").await;
    let spans = collector.spans(|s| s.len() >= 7).await;
    let named: HashMap<&str, &Span> = spans.iter().map(|(_, s)| (s.name.as_str(), s)).collect();
    assert_eq!((spans.len(), named.len()), (7, 7), "{:?}", named.keys());
    let root = named["text_completion e2e"];
    assert_eq!(hex(&root.parent_span_id), PARENT);
    for (stage, span) in &spans {
        let own = span.name.strip_prefix("stage ").map_or(0, |n| n.parse().unwrap());
        assert_eq!(*stage, own, "{} came from stage {stage}", span.name);
        if span.name != root.name {
            assert_eq!(span.parent_span_id, root.span_id, "{}", span.name);
            assert!(span.start_time_unix_nano >= root.start_time_unix_nano, "{}", span.name);
        }
        assert!(span.end_time_unix_nano >= span.start_time_unix_nano);
    }
    assert_eq!(number(root, "gen_ai.usage.input_tokens"), 300);
    assert_eq!(number(root, "gen_ai.usage.output_tokens"), 12);
    assert_eq!(attribute(root, "gen_ai.operation.name"), Some(Any::StringValue("text_completion".into())));
    assert_eq!(attribute(root, "gen_ai.request.model"), Some(Any::StringValue("e2e".into())));
    for stage in 0..3 {
        let span = named[format!("stage {stage}").as_str()];
        // 300 rows of the prompt, then one for each token but the last.
        assert_eq!(number(span, "splitmodel.rows"), 311, "stage {stage}");
        assert_eq!(number(span, "splitmodel.frames"), 5 + 11, "stage {stage}");
        assert!(number(span, "splitmodel.compute_us") > 0);
    }
    let prefill = named["prefill"];
    let parts = ["prepare", "queue", "wait", "compute", "encode", "write", "downstream"];
    let sum: f64 = parts.iter().map(|p| seconds(prefill, &format!("splitmodel.ttft.{p}"))).sum();
    let first_token = (prefill.end_time_unix_nano - root.start_time_unix_nano) as f64 / 1e9;
    println!("first token after {first_token:.4} s, the parts sum to {sum:.4} s");
    assert!((sum / first_token - 1.0).abs() < 0.05, "{sum} s of {first_token} s: {prefill:?}");
    assert!((sum / seconds(root, "splitmodel.ttft") - 1.0).abs() < 1e-6);
    let computed = seconds(prefill, "splitmodel.ttft.compute");
    assert!(computed > 0.0 && seconds(prefill, "splitmodel.ttft.write") > 0.0, "{prefill:?}");
    // Five frames of 300 rows × 576 floats, headers and rows besides.
    assert!(number(prefill, "splitmodel.bytes") > 300 * 576 * 4, "{prefill:?}");
    assert!(number(prefill, "splitmodel.last_frame.stage_2.compute_us") > 0);
    // No text of anybody's anywhere.
    assert!(!format!("{spans:?}").contains("gen_ai.prompt"));
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_debug_tier_shows_every_frame_at_every_stage_and_off_shows_nothing() {
    let collector = Collector::default();
    let address = collector.serve().await;
    let mut chain = traced(address, Tier::Debug, 4096).await;
    ask(&chain, 4, "01").await;
    let frames = |spans: &[(i64, Span)], stage: i64| {
        let at = format!("frame at stage {stage}");
        spans.iter().filter(|(_, s)| s.name == at).map(|(_, s)| number(s, "splitmodel.rows")).collect::<Vec<_>>()
    };
    let spans = collector.spans(|s| s.len() >= 7 + 3 * 8).await;
    for stage in 0..3 {
        let mut rows = frames(&spans, stage);
        rows.sort_unstable();
        assert_eq!(rows, [1, 1, 1, 44, 64, 64, 64, 64], "stage {stage}");
    }
    // The request, and no restore at any stage; then one at each.
    assert_eq!(timed(&spans), [1, 1, 0]);
    let root = spans.iter().map(|(_, s)| s).find(|s| s.name == "text_completion e2e").unwrap();
    assert_eq!(
        number(root, "splitmodel.cache.identities"),
        1,
        "its namespace; with log-probabilities nothing is replayed"
    );
    ask_with(&chain, 91, 3, "01").await;
    ask_with(&chain, 91, 3, "01").await;
    collector.spans(|s| timed(s) == [3, 3, 3]).await;
    chain.end().await;
    let before = collector.0.lock().unwrap().len();
    let mut chain = traced(address, Tier::Off, 4096).await;
    ask(&chain, 4, "01").await;
    assert_eq!(chain.client.metric("splitmodel_first_tokens_total").await, 0.0);
    chain.end().await; // would send what waits
    assert_eq!(collector.0.lock().unwrap().len(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_dead_or_silent_costs_spans_and_nothing_else() {
    // One refuses connections, the other takes them and never says a word.
    let dead = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for (collector, outcome) in [(dead, "dropped_not_taken"), (silent.local_addr().unwrap(), "dropped_queue_full")] {
        let mut chain = traced(collector, Tier::Debug, 4).await;
        let dropped = async || {
            let text = scrape(chain.configs[0].metrics.unwrap().bind).await;
            value(&text, "splitmodel_telemetry_spans_total", &format!("outcome=\"{outcome}\""))
        };
        until("spans to be dropped", async || {
            let begun = Instant::now();
            ask(&chain, 8, "01").await;
            assert!(begun.elapsed() < Duration::from_secs(60), "the collector holds requests up");
            (dropped().await > 0.0).then_some(())
        })
        .await;
        chain.end().await;
    }
}

async fn scrape(address: SocketAddr) -> String {
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let response = client.get(format!("http://{address}/metrics")).send().await.unwrap();
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    assert!(kind.starts_with("application/openmetrics-text"), "{kind}");
    let text = response.text().await.unwrap();
    assert!(text.ends_with("# EOF\n"));
    text
}

/// Spans that say how many identities there were, how long those took, and how long a restore.
fn timed(spans: &[(i64, Span)]) -> [usize; 3] {
    let keys = ["splitmodel.cache.identities", "splitmodel.cache.identity_ms", "splitmodel.cache.restore_ms"];
    keys.map(|key| spans.iter().filter(|(_, s)| attribute(s, key).is_some()).count())
}

/// The value of a metric's line that has `label`.
fn value(text: &str, name: &str, label: &str) -> f64 {
    let line = text.lines().find(|l| l.starts_with(name) && l.contains(label));
    let line = line.unwrap_or_else(|| panic!("no {name} with {label} in {text}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_show_batches_labels_and_sums_that_are_those_of_the_stages() {
    let mut chain = Chain::start(&Plan::sample(&CUTS)).await;
    let streams = (1..=8).map(|seed| {
        let client = chain.client.clone();
        tokio::spawn(async move { client.ask(&request(seed, &prompt(seed, 40), 24)).await })
    });
    let streams: Vec<_> = streams.collect();
    // What an autoscaler looks at, under load.
    for (metric, least) in
        [("splitmodel_sessions_running", 4.0), ("splitmodel_sessions_queued", 1.0), ("splitmodel_kv_cells_used", 40.0)]
    {
        until(metric, async || (chain.client.metric(metric).await >= least).then_some(())).await;
    }
    for stream in streams {
        stream.await.unwrap();
    }
    assert_eq!(chain.client.metric("splitmodel_generated_tokens_total").await, 8.0 * 24.0);
    let api = scrape(chain.configs[0].api.as_ref().unwrap().bind).await;
    let operation = "gen_ai_operation_name=\"text_completion\"";
    assert_eq!(value(&api, "gen_ai_server_time_to_first_token_seconds_count", operation), 8.0);
    assert_eq!(value(&api, "gen_ai_server_time_per_output_token_seconds_count", operation), 8.0 * 23.0);
    for stage in 0..3 {
        let at = Client::new(chain.configs[stage].metrics.unwrap().bind);
        // Several sessions share batches: fewer batches than with one each.
        let text = scrape(chain.configs[stage].metrics.unwrap().bind).await;
        let alone = value(&text, "splitmodel_batch_sessions_bucket", "le=\"1.0\"");
        let all = value(&text, "splitmodel_batch_sessions_bucket", "le=\"+Inf\"");
        assert!(all - alone > 10.0, "{alone} of {all} batches with one session at stage {stage}");
        for job in ["decode", "prefill", "control", "attach"] {
            let label = format!("job=\"{job}\"");
            let jobs = value(&text, "splitmodel_engine_jobs_total", &label);
            assert!(jobs > 0.0 || job == "prefill" || job == "control", "no {job} at stage {stage}");
            assert!(value(&text, "splitmodel_engine_hold_seconds_total", &label) >= 0.0);
        }
        assert!(at.metric("splitmodel_engine_wait_seconds_total").await > 0.0);
        // The last frame may still be on its way into the counts.
        until("sums and stages to agree", async || {
            let own = at.metric("splitmodel_rows_total").await;
            let first = scrape(chain.configs[0].metrics.unwrap().bind).await;
            let sum = value(&first, "splitmodel_chain_rows_total", &format!("of=\"{stage}\""));
            (own == sum && own > 500.0).then_some(())
        })
        .await;
        let line = if stage == 2 { "line=\"return\"" } else { "line=\"downstream\"" };
        assert!(value(&text, "splitmodel_link_sent_bytes_total", line) > 8.0 * 64.0 * 48.0);
    }
    chain.end().await;
}
