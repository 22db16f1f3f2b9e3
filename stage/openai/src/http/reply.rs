//! Steps of an answer in the words of the API: chunks of a stream, or one object.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::answer::Step;
use crate::app::App;
use crate::backend::{Token, TokenEvent};
use crate::error::ApiError;
use crate::text::Piece;
use crate::types::response::{
    ChatChoice, ChatChunkChoice, ChatLogprobs, ChatMessage, CompletionChoice, CompletionLogprobs, Delta, Envelope,
    Finish, TokenLogprob, TopLogprob, Usage,
};

/// Which of the two shapes, and what it needs.
pub(crate) enum Shape {
    Chat,
    /// What comes before each choice's text; empty without `echo`.
    Completion {
        echoes: Vec<String>,
    },
}

/// Writes one answer.
pub(crate) struct Reply {
    app: Arc<App>,
    id: String,
    created: u64,
    shape: Shape,
    logprobs: bool,
    include_usage: bool,
    choices: Vec<Progress>,
}

/// What was written of a choice.
#[derive(Default)]
struct Progress {
    begun: bool,
    /// Characters before the next token, for `text_offset`.
    offset: usize,
}

/// A whole choice.
#[derive(Default)]
struct Whole {
    text: String,
    tokens: Vec<TokenEvent>,
    finish: Option<Finish>,
}

impl Reply {
    /// A reply of `choices` choices.
    pub(crate) fn new(app: Arc<App>, shape: Shape, choices: usize, logprobs: bool, include_usage: bool) -> Self {
        let prefix = match shape {
            Shape::Chat => "chatcmpl",
            Shape::Completion { .. } => "cmpl",
        };
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        Self {
            id: format!("{prefix}-{}", Uuid::new_v4().simple()),
            created,
            shape,
            logprobs,
            include_usage,
            choices: (0..choices).map(|_| Progress::default()).collect(),
            app,
        }
    }

    /// The chunks of one step, as JSON.
    pub(crate) fn chunks(&mut self, step: Step) -> Result<Vec<String>, ApiError> {
        let (index, piece, finish) = match step {
            Step::Started => return Ok(Vec::new()),
            Step::Failed(error) => return Err(error),
            Step::Piece(index, piece) => (index, Some(piece), None),
            Step::Finish(index, finish) => (index, None, Some(finish)),
        };
        let mut out = Vec::new();
        if let Some(progress) = self.choices.get_mut(index as usize)
            && !std::mem::replace(&mut progress.begun, true)
        {
            out.extend(self.first(index)?);
        }
        out.push(self.chunk(index, piece, finish)?);
        Ok(out)
    }

    /// The chunk after the last one of the choices, if the client asked for it.
    pub(crate) fn usage_chunk(&self, usage: Usage) -> Result<Option<String>, ApiError> {
        if !self.include_usage {
            return Ok(None);
        }
        self.json(true, Vec::<ChatChunkChoice>::new(), Some(usage)).map(Some)
    }

    /// The whole answer from all its steps.
    pub(crate) fn whole(&mut self, steps: Vec<Step>, usage: Usage) -> Result<String, ApiError> {
        let mut wholes: Vec<Whole> = self.choices.iter().map(|_| Whole::default()).collect();
        for step in steps {
            match step {
                Step::Started => {}
                Step::Failed(error) => return Err(error),
                Step::Piece(index, piece) => {
                    if let Some(whole) = wholes.get_mut(index as usize) {
                        whole.text.push_str(&piece.text);
                        whole.tokens.extend(piece.tokens);
                    }
                }
                Step::Finish(index, finish) => {
                    if let Some(whole) = wholes.get_mut(index as usize) {
                        whole.finish = Some(finish);
                    }
                }
            }
        }
        if wholes.iter().any(|w| w.finish.is_none()) {
            return Err(ApiError::internal("The answer is not complete. Try again."));
        }
        let wholes = wholes.into_iter().zip(0u32..);
        if matches!(self.shape, Shape::Chat) {
            let choices = wholes.map(|(w, index)| ChatChoice {
                index,
                message: ChatMessage { role: "assistant", content: w.text, refusal: None },
                logprobs: self.chat_logprobs(&w.tokens),
                finish_reason: w.finish.unwrap_or(Finish::Stop),
            });
            return self.json(false, choices.collect(), Some(usage));
        }
        let mut choices = Vec::new();
        for (w, index) in wholes {
            let echo = self.echo(index);
            let logprobs = self.completion_logprobs(index, &w.tokens);
            choices.push(CompletionChoice { text: echo + &w.text, index, logprobs, finish_reason: w.finish });
        }
        self.json(false, choices, Some(usage))
    }

