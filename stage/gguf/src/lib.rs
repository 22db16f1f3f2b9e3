//! GGUF headers, family rules, range reads, and slices written as ordinary GGUF files.
//!
//! [`Model`] opens a GGUF file (or all shards of one) and checks every length, offset and name in it before anything else
//! sees it. [`Model::facts`] gives what planning needs, [`families`] says how an architecture may be cut,
//! [`slice::SlicePlan`] writes the packages of a chain, and [`cache::Cache`] keeps them on disk.

pub mod cache;
mod checks;
pub mod compact;
pub mod embedding;
pub mod encode;
mod error;
pub mod facts;
pub mod families;
pub mod header;
mod model;
mod reader;
pub mod slice;
pub mod source;
#[cfg(feature = "tiny")]
pub mod tiny;
pub mod types;
pub mod value;

pub use embedding::EmbeddingFile;
pub use error::{Error, Result};
pub use facts::{LayerFacts, ModelFacts, TokenizerFacts};
pub use families::{Boundary, Family};
pub use header::{Header, Limits, TensorInfo};
pub use model::{Model, TensorRef};
pub use slice::{Package, SlicePlan};
pub use source::{FileSource, Source};
pub use types::TensorType;
