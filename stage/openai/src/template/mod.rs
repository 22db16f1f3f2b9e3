//! The model's own chat template: messages to prompt tokens.

mod compat;
mod guard;
pub(crate) mod specials;
#[cfg(test)]
mod tests;

use indexmap::IndexMap;
use minijinja::{Environment, Error, Value};

use crate::backend::{ModelCard, SpecialToken, Token};
use crate::error::ApiError;
use crate::types::chat::{ChatRequest, Message, Role};
use compat::RAISED;
use guard::Guard;
use specials::{Segment, Specials};

const NAME: &str = "chat_template";
/// Instructions and 64-byte units of made data that one rendering may use, beyond those its input earns.
const FUEL: u64 = 500_000;

/// A compiled chat template. Rendering is bounded in time and memory by the engine's fuel.
#[derive(Debug)]
pub(crate) struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
    knows_developer: bool,
}

/// A rendered prompt: control tokens and the texts between.
#[derive(Debug, PartialEq)]
pub(crate) enum PromptPart {
    Text(String),
    Special(Token),
}

impl ChatTemplate {
    /// Compiles `source`, the template of `card`.
    pub(crate) fn new(source: &str, card: &ModelCard) -> Result<Self, Error> {
        let source = compat::without_generation_marks(source);
        let mut env = compat::environment()?;
        env.add_template_owned(NAME, source.clone())?;
        let text = |t: &Option<SpecialToken>| t.as_ref().map(|t| t.text.clone()).unwrap_or_default();
        let knows_developer = source.contains("developer");
        Ok(Self { env, source, bos: text(&card.bos), eos: text(&card.eos), knows_developer })
    }

    /// The prompt of a chat. Only text of the template itself becomes control tokens, never text of the request. A chat
    /// that ends with the assistant is continued there.
    ///
    /// # Errors
    /// 400 with the template's own words where it refuses the messages.
    pub(crate) fn render(&self, chat: &ChatRequest, specials: &Specials) -> Result<Vec<PromptPart>, ApiError> {
        let json = serde_json::to_string(&(&chat.tools, &chat.template_args)).unwrap_or_default();
        let texts: Vec<&str> = [self.source.as_str(), json.as_str()]
            .into_iter()
            .chain(chat.messages.iter().flat_map(Message::texts))
            .collect();
        let size: usize = texts.iter().map(|t| t.len()).sum();
        let guard = Guard::new(specials, &texts)?;
        let open = chat.messages.last().is_some_and(|m| m.role == Role::Assistant && m.tool_calls.is_empty());
        let rendered = self.run(chat, &guard, open, FUEL + size as u64 / 4)?;
        let text = if open {
            let cut = rendered.rfind(guard.end()).ok_or_else(|| {
                let message = "The last message is the assistant's, and the model's template cannot continue it.";
                ApiError::invalid("messages", message)
            })?;
            &rendered[..cut]
        } else {
            rendered.as_str()
        };
        let clean = |text: &str| text.chars().filter(|c| *c != guard.mark() && *c != guard.end()).collect::<String>();
        let mut parts = Vec::new();
        for segment in specials.split(text) {
            match segment {
                Segment::Special(id) => parts.push(PromptPart::Special(id)),
                Segment::Text(text) => match clean(text) {
                    text if text.is_empty() => {}
                    text => parts.push(PromptPart::Text(text)),
                },
            }
        }
        Ok(parts)
    }

    fn run(&self, chat: &ChatRequest, guard: &Guard<'_>, open: bool, fuel: u64) -> Result<String, ApiError> {
        let last = chat.messages.len().saturating_sub(1);
        let messages: Value = chat
            .messages
            .iter()
            .enumerate()
            .map(|(i, message)| self.message(message, guard, open && i == last))
            .collect();
        let mut context = IndexMap::<Value, Value>::new();
        let mut set = |key: &str, value: Value| {
            context.insert(Value::from(key), value);
        };
        for (key, value) in &chat.template_args {
            set(key, guard.json(value));
        }
        set("messages", messages);
        set("add_generation_prompt", Value::from(!open));
        set("bos_token", Value::from(self.bos.as_str()));
        set("eos_token", Value::from(self.eos.as_str()));
        let tools: Value = chat.tools.iter().map(|t| guard.json(t)).collect();
        set("tools", if chat.tools.is_empty() { Value::from(()) } else { tools });
        let mut env = self.env.clone();
        env.set_fuel(Some(fuel));
        env.get_template(NAME).and_then(|t| t.render(Value::from(context))).map_err(|e| refused(&e))
    }

    fn message(&self, message: &Message, guard: &Guard<'_>, open: bool) -> Value {
        let role = match message.role {
            Role::Developer if !self.knows_developer => Role::System,
            role => role,
        };
        let mut content = guard.text(&message.content);
        if open {
            content.push(guard.end());
        }
        let mut out = IndexMap::<Value, Value>::new();
        let mut set = |key: &str, value: Value| {
            out.insert(Value::from(key), value);
        };
        set("role", Value::from(role.name()));
        set("content", Value::from(content));
        let more = [
            ("name", &message.name),
            ("reasoning_content", &message.reasoning),
            ("tool_call_id", &message.tool_call_id),
        ];
        for (key, value) in more {
            if let Some(value) = value {
                set(key, Value::from(guard.text(value)));
            }
        }
        if !message.tool_calls.is_empty() {
            set("tool_calls", message.tool_calls.iter().map(|call| tool_call(call, guard)).collect());
        }
        Value::from(out)
    }
}

/// A call as templates expect it: its arguments parsed, where they are an object.
fn tool_call(call: &crate::types::chat::ToolCall, guard: &Guard<'_>) -> Value {
    let arguments = match serde_json::from_str(&call.function.arguments) {
        Ok(value @ serde_json::Value::Object(_)) => guard.json(&value),
        _ => Value::from(guard.text(&call.function.arguments)),
    };
    let function: IndexMap<Value, Value> =
        [(Value::from("name"), Value::from(guard.text(&call.function.name))), (Value::from("arguments"), arguments)]
            .into_iter()
            .collect();
    let mut out = IndexMap::<Value, Value>::new();
    if let Some(id) = &call.id {
        out.insert(Value::from("id"), Value::from(guard.text(id)));
    }
    out.insert(Value::from("type"), Value::from("function"));
    out.insert(Value::from("function"), Value::from(function));
    Value::from(out)
}

fn refused(error: &Error) -> ApiError {
    let text = error.detail().unwrap_or_default();
    let message = match text.strip_prefix(RAISED) {
        Some(own) => format!("The model's chat template refuses these messages: {own}"),
        None => {
            let line = error.line().unwrap_or(0);
            format!("The model's chat template cannot render these messages (line {line}): {}: {text}", error.kind())
        }
    };
    ApiError::invalid("messages", message).with_code("chat_template_error")
}

impl Message {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let calls = self.tool_calls.iter();
        let calls = calls
            .flat_map(|c| [c.function.name.as_str(), c.function.arguments.as_str()].into_iter().chain(c.id.as_deref()));
        [Some(self.content.as_str()), self.name.as_deref(), self.reasoning.as_deref(), self.tool_call_id.as_deref()]
            .into_iter()
            .flatten()
            .chain(calls)
    }
}
