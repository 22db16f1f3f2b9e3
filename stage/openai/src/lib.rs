//! The OpenAI HTTP API: types, chat templates, stop strings, streaming.
//!
//! The crate knows nothing of llama.cpp or of links: it is written over [`Backend`], which the server implements.

mod answer;
mod app;
mod backend;
mod error;
mod http;
mod observe;
mod prepare;
mod serve;
mod template;
mod text;
mod trace;
mod types;

pub use app::{ApiConfig, SetupError};
pub use backend::{
    Backend, EndReason, GenEvent, GenSender, GenerateRequest, Generation, ModelCard, Readiness, SpecialToken,
    SubmitError, Token, TokenEvent,
};
pub use error::{ApiError, ErrorBody, ErrorClass, ErrorObject};
pub use http::router;
pub use serve::{Door, Missing, ServeLimits, Startup, serve};
pub use splitmodel_sampling::{GenerationConfig, GrammarSpec};
pub use trace::TraceParent;
