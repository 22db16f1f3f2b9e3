//! What two stages tell each other before the first message, and why they part.

mod check;
mod preface;

pub use check::{Agreed, Formations, Side, check};
pub use preface::{Hello, MAJOR, MAX_DOCUMENT_BYTES, MINOR, PREFACE_BYTES, read_hello, write_refusal, write_setup};

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::codec::ActivationDtype;

/// What a connection carries, seen from the dialler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Frames to the next stage.
    Data,
    /// Predictions from the last stage to stage 0.
    Return,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Return => "return",
        })
    }
}

/// Identity of a process, new at each start: the milliseconds since 1970 in its upper 48 bits, random numbers below; 32 hex
/// digits in the document. Of two the greater was started later, as far as the clocks of two machines agree.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceId(pub u128);

impl InstanceId {
    /// A new id of now.
    ///
    /// # Errors
    /// When the system gives no random numbers.
    pub fn now() -> Result<Self, std::io::Error> {
        let mut bytes = [0; 16];
        let provider = rustls::crypto::ring::default_provider();
        provider
            .secure_random
            .fill(&mut bytes)
            .map_err(|_| std::io::Error::other("the system gives no random numbers"))?;
        // A clock before 1970 makes the oldest of all.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Ok(Self(since.as_millis() << 80 | u128::from_le_bytes(bytes) >> 48))
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for InstanceId {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for InstanceId {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let hex = text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u128::from_str_radix(&text, 16) {
            Ok(n) if hex => Ok(Self(n)),
            _ => Err(serde::de::Error::custom("an instance id is 32 hex digits")),
        }
    }
}

/// Versions of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// Of this software; may differ.
    pub software: String,
    /// Of llama.cpp; must be equal in a chain.
    pub llama_cpp: String,
}

/// The setup document (docs/wire.md, section 2). JSON; unknown fields are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// What the connection carries.
    pub role: Role,
    /// Name of the chain.
    pub chain: String,
    /// Number of the formation.
    pub formation: u64,
    /// Instance of the stage 0 that numbered it.
    pub root: InstanceId,
    /// Index of the sender.
    pub stage: u16,
    /// Stages of the chain.
    pub stages: u16,
    /// Layers of the sender, `[first, end)`.
    pub layers: [u32; 2],
    /// Layers of the whole model.
    pub n_layers: u32,
    /// Digest of the model, hex.
    pub model: String,
    /// Floats in a row of activations.
    pub n_embd: u32,
    /// How activations travel.
    pub activations: ActivationDtype,
    /// KV sequence slots.
    pub lanes: u32,
    /// Cells of the KV cache.
    pub n_ctx: u32,
    /// Rows of one computation.
    pub n_ubatch: u32,
    /// The sender's process.
    pub instance: InstanceId,
    /// Raised when the sender lost its caches.
    pub cache_generation: u64,
    /// Messages the sender accepts before it grants more.
    pub credits: u32,
    /// Largest message the sender accepts, bytes.
    pub max_message_bytes: u64,
    /// Versions of the sender.
    pub versions: Versions,
    /// Optional parts of the protocol the sender knows.
    #[serde(default)]
    pub features: Vec<String>,
}

/// Why a connection was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RefusalCode {
    /// Another major version of the protocol.
    Version,
    /// The preface or the document cannot be read.
    Malformed,
    /// Another chain.
    Chain,
    /// The connection carries something else than expected.
    Role,
    /// The stages or their layers are not neighbours.
    Adjacency,
    /// Another model.
    Model,
    /// Sizes differ, or one is out of range.
    Shape,
    /// Another llama.cpp.
    Build,
    /// An old or foreign formation.
    Formation,
    /// No capacity now; worth another try.
    Busy,
    /// The certificate does not belong to that stage.
    Identity,
    /// A code of a later version.
    #[serde(other)]
    Other,
}

impl fmt::Display for RefusalCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Says no to a connection, and why. "Ours" is the side that refuses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    /// Kind of difference.
    pub code: RefusalCode,
    /// Field of the setup that differs; empty when there is none.
    #[serde(default)]
    pub field: String,
    /// Value at the refusing side.
    #[serde(default)]
    pub ours: String,
    /// Value at the refused side.
    #[serde(default)]
    pub theirs: String,
    /// For people: what differs and what to do.
    pub message: String,
}

/// Longest value or message put into a refusal, in characters; a hostile setup cannot blow one up.
const MAX_VALUE_CHARS: usize = 200;

impl Refusal {
    /// A refusal without values.
    #[must_use]
    pub fn new(code: RefusalCode, message: impl Into<String>) -> Self {
        let message = cut(message.into(), 4 * MAX_VALUE_CHARS);
        Self { code, field: String::new(), ours: String::new(), theirs: String::new(), message }
    }

    /// Two values of one field that do not go together; `remedy` ends the message.
    #[must_use]
    pub fn differ(
        code: RefusalCode,
        field: &str,
        ours: impl fmt::Display,
        theirs: impl fmt::Display,
        remedy: &str,
    ) -> Self {
        let (ours, theirs) = (cut(ours.to_string(), MAX_VALUE_CHARS), cut(theirs.to_string(), MAX_VALUE_CHARS));
        let message = format!("`{field}` does not fit: {ours} here, {theirs} at the peer; {remedy}");
        Self { code, field: field.into(), ours, theirs, message }
    }
}

fn cut(text: String, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
