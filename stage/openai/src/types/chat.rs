//! `/v1/chat/completions`: messages and the fields that only chat has.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, SeqAccess, Visitor, value::SeqAccessDeserializer};
use serde_json::{Map, Value};

use crate::backend::ModelCard;
use crate::error::ApiError;
use crate::types::common::{Common, MAX_TOP_LOGPROBS, positive, shown};
use crate::types::{read, refuse};

const REFUSED: [&str; 4] = ["functions", "function_call", "audio", "web_search_options"];

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    Developer,
    User,
    Assistant,
    Tool,
}

impl Role {
    /// The word that templates know.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// One element of a content array; which fields are there depends on `type`.
#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

#[derive(Debug)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Content;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of content parts")
            }
            fn visit_str<E>(self, text: &str) -> Result<Content, E> {
                Ok(Content::Text(text.to_owned()))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Content, A::Error> {
                Deserialize::deserialize(SeqAccessDeserializer::new(seq)).map(Content::Parts)
            }
        }
        deserializer.deserialize_any(V)
    }
}

#[derive(Debug, Deserialize)]
struct RawMessage {
    role: Role,
    content: Option<Content>,
    name: Option<String>,
    refusal: Option<String>,
    reasoning_content: Option<String>,
    tool_call_id: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

/// A call that the assistant made in an earlier turn.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct ToolCall {
    /// Ties the tool's answer to it.
    pub(crate) id: Option<String>,
    /// What was called.
    pub(crate) function: CalledFunction,
}

/// Name and arguments of a call.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct CalledFunction {
    /// The tool.
    pub(crate) name: String,
    /// JSON as text, as the API has it.
    pub(crate) arguments: String,
}

/// A message with its content joined to one text.
#[derive(Debug, Clone)]
pub(crate) struct Message {
    pub(crate) role: Role,
    pub(crate) content: String,
    pub(crate) name: Option<String>,
    pub(crate) reasoning: Option<String>,
    pub(crate) tool_call_id: Option<String>,
    pub(crate) tool_calls: Vec<ToolCall>,
}

#[derive(Debug, Deserialize)]
struct Raw {
    messages: Vec<RawMessage>,
    max_completion_tokens: Option<u64>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Value>,
    modalities: Option<Vec<String>>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
}

/// A chat request, checked.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) common: Common,
    pub(crate) messages: Vec<Message>,
    /// For the template only; calls are not decoded.
    pub(crate) tools: Vec<Value>,
    pub(crate) logprobs: bool,
    /// More variables for the template.
    pub(crate) template_args: Map<String, Value>,
}

impl ChatRequest {
    /// Reads and checks a request for the model of `card`.
    pub(crate) fn read(body: &Value, card: &ModelCard) -> Result<Self, ApiError> {
        let mut common = Common::read(body, card)?;
        let raw: Raw = read(body)?;
        refuse(body, &REFUSED)?;
        positive("max_completion_tokens", raw.max_completion_tokens)?;
        common.max_tokens = match (raw.max_completion_tokens, common.max_tokens) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let logprobs = raw.logprobs.unwrap_or(false);
        if let Some(top) = raw.top_logprobs {
            if !logprobs {
                return Err(ApiError::invalid("top_logprobs", "`top_logprobs` needs `logprobs: true`."));
            }
            if top > MAX_TOP_LOGPROBS {
                let message = format!("`top_logprobs` is {top}; 0 to {MAX_TOP_LOGPROBS} is accepted.");
                return Err(ApiError::invalid("top_logprobs", message));
            }
            common.config.top_logprobs = top as u8;
        }
        if let Some(other) = raw.modalities.unwrap_or_default().into_iter().find(|m| m != "text") {
            let message = format!("`modalities` asks for `{}`; this model answers with text.", shown(&other));
            return Err(ApiError::unsupported("modalities", message));
        }
        let tools = tools(raw.tools.unwrap_or_default(), raw.tool_choice.as_ref())?;
        let mut template_args = raw.chat_template_kwargs.unwrap_or_default();
        if let Some(effort) = raw.reasoning_effort {
            template_args.entry("reasoning_effort").or_insert(Value::String(effort));
        }
        Ok(Self { common, messages: messages(raw.messages)?, tools, logprobs, template_args })
    }
}

