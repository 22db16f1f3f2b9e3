//! The trace of one generation as stage 0 tells it: a span for the whole, and below it one for the queue, for the prompt and
//! for the answer. Names are OpenTelemetry's GenAI conventions (v1.37) where they have one.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant, SystemTime};

use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{Array, KeyValue, StringValue, Value};
use opentelemetry_sdk::trace::{IdGenerator, RandomIdGenerator, SpanData, SpanEvents, SpanLinks};
use splitmodel_chain::observe::TraceContext;
use splitmodel_link::frame::{SessionId, StageStats};
use splitmodel_openai::GenerateRequest;

use super::export::SpanQueue;
use super::timeline::Breakdown;

/// Times of day for the marks of a monotonic clock.
#[derive(Clone, Copy, Debug)]
struct Calendar {
    instant: Instant,
    time: SystemTime,
}

impl Calendar {
    fn now() -> Self {
        Self { instant: Instant::now(), time: SystemTime::now() }
    }

    fn at(self, instant: Instant) -> SystemTime {
        let before = self.instant.saturating_duration_since(instant);
        let after = instant.saturating_duration_since(self.instant);
        self.time.checked_sub(before).unwrap_or(self.time) + after
    }
}

/// Where a span belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The trace.
    pub trace: TraceId,
    /// The span itself.
    pub span: SpanId,
    /// The span above it, `SpanId::INVALID` for none.
    pub parent: SpanId,
    /// Whether the span above is another program's.
    pub remote: bool,
}

impl Place {
    /// As the section `trace` carries it: spans of the stages hang below this one.
    #[must_use]
    pub fn context(&self) -> TraceContext {
        let mut context = [0; 25];
        context[..16].copy_from_slice(&self.trace.to_bytes());
        context[16..24].copy_from_slice(&self.span.to_bytes());
        context[24] = TraceFlags::SAMPLED.to_u8();
        context
    }

    /// A new span below the one that `context` names.
    #[must_use]
    pub fn below(context: &TraceContext) -> Self {
        let (mut trace, mut parent) = ([0; 16], [0; 8]);
        trace.copy_from_slice(&context[..16]);
        parent.copy_from_slice(&context[16..24]);
        Self {
            trace: TraceId::from_bytes(trace),
            span: RandomIdGenerator::default().new_span_id(),
            parent: SpanId::from_bytes(parent),
            remote: true,
        }
    }

    /// A new span below this one.
    #[must_use]
    pub fn child(&self) -> Self {
        let span = RandomIdGenerator::default().new_span_id();
        Self { span, parent: self.span, remote: false, ..*self }
    }
}

/// A span as it is exported.
#[must_use]
pub fn span(
    queue: &SpanQueue,
    place: Place,
    (name, kind): (String, SpanKind),
    (start_time, end_time): (SystemTime, SystemTime),
    attributes: Vec<KeyValue>,
) -> SpanData {
    SpanData {
        span_context: SpanContext::new(place.trace, place.span, TraceFlags::SAMPLED, false, TraceState::NONE),
        parent_span_id: place.parent,
        parent_span_is_remote: place.remote,
        span_kind: kind,
        name: name.into(),
        start_time,
        end_time,
        attributes,
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: queue.scope.clone(),
    }
}

/// Numbers of at most 63 bits, as OpenTelemetry has them.
#[must_use]
pub fn number(key: &'static str, n: u64) -> KeyValue {
    KeyValue::new(key, i64::try_from(n).unwrap_or(i64::MAX))
}

/// Chooses traces and makes their ids.
#[derive(Clone, Debug)]
pub struct Sampler {
    ratio: f64,
    /// Makes ids from what is the same for all choices of a request, and different from one process to the next.
    ids: RandomState,
}

impl Sampler {
    /// Samples `ratio` of the requests whose client says nothing.
    #[must_use]
    pub fn new(ratio: f64) -> Self {
        Self { ratio, ids: RandomState::new() }
    }

