//! What the API needs from the server behind it.

use std::fmt;
use std::time::Instant;

use splitmodel_sampling::{GenerationConfig, GrammarSpec};
use tokio::sync::mpsc;

use crate::error::ApiError;
use crate::trace::TraceParent;

/// A token id of the model's vocabulary.
pub type Token = i32;

/// A token with a meaning of its own, which ordinary text can never become.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// The text that stands for it in a chat template, such as `<|im_end|>`.
    pub text: String,
    /// Its id.
    pub id: Token,
}

/// Facts of the served model. All of them are fixed while the server runs.
#[derive(Debug, Clone)]
pub struct ModelCard {
    /// The name that requests use.
    pub id: String,
    /// Other names that are answered as well.
    pub aliases: Vec<String>,
    /// Unix time in seconds that `/v1/models` shows.
    pub created: u64,
    /// Tokens that one request may hold, prompt and answer together.
    pub n_ctx: u32,
    /// Size of the vocabulary; valid token ids are `0..n_vocab`.
    pub n_vocab: u32,
    /// The Jinja source of the chat template, if the model has one.
    pub chat_template: Option<String>,
    /// The token that a prompt begins with, if the vocabulary has one.
    pub bos: Option<SpecialToken>,
    /// The token that ends a text, if the vocabulary has one.
    pub eos: Option<SpecialToken>,
    /// Whether prompts of this model begin with `bos`.
    pub add_bos: bool,
    /// Every token that ends a generation.
    pub eog: Vec<Token>,
    /// Control tokens (not those that the tokenizer finds in ordinary text by itself, llama.cpp's "user defined").
    pub special_tokens: Vec<SpecialToken>,
    /// Whether images or audio are understood.
    pub media: bool,
}

/// One generation to be admitted: a prompt and how to go on from it.
#[derive(Debug, Clone)]
pub struct GenerateRequest {
    /// The whole prompt, `1..n_ctx` tokens, all of them in the vocabulary.
    pub prompt: Vec<Token>,
    /// Sampling, penalties, biases, logprobs and grammar.
    pub config: GenerationConfig,
    /// Whether every token is to carry its log-probability (and `config.top_logprobs` alternatives).
    pub logprobs: bool,
    /// Tokens to make at most; prompt and answer together never exceed `n_ctx`.
    pub max_tokens: u32,
    /// For logs; the same for all choices of one HTTP request.
    pub request_id: String,
    /// Which choice of the HTTP request this is.
    pub index: u32,
    /// `prompt_cache_key`: prefixes are shared only within one key.
    pub cache_key: Option<String>,
    /// `user` (or `safety_identifier`) of the request.
    pub tenant: Option<String>,
    /// When the HTTP request's headers were here, before its body was read.
    pub received: Instant,
    /// Where the client's trace goes on; the same for all choices of one HTTP request.
    pub trace: Option<TraceParent>,
    /// OpenTelemetry's `gen_ai.operation.name`: `chat` or `text_completion`.
    pub operation: &'static str,
}

/// Why a generation ended by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// The model made this end-of-generation token, or its grammar is complete (no token).
    Stop(Option<Token>),
    /// `max_tokens` were made or the context is full.
    Length,
}

/// One generated token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenEvent {
    /// Its id.
    pub token: Token,
    /// Natural logarithm of its probability; NaN where none was asked for.
    pub logprob: f32,
    /// The most likely tokens with their log-probabilities, best first; as many as `top_logprobs` asked for.
    pub top: Vec<(Token, f32)>,
}

/// What happens to a generation, in this order: `Started`, any number of `Token`, then `Done`; or `Failed` at any time.
#[derive(Debug, Clone, PartialEq)]
pub enum GenEvent {
    /// It left the queue and has a lane. HTTP headers are sent from here on.
    Started {
        /// Prompt tokens that came from a cache.
        cached_tokens: u32,
    },
    /// A token that is part of the answer (never the one that ends it).
    Token(TokenEvent),
    /// It ended by itself. Nothing follows.
    Done(EndReason),
    /// It failed. Nothing follows.
    Failed(ApiError),
}

/// Why a generation was not admitted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full: 429.
    #[error("All lanes are busy and the queue is full. Try again in {retry_after} s.")]
    Busy {
        /// Seconds to wait.
        retry_after: u32,
    },
    /// The chain cannot answer now: 503.
    #[error("The model cannot answer now: {reason}")]
    Unavailable {
        /// What is missing.
        reason: String,
        /// Seconds to wait.
        retry_after: u32,
    },
    /// The request itself is at fault.
    #[error(transparent)]
    Rejected(ApiError),
}

/// Whether the whole chain can answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    /// A token crossed the chain lately.
    Ready,
    /// Not now; the text says what is missing.
    NotReady(String),
}

/// The server behind the API.
pub trait Backend: Send + Sync + 'static {
    /// The model's facts.
    fn card(&self) -> &ModelCard;

    /// Token ids of `text`, which is never parsed for control tokens. `add_special` adds BOS (and EOS) as the model wants it.
    ///
    /// # Errors
    /// The text cannot be tokenized (for example too long).
    fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<Token>, ApiError>;

    /// The exact bytes of a token's text, for control tokens too; empty for ids outside the vocabulary.
    fn token_bytes(&self, token: Token) -> &[u8];

    /// Says before any token is made whether a grammar can be enforced.
    ///
    /// # Errors
    /// What is wrong with it, for the client.
    fn check_grammar(&self, spec: &GrammarSpec) -> Result<(), String>;

    /// Admits a generation. Dropping the handle cancels it and frees its lane.
    ///
    /// # Errors
    /// It was not admitted.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError>;

    /// Whether `/ready` says 200.
    fn readiness(&self) -> Readiness;

    /// Metrics of the backend in Prometheus text form, without the final `# EOF`; `/metrics` shows them before its own.
    fn metrics(&self) -> String;
}

/// The sending half of a generation, kept by the backend.
#[derive(Debug, Clone)]
pub struct GenSender(mpsc::Sender<GenEvent>);

impl GenSender {
    /// Hands on one event without waiting. False when nobody listens any more: the generation should end.
    #[must_use]
    pub fn send(&self, event: GenEvent) -> bool {
        self.0.try_send(event).is_ok()
    }

    /// Whether the handle was dropped.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// An admitted generation. Dropping it cancels the work.
pub struct Generation {
    events: mpsc::Receiver<GenEvent>,
    _guard: DropGuard,
}

struct DropGuard(Option<Box<dyn FnOnce() + Send>>);

impl Drop for DropGuard {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}

impl Generation {
    /// A handle and its sender. The channel holds all events of `max_tokens` tokens, so a slow client never holds up the
    /// backend. `on_drop` runs exactly once, when the handle goes (also after the end).
    pub fn channel(max_tokens: u32, on_drop: impl FnOnce() + Send + 'static) -> (GenSender, Self) {
        let capacity = (max_tokens as usize).saturating_add(4).min(tokio::sync::Semaphore::MAX_PERMITS);
        let (sender, events) = mpsc::channel(capacity);
        (GenSender(sender), Self { events, _guard: DropGuard(Some(Box::new(on_drop))) })
    }

    /// The next event; `None` after the last one or when the backend went away.
    pub async fn next(&mut self) -> Option<GenEvent> {
        self.events.recv().await
    }

    /// Polls for the next event, for those that merge several generations.
    pub fn poll_next(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Option<GenEvent>> {
        self.events.poll_recv(cx)
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").finish_non_exhaustive()
    }
}
