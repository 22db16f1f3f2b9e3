//! The OpenAI HTTP API: types, chat templates, stop strings, streaming.
//!
//! The crate knows nothing of llama.cpp or of links: it is written over [`Backend`], which the server implements.

mod backend;
mod error;
mod template;
mod text;
mod types;

pub use backend::{
    Backend, EndReason, GenEvent, GenSender, GenerateRequest, Generation, ModelCard, Readiness, SpecialToken,
    SubmitError, Token, TokenEvent,
};
pub use error::{ApiError, ErrorBody, ErrorClass, ErrorObject};
pub use splitmodel_sampling::{GenerationConfig, GrammarSpec};
