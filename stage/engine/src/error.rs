use std::path::{Path, PathBuf};

/// What can go wrong before the first token. Errors of computations are `splitmodel_chain::runtime::RuntimeError`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// No CPU backend of llama.cpp could be loaded.
    #[error(
        "no CPU backend of llama.cpp was found in {searched}; put the libggml-cpu-*.so files into a folder `backends` \
         beside the executable, or name their folder in SPLITMODEL_BACKENDS"
    )]
    Backends {
        /// The folders looked at.
        searched: String,
    },
    /// A device that was asked for is not there.
    #[error(
        "engine configuration: `devices` names `{name}`, which does not exist; devices that layers can be put on: \
         {available}"
    )]
    NoDevice {
        /// The name asked for.
        name: String,
        /// What exists.
        available: String,
    },
    /// Layers are to be put on a device and there is none.
    #[error(
        "engine configuration: `n_gpu_layers` is {layers} and no device can take layers; what is there: {available}; \
         set `n_gpu_layers` to 0 to compute on the CPU"
    )]
    NoGpu {
        /// Layers asked for.
        layers: u32,
        /// What exists.
        available: String,
    },
    /// A ggml-RPC server cannot be used.
    #[error("engine configuration: `rpc`: ggml-RPC server {endpoint}: {reason}")]
    Rpc {
        /// `host:port`.
        endpoint: String,
        /// What happened.
        reason: String,
    },
    /// A value of the configuration cannot be used.
    #[error("engine configuration: `{field}` {reason}")]
    Config {
        /// Field name.
        field: &'static str,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A file is not what it must be; it was not given to llama.cpp.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// llama.cpp refused the model.
    #[error("llama.cpp cannot load {}: {reason}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// llama.cpp's own last error lines.
        reason: String,
    },
    /// llama.cpp refused to make a context: usually memory.
    #[error("llama.cpp cannot make a context for {} with {cells} KV cells: {reason}", path.display())]
    Context {
        /// The model file.
        path: PathBuf,
        /// Cells asked for.
        cells: u32,
        /// llama.cpp's own last error lines.
        reason: String,
    },
    /// The progress callback asked to stop.
    #[error("loading {} was cancelled", path.display())]
    Cancelled {
        /// The file.
        path: PathBuf,
    },
    /// Text could not be tokenised.
    #[error("{bytes} bytes of text cannot be tokenised: {reason}")]
    Tokenize {
        /// Length of the text.
        bytes: usize,
        /// Why.
        reason: String,
    },
    /// A model could not be converted.
    #[error("llama.cpp cannot convert {}: {reason}", path.display())]
    Convert {
        /// The source file.
        path: PathBuf,
        /// llama.cpp's own last error lines.
        reason: String,
    },
}

/// What llama.cpp says of a file that no other try reads (`llama-model-loader.cpp` and `llama-model.cpp` of the pinned version); of
/// memory and devices it says other things.
const WRONG_FILE: [&str; 11] = [
    "has wrong shape",
    "wrong number of tensors",
    "too many tensors",
    "missing tensor",
    "model architecture",
    "key not found in model",
    "has wrong type",
    "wrong array",
    "invalid data",
    "corrupted or incomplete",
    "corrupted model",
];

impl EngineError {
    /// Whether trying again is pointless as long as neither the file nor the configuration is changed. Memory that is short now may
    /// be there later, and so may a device.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Backends { .. } | Self::Config { .. } | Self::File { .. } | Self::Tokenize { .. } => true,
            Self::Load { reason, .. } | Self::Convert { reason, .. } => {
                WRONG_FILE.iter().any(|words| reason.contains(words))
            }
            Self::NoDevice { .. } | Self::NoGpu { .. } | Self::Rpc { .. } => false,
            Self::Context { .. } | Self::Cancelled { .. } => false,
        }
    }

    pub(crate) fn file(path: &Path, reason: impl std::fmt::Display) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn config(field: &'static str, reason: impl Into<String>) -> Self {
        Self::Config { field, reason: reason.into() }
    }
}
