//! The generation config that travels in the `config` section of a frame.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};

use crate::{SamplingError, Token};

/// What the output of a session must match.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GrammarSpec {
    /// A JSON schema (an object); the text is one JSON value that fulfils it.
    JsonSchema(serde_json::Value),
    /// Any JSON object.
    JsonObject,
    /// A regular expression in the syntax of Rust's `regex` that the whole text matches.
    Regex(String),
    /// A Lark grammar in llguidance's dialect, with the rule `start`.
    Lark(String),
}

/// How a session's tokens are chosen. JSON of this is the body of the wire's `config` section; absent fields have their
/// defaults, unknown ones are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerationConfig {
    /// Position of the first generated token: rows before it are the prompt.
    pub prompt_tokens: u32,
    /// Seed of the random draws.
    pub seed: u64,
    /// 0 takes the most likely token; above it the distribution's flatness. Default 1.
    pub temperature: f32,
    /// Candidates kept by rank; 0 keeps all.
    pub top_k: u32,
    /// Smallest set of candidates whose probability reaches this, before temperature; 1 keeps all.
    pub top_p: f32,
    /// Candidates at least this likely relative to the best, before temperature; 0 keeps all.
    pub min_p: f32,
    /// Divides (multiplies, where negative) the logits of tokens among the last `penalty_last_n`, prompt included; 1 is off.
    pub repeat_penalty: f32,
    /// Taken off the logit of every token generated so far.
    pub presence_penalty: f32,
    /// Taken off a logit once for each time its token was generated so far.
    pub frequency_penalty: f32,
    /// Tokens that `repeat_penalty` looks back over; −1 all, 0 none. Default 64.
    pub penalty_last_n: i32,
    /// Added to logits: token and bias from −100 (never) to 100 (nearly always). A token may stand once.
    pub logit_bias: Vec<(Token, f32)>,
    /// Alternatives reported with a row that wants log-probabilities.
    pub top_logprobs: u8,
    /// Restricts generated tokens.
    pub grammar: Option<GrammarSpec>,
    /// Tokens that end a generation besides those of the [`crate::GrammarFactory`]; a complete grammar ends with the
    /// likeliest of all.
    pub eog: Vec<Token>,
    /// Tokens at positions 0.. before the first row sent (after a cache hit or a restart); −1 for media.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<Token>,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        Self {
            prompt_tokens: 0,
            seed: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_last_n: 64,
            logit_bias: Vec::new(),
            top_logprobs: 0,
            grammar: None,
            eog: Vec::new(),
            history: Vec::new(),
        }
    }
}

impl GenerationConfig {
    /// All that decides the tokens which follow a prompt, as bytes; `None` where random numbers do.
    #[must_use]
    pub fn deterministic(&self) -> Option<Vec<u8>> {
        // No `..`: of a new field it must be said whether it draws random numbers and whether it decides tokens. Those that do
        // not are left out below.
        let Self {
            prompt_tokens: _,
            seed: _,
            temperature,
            top_k: _,
            top_p: _,
            min_p: _,
            repeat_penalty: _,
            presence_penalty: _,
            frequency_penalty: _,
            penalty_last_n: _,
            logit_bias: _,
            top_logprobs: _,
            grammar: _,
            eog: _,
            history,
        } = self;
        if *temperature > 0.0 || !history.is_empty() {
            return None;
        }
        serde_json::to_vec(&Self { prompt_tokens: 0, seed: 0, top_logprobs: 0, ..self.clone() }).ok()
    }

    /// Checks every field's range. Grammars are checked by [`crate::GrammarFactory::check`].
    ///
    /// # Errors
    /// [`SamplingError::InvalidConfig`] with the first bad field.
    pub fn validate(&self) -> Result<(), SamplingError> {
        within("temperature", self.temperature, 0.0, 1000.0)?;
        within("top_p", self.top_p, 0.0, 1.0)?;
        within("min_p", self.min_p, 0.0, 1.0)?;
        within("repeat_penalty", self.repeat_penalty, 1e-3, 1000.0)?;
        within("presence_penalty", self.presence_penalty, -100.0, 100.0)?;
        within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)?;
        if self.penalty_last_n < -1 {
            return Err(invalid("penalty_last_n", format!("is {}; use -1 for all, 0 for none", self.penalty_last_n)));
        }
        if self.prompt_tokens > i32::MAX as u32 {
            return Err(invalid("prompt_tokens", format!("is {}; positions end at {}", self.prompt_tokens, i32::MAX)));
        }
        let mut seen = HashSet::new();
        for &(token, bias) in &self.logit_bias {
            if token < 0 || !seen.insert(token) {
                return Err(invalid("logit_bias", format!("names token {token} twice or is negative")));
            }
            within("logit_bias", bias, -100.0, 100.0)?;
        }
        if let Some(token) = self.eog.iter().find(|t| **t < 0) {
            return Err(invalid("eog", format!("holds {token}; tokens start at 0")));
        }
        if let Some(token) = self.history.iter().find(|t| **t < -1) {
            return Err(invalid("history", format!("holds {token}; tokens start at 0, -1 is media")));
        }
        Ok(())
    }
}

fn invalid(field: &'static str, reason: String) -> SamplingError {
    SamplingError::InvalidConfig { field, reason }
}

/// NaN fails every comparison, so it is refused here too.
fn within(field: &'static str, value: f32, low: f32, high: f32) -> Result<(), SamplingError> {
    if value >= low && value <= high {
        return Ok(());
    }
    Err(invalid(field, format!("is {value}; {low} to {high} is accepted")))
}