/// The tools that the template shows; calls themselves are refused, since they are not decoded here.
fn tools(tools: Vec<Map<String, Value>>, choice: Option<&Value>) -> Result<Vec<Value>, ApiError> {
    let choice = match choice {
        None => None,
        Some(Value::String(s)) if ["none", "auto", "required"].contains(&s.as_str()) => Some(s.as_str()),
        Some(Value::Object(_)) => Some("named"),
        Some(_) => {
            let message = "`tool_choice` must be none, auto, required or an object that names a tool.";
            return Err(ApiError::invalid("tool_choice", message));
        }
    };
    match choice {
        Some("required" | "named") => {
            Err(ApiError::unsupported("tool_choice", "`tool_choice`: this server does not make tool calls."))
        }
        Some("none") => Ok(tools.into_iter().map(Value::Object).collect()),
        _ if tools.is_empty() => Ok(Vec::new()),
        _ => {
            let message = "`tools`: this server does not make tool calls; send `tool_choice: \"none\"` or no tools.";
            Err(ApiError::unsupported("tools", message))
        }
    }
}

fn messages(raw: Vec<RawMessage>) -> Result<Vec<Message>, ApiError> {
    if raw.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` is empty; at least one message is needed."));
    }
    raw.into_iter().enumerate().map(|(i, message)| check_message(i, message)).collect()
}

fn check_message(i: usize, raw: RawMessage) -> Result<Message, ApiError> {
    let at = format!("messages[{i}].content");
    let tool_calls = raw.tool_calls.unwrap_or_default();
    if !tool_calls.is_empty() && raw.role != Role::Assistant {
        let at = format!("messages[{i}].tool_calls");
        return Err(ApiError::invalid(at.as_str(), format!("`{at}`: only the assistant makes tool calls.")));
    }
    if raw.role == Role::Tool && raw.tool_call_id.is_none() {
        let at = format!("messages[{i}].tool_call_id");
        return Err(ApiError::invalid(at.as_str(), format!("`{at}` is required in a message of a tool.")));
    }
    let content = match raw.content {
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => join(&at, parts)?,
        None => match raw.refusal {
            Some(refusal) if raw.role == Role::Assistant => refusal,
            None if !tool_calls.is_empty() => String::new(),
            _ => return Err(ApiError::invalid(at.as_str(), format!("`{at}` is required."))),
        },
    };
    Ok(Message {
        role: raw.role,
        content,
        name: raw.name,
        reasoning: raw.reasoning_content,
        tool_call_id: raw.tool_call_id,
        tool_calls,
    })
}

fn join(at: &str, parts: Vec<Part>) -> Result<String, ApiError> {
    let mut out = String::new();
    for (i, part) in parts.into_iter().enumerate() {
        let at = format!("{at}[{i}]");
        let text = match part.kind.as_str() {
            "text" => part.text,
            "refusal" => part.refusal,
            kind @ ("image_url" | "input_audio" | "file" | "video_url") => {
                let what = match kind {
                    "input_audio" => "audio",
                    "image_url" => "image",
                    "video_url" => "video",
                    _ => "file",
                };
                let message =
                    format!("`{at}` is of type `{kind}`: {what} input (another modality) is not understood here.");
                return Err(ApiError::unsupported(at, message));
            }
            other => {
                let message = format!("`{at}.type` is `{}`; text is accepted.", shown(other));
                return Err(ApiError::invalid(format!("{at}.type"), message));
            }
        };
        out.push_str(&text.ok_or_else(|| ApiError::invalid(format!("{at}.text"), format!("`{at}` has no text.")))?);
    }
    Ok(out)
}
