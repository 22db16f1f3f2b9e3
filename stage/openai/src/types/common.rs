//! The fields that chat and completions share.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, SeqAccess, Visitor, value::SeqAccessDeserializer};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use splitmodel_sampling::{GenerationConfig, GrammarSpec};

use crate::backend::{ModelCard, Token};
use crate::error::{ApiError, ErrorClass};
use crate::types::{read, refuse};

/// Stop strings that a request may have, and the bytes of each.
const MAX_STOPS: usize = 4;
const MAX_STOP_BYTES: usize = 1024;
/// Choices of one request, over all its prompts.
pub(crate) const MAX_CHOICES: u32 = 128;
/// Alternatives that may be asked for with a token.
pub(crate) const MAX_TOP_LOGPROBS: u32 = 20;

/// Fields that constrain or change the answer in ways this server does not have; ignoring them would fall open.
const REFUSED: [&str; 8] = [
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
    "json_schema",
    "lora",
];

/// `stop`: one string or a list.
#[derive(Debug, Default, PartialEq)]
struct Stop(Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Stop;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of strings")
            }
            fn visit_str<E>(self, one: &str) -> Result<Stop, E> {
                Ok(Stop(vec![one.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Stop, A::Error> {
                Deserialize::deserialize(SeqAccessDeserializer::new(seq)).map(Stop)
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// `seed`: any 64-bit integer, signed or not.
#[derive(Debug, Clone, Copy)]
struct Seed(u64);

impl<'de> Deserialize<'de> for Seed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Seed;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a 64-bit integer")
            }
            fn visit_u64<E>(self, v: u64) -> Result<Seed, E> {
                Ok(Seed(v))
            }
            fn visit_i64<E>(self, v: i64) -> Result<Seed, E> {
                Ok(Seed(v as u64))
            }
        }
        deserializer.deserialize_any(V)
    }
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Raw {
    model: Option<String>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    max_tokens: Option<u64>,
    n: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    repeat_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    repeat_last_n: Option<i32>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<BTreeMap<String, f64>>,
    stop: Option<Stop>,
    seed: Option<Seed>,
    ignore_eos: Option<bool>,
    response_format: Option<Value>,
    user: Option<String>,
    safety_identifier: Option<String>,
    prompt_cache_key: Option<String>,
}

/// The shared fields, checked.
#[derive(Debug)]
pub(crate) struct Common {
    /// Sent as server-sent events.
    pub(crate) stream: bool,
    /// One more chunk with the usage.
    pub(crate) include_usage: bool,
    /// `max_tokens`, if given.
    pub(crate) max_tokens: Option<u64>,
    /// Choices for each prompt.
    pub(crate) n: u32,
    /// `seed`, if given.
    pub(crate) seed: Option<u64>,
    /// Stop strings, none empty.
    pub(crate) stop: Vec<String>,
    /// Sampling; seed, prompt length and logprobs are set later.
    pub(crate) config: GenerationConfig,
    /// `prompt_cache_key`.
    pub(crate) cache_key: Option<String>,
    /// `safety_identifier` or `user`.
    pub(crate) tenant: Option<String>,
}

impl Common {
    /// Reads and checks the shared fields of a request for the model of `card`.
    pub(crate) fn read(body: &Value, card: &ModelCard) -> Result<Self, ApiError> {
        if !body.is_object() {
            return Err(ApiError::new(ErrorClass::InvalidRequest, "The body must be a JSON object."));
        }
        let raw: Raw = read(body)?;
        check_model(raw.model.as_deref(), card)?;
        refuse(body, &REFUSED)?;
        let stream = raw.stream.unwrap_or(false);
        let include_usage = raw.stream_options.unwrap_or_default().include_usage.unwrap_or(false);
        if include_usage && !stream {
            return Err(ApiError::invalid("stream_options", "`stream_options` needs `stream: true`."));
        }
        positive("max_tokens", raw.max_tokens)?;
        let n = raw.n.unwrap_or(1);
        if n == 0 || n > MAX_CHOICES {
            return Err(ApiError::invalid("n", format!("`n` is {n}; 1 to {MAX_CHOICES} is accepted.")));
        }
        if raw.repeat_penalty.is_some() && raw.repetition_penalty.is_some() {
            return Err(ApiError::invalid(
                "repetition_penalty",
                "`repeat_penalty` and `repetition_penalty` are the same; send one of them.",
            ));
        }
        let repeat_penalty = match raw.repetition_penalty {
            Some(v) => within("repetition_penalty", v, 0.01, 100.0)?,
            None => within("repeat_penalty", raw.repeat_penalty.unwrap_or(1.0), 0.01, 100.0)?,
        };
        let mut config = GenerationConfig {
            temperature: within("temperature", raw.temperature.unwrap_or(1.0), 0.0, 2.0)?,
            top_k: top_k(raw.top_k)?,
            top_p: within("top_p", raw.top_p.unwrap_or(1.0), 0.0, 1.0)?,
            min_p: within("min_p", raw.min_p.unwrap_or(0.0), 0.0, 1.0)?,
            repeat_penalty,
            presence_penalty: within("presence_penalty", raw.presence_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            frequency_penalty: within("frequency_penalty", raw.frequency_penalty.unwrap_or(0.0), -2.0, 2.0)?,
            logit_bias: logit_bias(raw.logit_bias.unwrap_or_default(), card)?,
            grammar: response_format(raw.response_format.as_ref())?,
            eog: card.eog.clone(),
            ..GenerationConfig::default()
        };
        if let Some(n) = raw.repeat_last_n {
            if n < -1 {
                return Err(ApiError::invalid("repeat_last_n", "`repeat_last_n` is -1 (all), 0 (none) or a count."));
            }
            config.penalty_last_n = n;
        }
        if raw.ignore_eos == Some(true) {
            if config.grammar.is_some() {
                let message = "`ignore_eos` cannot go with `response_format`, whose text must end.";
                return Err(ApiError::invalid("ignore_eos", message));
            }
            config.logit_bias.retain(|(token, _)| !card.eog.contains(token));
            config.logit_bias.extend(card.eog.iter().map(|token| (*token, -100.0)));
        }
        Ok(Self {
            stream,
            include_usage,
            max_tokens: raw.max_tokens,
            n,
            seed: raw.seed.map(|s| s.0),
            stop: stops(raw.stop)?,
            config,
            cache_key: short("prompt_cache_key", raw.prompt_cache_key)?,
            tenant: short("safety_identifier", raw.safety_identifier)?.or(short("user", raw.user)?),
        })
    }
}

/// 404 for a model that is not served. An absent name means the one that is.
pub(crate) fn check_model(name: Option<&str>, card: &ModelCard) -> Result<(), ApiError> {
    match name {
        Some(name) if name != card.id && !card.aliases.iter().any(|a| a == name) => Err(ApiError {
            param: Some("model".to_owned()),
            code: Some("model_not_found"),
            ..ApiError::new(
                ErrorClass::NotFound,
                format!("The model `{}` is not served here; `{}` is.", shown(name), card.id),
            )
        }),
        _ => Ok(()),
    }
}

/// A caller's text in an error message: not longer than needed to know it again.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(64).collect();
    if out.len() < text.len() {
        out.push('…');
    }
    out
}

/// Refuses 0; a limit of no tokens has no answer.
pub(crate) fn positive(field: &'static str, value: Option<u64>) -> Result<(), ApiError> {
    match value {
        Some(0) => Err(ApiError::invalid(field, format!("`{field}` is 0; it must be at least 1."))),
        _ => Ok(()),
    }
}

fn within(field: &'static str, value: f64, low: f64, high: f64) -> Result<f32, ApiError> {
    if value >= low && value <= high {
        return Ok(value as f32);
    }
    Err(ApiError::invalid(field, format!("`{field}` is {value}; {low} to {high} is accepted.")))
}

fn short(field: &'static str, value: Option<String>) -> Result<Option<String>, ApiError> {
    match value {
        Some(v) if v.len() > 1024 => {
            Err(ApiError::invalid(field, format!("`{field}` has {} bytes; 1024 are accepted.", v.len())))
        }
        value => Ok(value.filter(|v| !v.is_empty())),
    }
}

fn top_k(value: Option<i64>) -> Result<u32, ApiError> {
    match value {
        None | Some(-1) => Ok(0),
        Some(k) => u32::try_from(k).map_err(|_| {
            ApiError::invalid("top_k", format!("`top_k` is {k}; a count, or 0 or -1 for all, is accepted."))
        }),
    }
}

fn logit_bias(raw: BTreeMap<String, f64>, card: &ModelCard) -> Result<Vec<(Token, f32)>, ApiError> {
    let mut out = BTreeMap::new();
    for (key, bias) in raw {
        let token = key.parse::<Token>().ok().filter(|t| *t >= 0 && (*t as u32) < card.n_vocab).ok_or_else(|| {
            let last = card.n_vocab.saturating_sub(1);
            ApiError::invalid(
                "logit_bias",
                format!("`logit_bias` key `{}` is no token id; 0 to {last} are.", shown(&key)),
            )
        })?;
        if out.insert(token, within("logit_bias", bias, -100.0, 100.0)?).is_some() {
            return Err(ApiError::invalid("logit_bias", format!("`logit_bias` names token {token} twice.")));
        }
    }
    Ok(out.into_iter().collect())
}

fn stops(raw: Option<Stop>) -> Result<Vec<String>, ApiError> {
    let mut list = raw.unwrap_or_default().0;
    list.retain(|s| !s.is_empty());
    if list.len() > MAX_STOPS {
        let message = format!("`stop` has {} strings; at most {MAX_STOPS} are accepted.", list.len());
        return Err(ApiError::invalid("stop", message));
    }
    if list.iter().any(|s| s.len() > MAX_STOP_BYTES) {
        return Err(ApiError::invalid("stop", format!("A string of `stop` is longer than {MAX_STOP_BYTES} bytes.")));
    }
    Ok(list)
}

#[derive(Debug, Deserialize, Serialize)]
struct JsonSchemaFormat {
    name: String,
    schema: Option<Value>,
}

fn response_format(raw: Option<&Value>) -> Result<Option<GrammarSpec>, ApiError> {
    let Some(raw) = raw else { return Ok(None) };
    let Some(kind) = raw.get("type").and_then(Value::as_str) else {
        return Err(ApiError::invalid("response_format", "`response_format` must be an object with a `type`."));
    };
    match kind {
        "text" => Ok(None),
        "json_object" => Ok(Some(GrammarSpec::JsonObject)),
        "json_schema" => {
            let at = "response_format.json_schema";
            let inner = raw.get("json_schema").filter(|v| v.is_object());
            let inner = inner.ok_or_else(|| ApiError::invalid(at, format!("`{at}` must be an object.")))?;
            let format: JsonSchemaFormat = read(inner).map_err(|mut error| {
                let field = error.param.take().unwrap_or_default();
                error.message = format!("{at}: {}", error.message);
                ApiError { param: Some(format!("{at}.{field}")), ..error }
            })?;
            match format.schema {
                Some(schema @ Value::Object(_)) => Ok(Some(GrammarSpec::JsonSchema(schema))),
                _ => {
                    let at = format!("{at}.schema");
                    let message = format!("`{at}` of `{}` must be an object.", shown(&format.name));
                    Err(ApiError::invalid(at, message))
                }
            }
        }
        other => {
            let message =
                format!("`response_format.type` is `{}`; text, json_object and json_schema are.", shown(other));
            Err(ApiError::invalid("response_format.type", message))
        }
    }
}
