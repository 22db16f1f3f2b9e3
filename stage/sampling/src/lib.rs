//! Sampling on the last stage: samplers, penalties, log-probabilities and grammars. No llama.cpp.
//!
//! A [`SessionSampler`] holds all the last stage knows about a session's text. It is a function of its
//! [`GenerationConfig`] and of the rows committed to it: random draws depend on the seed and the position of the token
//! drawn only, so going back ([`SessionSampler::truncate`]) and rebuilding after a restart need no other state.

mod config;
mod draw;
mod error;
mod grammar;
mod select;
mod session;

pub use config::{GenerationConfig, GrammarSpec};
pub use error::SamplingError;
pub use grammar::GrammarFactory;
pub use session::{Sample, SessionSampler};

/// A token id of the model's vocabulary; −1 marks a media row.
pub type Token = i32;

/// A position in a sequence, counted from 0; authoritative, never a count of rows.
pub type Position = i32;