    /// Where the span of a generation belongs, if its request is traced. All choices of one request share a trace: the first
    /// choice's span is the root of the others'.
    #[must_use]
    pub fn place(&self, request: &GenerateRequest) -> Option<Place> {
        let id = |part: u8| self.ids.hash_one((part, request.received, request.request_id.as_str())).max(1);
        let root = SpanId::from_bytes(id(0).to_be_bytes());
        let (trace, parent) = match &request.trace {
            Some(client) if !client.sampled => return None,
            Some(client) => (TraceId::from_bytes(client.trace_id), SpanId::from_bytes(client.parent_id)),
            None => {
                let low = id(2);
                // The lower bits decide, as in OpenTelemetry's TraceIdRatioBased.
                if (low >> 1) as f64 >= self.ratio * (1_u64 << 63) as f64 {
                    return None;
                }
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&id(1).to_be_bytes());
                bytes[8..].copy_from_slice(&low.to_be_bytes());
                (TraceId::from_bytes(bytes), SpanId::INVALID)
            }
        };
        let first = Place { trace, span: root, parent, remote: parent != SpanId::INVALID };
        Some(if request.index == 0 { first } else { first.child() })
    }
}

/// How a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With a reason that the client sees: `stop` or `length`.
    Finished(&'static str),
    /// With an error of this class.
    Failed(&'static str),
    /// Its client went away, or had enough.
    Cancelled,
}

/// The trace of a generation while it runs.
#[derive(Debug)]
pub struct RequestTrace {
    queue: SpanQueue,
    place: Place,
    calendar: Calendar,
    received: Instant,
    started: Option<Instant>,
    first: Option<(Instant, Breakdown)>,
    attributes: Vec<KeyValue>,
    operation: &'static str,
    model: String,
}

impl RequestTrace {
    /// The trace of `request`, whose prompt has `prompt` tokens.
    #[must_use]
    pub fn new(queue: SpanQueue, place: Place, request: &GenerateRequest, model: &str) -> Self {
        let attributes = vec![
            KeyValue::new("gen_ai.operation.name", request.operation),
            KeyValue::new("gen_ai.provider.name", "splitmodel"),
            KeyValue::new("gen_ai.request.model", model.to_owned()),
            KeyValue::new("gen_ai.response.model", model.to_owned()),
            number("gen_ai.request.max_tokens", request.max_tokens.into()),
            KeyValue::new("gen_ai.request.temperature", f64::from(request.config.temperature)),
            KeyValue::new("gen_ai.request.top_p", f64::from(request.config.top_p)),
            number("gen_ai.usage.input_tokens", request.prompt.len() as u64),
            KeyValue::new("splitmodel.request.id", request.request_id.clone()),
            number("splitmodel.choice", request.index.into()),
            number("gen_ai.request.seed", request.config.seed),
        ];
        Self {
            queue,
            place,
            calendar: Calendar::now(),
            received: request.received,
            started: None,
            first: None,
            attributes,
            operation: request.operation,
            model: model.to_owned(),
        }
    }

    /// What the stages need to hang their spans below.
    #[must_use]
    pub fn context(&self) -> TraceContext {
        self.place.context()
    }

    /// It took so long to tell `count` identities of what it may share with others.
    pub fn identified(&mut self, count: u64, took: Duration) {
        self.attributes.push(number("splitmodel.cache.identities", count));
        self.attributes.push(KeyValue::new("splitmodel.cache.identity_ms", took.as_secs_f64() * 1e3));
    }

    /// It got its lane.
    pub fn started(&mut self, now: Instant) {
        self.started.get_or_insert(now);
    }

    /// It begins with so many tokens of a kept prefix of this kind; `None`: none are kept.
    pub fn restored(&mut self, kind: Option<&'static str>, tokens: usize) {
        let outcome = match (kind, tokens) {
            (None, _) => "disabled",
            (_, 0) => "miss",
            _ => "hit",
        };
        self.attributes.push(KeyValue::new("splitmodel.cache.outcome", outcome));
        if let Some(kind) = kind {
            self.attributes.push(KeyValue::new("splitmodel.cache.kind", kind));
        }
        self.attributes.push(number("gen_ai.usage.cache_read.input_tokens", tokens as u64));
    }

    /// Its first token is there.
    pub fn first_token(&mut self, now: Instant, breakdown: Breakdown) {
        self.first.get_or_insert((now, breakdown));
    }

    /// It ended, after `tokens` tokens: its spans go to the collector.
    pub fn end(mut self, session: SessionId, ended: Ended, tokens: u64) {
        let now = Instant::now();
        self.attributes.push(number("splitmodel.session", session));
        self.attributes.push(number("gen_ai.usage.output_tokens", tokens));
        let mut status = Status::Unset;
        match ended {
            Ended::Finished(reason) => {
                let reasons = Array::String(vec![StringValue::from(reason)]);
                self.attributes.push(KeyValue::new("gen_ai.response.finish_reasons", Value::Array(reasons)));
            }
            Ended::Failed(class) => {
                self.attributes.push(KeyValue::new("error.type", class));
                status = Status::error("");
            }
            Ended::Cancelled => self.attributes.push(KeyValue::new("error.type", "cancelled")),
        }
        let started = self.started.unwrap_or(now);
        self.part("queue", (self.received, started), Vec::new());
        if let Some((first, breakdown)) = self.first.take() {
            self.attributes.push(KeyValue::new("splitmodel.ttft", breakdown.total().as_secs_f64()));
            self.part("prefill", (started, first), prefill(&breakdown));
            self.part("decode", (first, now), vec![number("gen_ai.usage.output_tokens", tokens)]);
        } else if self.started.is_some() {
            self.part("prefill", (started, now), Vec::new());
        }
        let times = (self.calendar.at(self.received), self.calendar.at(now));
        let name = (format!("{} {}", self.operation, self.model), SpanKind::Server);
        let attributes = std::mem::take(&mut self.attributes);
        let root = span(&self.queue, self.place, name, times, attributes);
        self.queue.push(SpanData { status, ..root });
    }

    fn part(&self, name: &str, (from, to): (Instant, Instant), attributes: Vec<KeyValue>) {
        let times = (self.calendar.at(from), self.calendar.at(to));
        let name = (name.to_owned(), SpanKind::Internal);
        self.queue.push(span(&self.queue, self.place.child(), name, times, attributes));
    }
}

/// The breakdown as attributes: parts in seconds, then what each later stage says of the last frame.
fn prefill(b: &Breakdown) -> Vec<KeyValue> {
    const NAMES: [&str; 7] = [
        "splitmodel.ttft.prepare",
        "splitmodel.ttft.queue",
        "splitmodel.ttft.wait",
        "splitmodel.ttft.compute",
        "splitmodel.ttft.encode",
        "splitmodel.ttft.write",
        "splitmodel.ttft.downstream",
    ];
    let seconds = |(name, (_, part)): (&'static str, (_, Duration))| KeyValue::new(name, part.as_secs_f64());
    let mut attributes: Vec<_> = NAMES.into_iter().zip(b.parts()).map(seconds).collect();
    attributes.push(number("splitmodel.frames", b.frames as u64));
    attributes.push(number("splitmodel.bytes", b.bytes));
    attributes.extend(b.later_stages.iter().flat_map(later));
    attributes
}

fn later(s: &StageStats) -> [KeyValue; 3] {
    let key = |what: &str| format!("splitmodel.last_frame.stage_{}.{what}_us", s.stage);
    let pair = |what: &str, us: u32| KeyValue::new(key(what), i64::from(us));
    [pair("wait", s.wait_us), pair("compute", s.compute_us), pair("encode", s.encode_us)]
}
