//! The one place that sees usage, errors, time to first token and inter-token latency of every answer.

use std::sync::Arc;
use std::sync::atomic::AtomicI64;
use std::time::Instant;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::error::ErrorClass;
use crate::types::response::{Finish, PromptDetails, Usage};

/// What was asked for; OpenTelemetry's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Operation {
    Chat,
    Completion,
}

impl Operation {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "text_completion",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OperationLabel {
    gen_ai_operation_name: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    gen_ai_operation_name: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenLabel {
    gen_ai_operation_name: &'static str,
    gen_ai_token_type: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HttpLabel {
    http_route: String,
    http_response_status_code: u16,
    error_type: &'static str,
}

type Times = Family<OperationLabel, Histogram>;

/// Counters and histograms of the API.
pub(crate) struct Stats {
    registry: Registry,
    http: Family<HttpLabel, Counter>,
    answers: Family<OutcomeLabel, Counter>,
    tokens: Family<TokenLabel, Counter>,
    active: Gauge<i64, AtomicI64>,
    duration: Times,
    first_token: Times,
    per_token: Times,
}

impl Stats {
    /// All at zero.
    pub(crate) fn new() -> Self {
        let long = || Histogram::new([0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0]);
        let short = || Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5]);
        let mut stats = Self {
            registry: Registry::default(),
            http: Family::default(),
            answers: Family::default(),
            tokens: Family::default(),
            active: Gauge::default(),
            duration: Family::new_with_constructor(long),
            first_token: Family::new_with_constructor(long),
            per_token: Family::new_with_constructor(short),
        };
        let r = &mut stats.registry;
        r.register(
            "splitmodel_http_responses",
            "HTTP responses by route, status and class of error",
            stats.http.clone(),
        );
        r.register("splitmodel_answers", "Generations of the API by how they ended", stats.answers.clone());
        r.register(
            "splitmodel_tokens",
            "Tokens read (input), taken from a cache (cached) and made (output)",
            stats.tokens.clone(),
        );
        r.register("splitmodel_answers_active", "Requests admitted and not yet ended", stats.active.clone());
        let seconds = |r: &mut Registry, name: &str, help: &str, family: &Times| {
            r.register_with_unit(name, help, Unit::Seconds, family.clone());
        };
        seconds(r, "gen_ai_server_request_duration", "From arrival to the last token", &stats.duration);
        seconds(r, "gen_ai_server_time_to_first_token", "From arrival to the first token", &stats.first_token);
        seconds(r, "gen_ai_server_time_per_output_token", "Between two tokens of one choice", &stats.per_token);
        stats
    }

    /// Counts a response.
    pub(crate) fn response(&self, route: &str, status: u16, error: Option<ErrorClass>) {
        let label = HttpLabel {
            http_route: route.to_owned(),
            http_response_status_code: status,
            error_type: error.map_or("", ErrorClass::label),
        };
        self.http.get_or_create(&label).inc();
    }

    /// All metrics as OpenMetrics text, after those of the backend.
    pub(crate) fn render(&self, backend: &str) -> Result<String, std::fmt::Error> {
        let mut out = backend.trim_end().trim_end_matches("# EOF").to_owned();
        if !out.is_empty() && !out.ends_with('\n') {
            out.push('\n');
        }
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

/// Follows one answer to its end, however that comes: dropping it counts as cancelled. Times count from the arrival of its
/// HTTP request.
pub(crate) struct Record {
    stats: Arc<Stats>,
    operation: Operation,
    received: Instant,
    first: bool,
    last: Vec<Option<Instant>>,
    prompt_tokens: u64,
    cached_tokens: u64,
    completion_tokens: u64,
    outcome: &'static str,
    /// The request's: a stream ends after its handler.
    span: tracing::Span,
}

impl Record {
    /// An answer with `choices` choices whose prompts have `prompt_tokens` in all.
    pub(crate) fn new(
        stats: Arc<Stats>,
        operation: Operation,
        choices: usize,
        prompt_tokens: u64,
        received: Instant,
    ) -> Self {
        stats.active.inc();
        Self {
            stats,
            operation,
            received,
            first: true,
            last: vec![None; choices],
            prompt_tokens,
            cached_tokens: 0,
            completion_tokens: 0,
            outcome: "cancelled",
            span: tracing::Span::current(),
        }
    }

    /// Prompt tokens that came from a cache.
    pub(crate) fn cached(&mut self, tokens: u32) {
        self.cached_tokens += u64::from(tokens);
    }

    /// A token was made.
    pub(crate) fn token(&mut self, choice: usize) {
        self.completion_tokens += 1;
        let now = Instant::now();
        let label = OperationLabel { gen_ai_operation_name: self.operation.name() };
        if std::mem::take(&mut self.first) {
            self.stats.first_token.get_or_create(&label).observe((now - self.received).as_secs_f64());
        }
        if let Some(last) = self.last.get_mut(choice)
            && let Some(before) = last.replace(now)
        {
            self.stats.per_token.get_or_create(&label).observe((now - before).as_secs_f64());
        }
    }

    /// The last choice ended by itself.
    pub(crate) fn finished(&mut self, reason: Finish) {
        self.outcome = match reason {
            Finish::Stop => "stop",
            Finish::Length => "length",
        };
    }

    /// The answer failed.
    pub(crate) fn failed(&mut self) {
        self.outcome = "error";
    }

    /// Tokens so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            total_tokens: self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details: PromptDetails { cached_tokens: self.cached_tokens },
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let name = self.operation.name();
        let elapsed = self.received.elapsed();
        self.stats.active.dec();
        let outcome = OutcomeLabel { gen_ai_operation_name: name, outcome: self.outcome };
        self.stats.answers.get_or_create(&outcome).inc();
        let label = OperationLabel { gen_ai_operation_name: name };
        self.stats.duration.get_or_create(&label).observe(elapsed.as_secs_f64());
        for (kind, n) in
            [("input", self.prompt_tokens), ("cached", self.cached_tokens), ("output", self.completion_tokens)]
        {
            let label = TokenLabel { gen_ai_operation_name: name, gen_ai_token_type: kind };
            self.stats.tokens.get_or_create(&label).inc_by(n);
        }
        let _request = self.span.enter();
        tracing::info!(
            operation = name,
            outcome = self.outcome,
            prompt_tokens = self.prompt_tokens,
            cached_tokens = self.cached_tokens,
            completion_tokens = self.completion_tokens,
            elapsed_ms = elapsed.as_millis() as u64,
            "answer ended"
        );
    }
}
