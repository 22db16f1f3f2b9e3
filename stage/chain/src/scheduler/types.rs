//! What goes into the scheduler and what comes out.

use splitmodel_cache::{Fingerprint, Namespace, Payload, Settings};
use splitmodel_link::frame::{ErrorClass, Prediction, SessionId, Token};

use super::MAX_CONFIGS;
use crate::observe::TraceContext;

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sessions decoded at once.
    pub lanes: u16,
    /// Tokens of one session, prompt and answer.
    pub context: usize,
    /// Frames in flight: the number of stages keeps every stage busy.
    pub max_in_flight: usize,
    /// Rows of one frame at most (`n_ubatch`).
    pub max_rows: usize,
    /// Prompt rows of one frame while no answer is running.
    pub prefill_chunk: usize,
    /// Prompt rows in flight at once at most while answers are running, spread over the frames in flight. Fewer go where the
    /// stages say that they would make the answers' frames more than twice as dear.
    pub prefill_chunk_shared: usize,
    /// Sessions that may wait for a lane.
    pub max_queue: usize,
    /// Attempts of a session whose rows were dropped before it fails.
    pub max_attempts: u32,
    /// KV cells of each stage.
    pub cells: usize,
    /// What is kept of computed prefixes.
    pub cache: Settings,
}

/// A generation to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Prompt tokens, at least one.
    pub prompt: Vec<Token>,
    /// JSON of the generation config, as the last stage reads it.
    pub config: Vec<u8>,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Tokens that end the answer.
    pub eog: Vec<Token>,
    /// Whether log-probabilities are wanted.
    pub logprobs: bool,
    /// Its trace, where it is traced.
    pub trace: Option<TraceContext>,
    /// Prefixes are shared only within a namespace.
    pub namespace: Namespace,
    /// It does not wait for a prompt that begins alike.
    pub alone: bool,
    /// What decides its tokens, where no random number does and nothing but the tokens is asked for: its first tokens are kept,
    /// and taken from what is kept.
    pub fingerprint: Option<Fingerprint>,
}

/// Why a request is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The queue is full.
    #[error("all lanes are busy and {0} requests wait already; try again later")]
    QueueFull(usize),
    /// Nothing to start from.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// Too long.
    #[error("the prompt has {prompt} tokens, the context holds {context}")]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// Its config would not fit into a frame.
    #[error("the generation config has {bytes} bytes; at most {MAX_CONFIGS} fit into a frame")]
    ConfigTooLarge {
        /// Bytes of its JSON.
        bytes: usize,
    },
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, with this token, which is not part of the answer; `None`: its grammar is complete.
    Stop(Option<Token>),
    /// A limit: `max_tokens` or the context.
    Length,
}

/// What happened to a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It got its lane.
    Started(SessionId),
    /// So many tokens of its prompt came from a kept prefix, on every stage. Comes once, after `Started` and before the
    /// first token; not at all when the chain broke in between.
    Restored(SessionId, usize),
    /// A token of the answer.
    Token(SessionId, Box<Prediction>),
    /// The answer is complete.
    Finished(SessionId, Finish),
    /// It failed.
    Failed(SessionId, ErrorClass, String),
    /// The token probe or control probe came back.
    Probed(u64),
}

/// Counts for metrics and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sessions with a lane.
    pub running: usize,
    /// Sessions waiting for a lane.
    pub queued: usize,
    /// Frames in flight.
    pub in_flight: usize,
    /// KV cells that the running sessions use.
    pub cells: usize,
    /// Frames made since the start.
    pub frames: u64,
    /// What is kept of prefixes.
    pub payload: Payload,
    /// Prefixes kept.
    pub kept: usize,
    /// Tokens of them.
    pub kept_tokens: usize,
    /// KV cells that they use, as if none were shared.
    pub kept_cells: usize,
    /// Prefixes given up to make room.
    pub evictions: u64,
    /// Sessions that began with a kept prefix.
    pub hits: u64,
    /// Sessions that began with none.
    pub misses: u64,
    /// Sessions whose first tokens were known.
    pub replays: u64,
    /// Those tokens.
    pub replayed_tokens: u64,
    /// Sessions that began with less than stage 0 had noted, since a stage had lost it.
    pub shortened: u64,
}

/// An answer to another frame than the oldest in flight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame {expected:?} had to be answered next, the answer was for {got}")]
pub struct OutOfOrder {
    /// Oldest frame in flight.
    pub expected: Option<u64>,
    /// Frame answered.
    pub got: u64,
}
