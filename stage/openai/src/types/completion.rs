//! `/v1/completions`: prompts as text or token ids.

use serde::Deserialize;
use serde_json::Value;

use crate::backend::{ModelCard, Token};
use crate::error::ApiError;
use crate::types::common::{Common, MAX_CHOICES, MAX_TOP_LOGPROBS, shown};
use crate::types::read;

/// One prompt.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<Token>),
}

#[derive(Debug, Deserialize)]
struct Raw {
    prompt: Option<Value>,
    logprobs: Option<u32>,
    echo: Option<bool>,
    suffix: Option<String>,
    best_of: Option<u32>,
}

/// A completion request, checked.
#[derive(Debug)]
pub(crate) struct CompletionRequest {
    pub(crate) common: Common,
    pub(crate) prompts: Vec<Prompt>,
    pub(crate) logprobs: bool,
    /// The text begins with the prompt.
    pub(crate) echo: bool,
}

impl CompletionRequest {
    /// Reads and checks a request for the model of `card`.
    pub(crate) fn read(body: &Value, card: &ModelCard) -> Result<Self, ApiError> {
        let mut common = Common::read(body, card)?;
        let raw: Raw = read(body)?;
        let prompts = prompts(raw.prompt, card)?;
        let choices = prompts.len() as u64 * u64::from(common.n);
        if choices > u64::from(MAX_CHOICES) {
            let message = format!("`prompt` and `n` ask for {choices} choices; at most {MAX_CHOICES} are accepted.");
            return Err(ApiError::invalid("n", message));
        }
        let echo = raw.echo.unwrap_or(false);
        if let Some(top) = raw.logprobs {
            if top > MAX_TOP_LOGPROBS {
                let message = format!("`logprobs` is {top}; 0 to {MAX_TOP_LOGPROBS} is accepted.");
                return Err(ApiError::invalid("logprobs", message));
            }
            if echo {
                let message = "`echo` with `logprobs` is not supported: the prompt has no log-probabilities here.";
                return Err(ApiError::unsupported("echo", message));
            }
            common.config.top_logprobs = top as u8;
        }
        if raw.suffix.is_some_and(|s| !s.is_empty()) {
            return Err(ApiError::unsupported("suffix", "`suffix` is not supported: this model does not fill in."));
        }
        if raw.best_of.is_some_and(|best| best != common.n) {
            return Err(ApiError::unsupported("best_of", "`best_of` other than `n` is not supported."));
        }
        // OpenAI's default here; chat has none.
        common.max_tokens = common.max_tokens.or(Some(16));
        Ok(Self { common, prompts, logprobs: raw.logprobs.is_some(), echo })
    }
}

fn prompts(raw: Option<Value>, card: &ModelCard) -> Result<Vec<Prompt>, ApiError> {
    let raw = raw.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is required."))?;
    let list = match raw {
        Value::String(text) => return Ok(vec![Prompt::Text(text)]),
        Value::Array(list) if !list.is_empty() => list,
        Value::Array(_) => return Err(ApiError::invalid("prompt", "`prompt` is an empty list.")),
        _ => return Err(bad_prompt()),
    };
    if list.iter().all(Value::is_number) {
        return Ok(vec![Prompt::Tokens(tokens("prompt", &list, card)?)]);
    }
    list.into_iter()
        .enumerate()
        .map(|(i, item)| match item {
            Value::String(text) => Ok(Prompt::Text(text)),
            Value::Array(ids) if !ids.is_empty() => tokens(&format!("prompt[{i}]"), &ids, card).map(Prompt::Tokens),
            _ => Err(bad_prompt()),
        })
        .collect()
}

fn bad_prompt() -> ApiError {
    ApiError::invalid(
        "prompt",
        "`prompt` must be a string, a list of strings, a list of token ids or a list of such lists.",
    )
}

/// Token ids of a JSON array, all in the vocabulary.
pub(crate) fn tokens(at: &str, list: &[Value], card: &ModelCard) -> Result<Vec<Token>, ApiError> {
    list.iter()
        .enumerate()
        .map(|(i, v)| {
            v.as_u64().filter(|id| *id < u64::from(card.n_vocab)).map(|id| id as Token).ok_or_else(|| {
                let (at, last) = (format!("{at}[{i}]"), card.n_vocab.saturating_sub(1));
                let message = format!("`{at}` is {}; token ids are 0 to {last}.", shown(&v.to_string()));
                ApiError::invalid(at, message)
            })
        })
        .collect()
}