    fn first(&mut self, index: u32) -> Result<Option<String>, ApiError> {
        if matches!(self.shape, Shape::Chat) {
            let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
            let choice = ChatChunkChoice { index, delta, logprobs: None, finish_reason: None };
            return self.json(true, vec![choice], None).map(Some);
        }
        match self.echo(index) {
            text if text.is_empty() => Ok(None),
            text => {
                let choice = CompletionChoice { text, index, logprobs: None, finish_reason: None };
                self.json(true, vec![choice], None).map(Some)
            }
        }
    }

    fn chunk(&mut self, index: u32, piece: Option<Piece>, finish_reason: Option<Finish>) -> Result<String, ApiError> {
        let tokens = piece.as_ref().map(|p| p.tokens.as_slice()).unwrap_or_default();
        if matches!(self.shape, Shape::Chat) {
            let logprobs = if tokens.is_empty() { None } else { self.chat_logprobs(tokens) };
            let delta = Delta { role: None, content: piece.map(|p| p.text) };
            return self.json(true, vec![ChatChunkChoice { index, delta, logprobs, finish_reason }], None);
        }
        let logprobs = if tokens.is_empty() { None } else { self.completion_logprobs(index, tokens) };
        let text = piece.map(|p| p.text).unwrap_or_default();
        self.json(true, vec![CompletionChoice { text, index, logprobs, finish_reason }], None)
    }

    fn json<C: Serialize>(&self, chunk: bool, choices: Vec<C>, usage: Option<Usage>) -> Result<String, ApiError> {
        let object = match (&self.shape, chunk) {
            (Shape::Chat, true) => "chat.completion.chunk",
            (Shape::Chat, false) => "chat.completion",
            (Shape::Completion { .. }, _) => "text_completion",
        };
        let (id, created, model) = (self.id.as_str(), self.created, self.app.card().id.as_str());
        serde_json::to_string(&Envelope { id, object, created, model, choices, usage })
            .map_err(|e| ApiError::internal(format!("The answer cannot be written: {e}.")))
    }

    fn echo(&self, index: u32) -> String {
        match &self.shape {
            Shape::Completion { echoes } => echoes.get(index as usize).cloned().unwrap_or_default(),
            Shape::Chat => String::new(),
        }
    }

    fn chat_logprobs(&self, tokens: &[TokenEvent]) -> Option<ChatLogprobs> {
        let one = |token: Token, logprob: f32| {
            let bytes = self.app.backend.token_bytes(token);
            TopLogprob { token: shown(bytes, ""), logprob: finite(logprob), bytes: bytes.to_vec() }
        };
        self.logprobs.then(|| ChatLogprobs {
            content: tokens
                .iter()
                .map(|t| {
                    let TopLogprob { token, logprob, bytes } = one(t.token, t.logprob);
                    TokenLogprob { token, logprob, bytes, top_logprobs: t.top.iter().map(|a| one(a.0, a.1)).collect() }
                })
                .collect(),
        })
    }

    fn completion_logprobs(&mut self, index: u32, tokens: &[TokenEvent]) -> Option<CompletionLogprobs> {
        if !self.logprobs {
            return None;
        }
        let (app, progress) = (&self.app, self.choices.get_mut(index as usize)?);
        let mut out = CompletionLogprobs::default();
        for t in tokens {
            let bytes = app.backend.token_bytes(t.token);
            out.tokens.push(shown(bytes, "bytes:"));
            out.token_logprobs.push(finite(t.logprob));
            out.text_offset.push(progress.offset);
            // Characters begin at bytes that continue none.
            progress.offset += bytes.iter().filter(|b| (**b & 0xC0) != 0x80).count();
            let top = t.top.iter().map(|(token, logprob)| {
                (shown(app.backend.token_bytes(*token), "bytes:"), Value::from(finite(*logprob)))
            });
            out.top_logprobs.push(top.collect::<Map<String, Value>>());
        }
        Some(out)
    }
}

/// A token's text, or its bytes in escapes where they are no text.
fn shown(bytes: &[u8], prefix: &str) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold(prefix.to_owned(), |out, b| out + &format!("\\x{b:02x}")),
    }
}

/// JSON has no infinities; OpenAI's own floor.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}
