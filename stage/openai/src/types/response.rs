//! Answers.

use serde::Serialize;

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) total_tokens: u64,
    pub(crate) prompt_tokens_details: PromptDetails,
}

/// What is known of the prompt's tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct PromptDetails {
    /// Those that came from a cache.
    pub(crate) cached_tokens: u64,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Finish {
    /// The model ended, or a stop string came.
    Stop,
    /// `max_tokens` or the context.
    Length,
}

/// An answer or a chunk of one.
#[derive(Debug, Serialize)]
pub(crate) struct Envelope<'a, C> {
    pub(crate) id: &'a str,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) model: &'a str,
    pub(crate) choices: Vec<C>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}

/// A choice of a chat answer.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: ChatMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Finish,
}

/// The assistant's message.
#[derive(Debug, Serialize)]
pub(crate) struct ChatMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
    pub(crate) refusal: Option<String>,
}

/// A choice of a chat chunk.
#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: u32,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

/// What a chunk adds.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
}

/// Log-probabilities as chat has them.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<TokenLogprob>,
}

/// One token of the answer.
#[derive(Debug, Serialize)]
pub(crate) struct TokenLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
    pub(crate) top_logprobs: Vec<TopLogprob>,
}

/// An alternative for a token.
#[derive(Debug, Serialize)]
pub(crate) struct TopLogprob {
    pub(crate) token: String,
    pub(crate) logprob: f32,
    pub(crate) bytes: Vec<u8>,
}

/// A choice of a completion, whole or a chunk.
#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice {
    pub(crate) text: String,
    pub(crate) index: u32,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<Finish>,
}

/// Log-probabilities as completions have them.
#[derive(Debug, Default, Serialize)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    pub(crate) token_logprobs: Vec<f32>,
    pub(crate) top_logprobs: Vec<serde_json::Map<String, serde_json::Value>>,
    /// Where each token begins in the text, in characters.
    pub(crate) text_offset: Vec<usize>,
}
