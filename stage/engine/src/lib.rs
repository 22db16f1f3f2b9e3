//! A slice of a model in llama.cpp: loading, batches, activations, tokenizer and devices.
//!
//! [`Slice`] is one stage's layers with their KV cache; it takes rows of activations and gives rows of activations, or
//! logits on the last stage. The same type loads an unsplit model ([`Slice::load_whole`]), the reference that slices must
//! equal bit for bit. [`Tokenizer`] is the vocabulary alone. All `unsafe` code is in the private module `llama`.

mod calls;
mod config;
mod embeddings;
mod error;
mod llama;
mod memory;
mod slice;
mod streams;
mod tokenizer;

pub use config::EngineConfig;
pub use embeddings::EmbeddingTable;
pub use error::EngineError;
pub use llama::backend::{Device, DeviceKind, backends_dir, devices, llama_version};
pub use llama::log::on_abort;
pub use llama::quantize::to_f32;
pub use llama::rpc::serve as serve_rpc;
pub use memory::{BufferUse, MemoryUse};
pub use slice::{Slice, SliceFiles};
pub use splitmodel_control::config::{CacheType, FlashAttention, SplitMode};
pub use tokenizer::{SpecialToken, Tokenizer};
