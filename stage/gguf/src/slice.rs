//! Packages of a chain, written as ordinary GGUF files that an unmodified llama.cpp loads.
//!
//! A stage's package holds its layers numbered from 0, with metadata that say so. Embedding rows come from outside in every
//! stage: the first and middle ones carry a table of one row of zeros, the last carries the output head in its place (llama.cpp
//! then ties the two). The real table is a package of its own, and so is the tokenizer.

mod plan;
mod write;

use serde::{Deserialize, Serialize};

pub use plan::SlicePlan;
pub use write::Written;
pub(crate) use write::{Done, disk_error, sync_dir};

/// Version of the way packages are written; caches keep those of one version only.
pub const FORMAT_VERSION: u32 = 1;

/// Metadata keys of this project's own that every package carries.
pub mod keys {
    /// [`super::FORMAT_VERSION`], `u32`.
    pub const FORMAT: &str = "splitmodel.format";
    /// [`crate::Model::digest`] of the whole model, string.
    pub const MODEL: &str = "splitmodel.model";
    /// `stage`, `tokenizer` or `embedding`.
    pub const KIND: &str = "splitmodel.kind";
    /// First layer of a stage, `u32`.
    pub const FIRST: &str = "splitmodel.first_layer";
    /// One past the last layer of a stage, `u32`.
    pub const END: &str = "splitmodel.end_layer";
    /// Layers of the whole model, `u32`.
    pub const LAYERS: &str = "splitmodel.layers";
}

/// A file that some stage needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Package {
    /// Layers `first..end`; with the output head where `end` is the model's last.
    Stage {
        /// First layer.
        first: u32,
        /// One past the last layer.
        end: u32,
    },
    /// All metadata, no tensors.
    Tokenizer,
    /// The embedding table alone, in its original type.
    Embedding,
}

impl Package {
    /// Value of [`keys::KIND`].
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Stage { .. } => "stage",
            Self::Tokenizer => "tokenizer",
            Self::Embedding => "embedding",
        }
    }
}

impl std::fmt::Display for Package {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Stage { first, end } => write!(f, "layers {first}..{end}"),
            other => f.write_str(other.kind()),
        }
    }
}
