//! `StageConfig`: what one stage is and how it runs. The same file serves a cluster and a laptop.
//!
//! YAML or JSON, snake case, unknown fields refused. Options that llama.cpp has carry llama.cpp's names.
mod engine;
mod kv_cache;
mod network;
mod telemetry;
mod validate;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use engine::{CacheType, EngineConfig, FlashAttention, SplitMode};
pub use kv_cache::KvCacheConfig;
pub use network::{Activations, ApiConfig, BindConfig, LinkConfig, Secret, TlsConfig};
pub use telemetry::{TelemetryConfig, Tier};

/// Most sequences of a llama.cpp context (`LLAMA_MAX_SEQ`).
pub const MAX_SEQUENCES: u32 = 256;

/// Everything a stage is told at its start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StageConfig {
    /// Name of the chain; equal on all its stages.
    pub chain: String,
    /// Index of this stage, from 0.
    pub stage: u32,
    /// Number of stages in the chain, at least 1.
    pub stages: u32,
    /// Layers `[first, end)` of the model that this stage holds.
    pub layers: [u32; 2],
    /// Layers of the whole model.
    pub n_layers: u32,
    /// Where the model comes from.
    pub model: ModelConfig,
    /// Where slices are kept.
    pub cache: CacheConfig,
    /// Connections to the other stages.
    #[serde(default)]
    pub link: LinkConfig,
    /// The control service.
    #[serde(default = "BindConfig::control")]
    pub control: BindConfig,
    /// The gRPC health service, on a port of its own that serves nothing else.
    #[serde(default = "BindConfig::health")]
    pub health: BindConfig,
    /// The OpenAI API: on stage 0, and only there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api: Option<ApiConfig>,
    /// Model and context.
    #[serde(default)]
    pub engine: EngineConfig,
    /// Reuse of computed prefixes.
    #[serde(default)]
    pub kv_cache: KvCacheConfig,
    /// Admission, batching and deadlines.
    #[serde(default)]
    pub scheduling: SchedulingConfig,
    /// What is logged, and how.
    #[serde(default)]
    pub log: LogConfig,
    /// Traces and what is measured of requests.
    #[serde(default)]
    pub telemetry: TelemetryConfig,
    /// Where `/metrics` is served besides the API. Absent: stage 0 serves it with the API, other stages not at all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<BindConfig>,
    /// File that every batch and memory operation is appended to, for replay. Absent: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule_log: Option<PathBuf>,
}

/// The model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// `file:///path/model.gguf`, a plain path, `https://…` or `hf://owner/repo[@revision]/file`; of a sharded model any file.
    pub source: String,
    /// BLAKE3 of the model's header, 64 hex digits. Absent: whatever the source gives is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Directory with a file `token`, or with `username` and `password`, for a source that is downloaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials: Option<PathBuf>,
}

/// The directory of slices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CacheConfig {
    /// Directory; created if missing; may be shared by stages.
    pub dir: PathBuf,
    /// Bytes it may hold before the least recently used slices go. 0: no limit.
    #[serde(default)]
    pub max_bytes: u64,
}

/// Admission, batching and deadlines.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SchedulingConfig {
    /// Frames in flight at once. Absent: one per stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    /// Prompt tokens in a frame when no answer is running, at most `engine.n_ubatch`. Absent: `n_ubatch` in a chain of one, a
    /// quarter of it in longer ones, where the chunks of a prompt keep all stages at work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk: Option<u32>,
    /// Prompt tokens under way in the chain at once at most while answers are running, spread over the frames in flight. Fewer
    /// go where they would make the answers' frames more than twice as dear. Absent: `n_ubatch`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk_shared: Option<u32>,
    /// Requests that may wait for a lane; more are refused with 429.
    pub max_queue: u32,
    /// Seconds a request may wait for a lane.
    pub admission_deadline_s: u32,
    /// Seconds a request may wait for a broken chain to come back.
    pub recovery_deadline_s: u32,
    /// Seconds that running requests get to finish when the stage is told to end.
    pub drain_grace_s: u32,
    /// Seconds without any progress after which a stage that fetches or loads its slice is taken for dead.
    pub progress_deadline_s: u32,
}

impl Default for SchedulingConfig {
    fn default() -> Self {
        Self {
            max_in_flight: None,
            prefill_chunk: None,
            prefill_chunk_shared: None,
            max_queue: 256,
            admission_deadline_s: 60,
            recovery_deadline_s: 60,
            drain_grace_s: 30,
            progress_deadline_s: 600,
        }
    }
}

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogConfig {
    /// `text` for people, `json` for collectors.
    pub format: LogFormat,
    /// `error`, `warn`, `info`, `debug` or `trace`, or a filter such as `info,splitmodel_link=debug`.
    pub level: String,
}

impl Default for LogConfig {
    fn default() -> Self {
        Self { format: LogFormat::Text, level: "info".into() }
    }
}

/// Shape of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The text is not a configuration: a syntax error, an unknown field, a wrong type.
    #[error("{origin}: not a stage configuration: {message}")]
    Parse {
        /// File name, or `yaml` or `json`.
        origin: String,
        /// What the parser says, with line and column where it knows them.
        message: String,
    },
    /// A field has a value that cannot be meant.
    #[error("{field}: {message}")]
    Invalid {
        /// Path of the field, such as `link.downstream`.
        field: &'static str,
        /// What is wrong and what would be right.
        message: String,
    },
    /// The configuration cannot be written as text.
    #[error("the configuration cannot be written as text: {0}")]
    Encode(String),
}

impl StageConfig {
    /// Reads, parses and validates a file: JSON if its name ends in `.json`, else YAML.
    ///
    /// # Errors
    /// [`ConfigError`], naming the file or the field.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        let origin = path.display().to_string();
        let config = if path.extension().is_some_and(|e| e == "json") {
            serde_json::from_str(&text).map_err(|e| ConfigError::Parse { origin, message: e.to_string() })?
        } else {
            parse_yaml(&text, origin)?
        };
        Self::validated(config)
    }

    /// Parses and validates YAML.
    ///
    /// # Errors
    /// [`ConfigError::Parse`] or [`ConfigError::Invalid`].
    pub fn from_yaml(text: &str) -> Result<Self, ConfigError> {
        Self::validated(parse_yaml(text, "yaml".into())?)
    }

    /// Parses and validates JSON.
    ///
    /// # Errors
    /// [`ConfigError::Parse`] or [`ConfigError::Invalid`].
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let config = serde_json::from_str(text)
            .map_err(|e| ConfigError::Parse { origin: "json".into(), message: e.to_string() })?;
        Self::validated(config)
    }

    /// Writes YAML that [`StageConfig::from_yaml`] reads back to the same value.
    ///
    /// # Errors
    /// [`ConfigError::Encode`] when a path is not UTF-8.
    pub fn to_yaml(&self) -> Result<String, ConfigError> {
        serde_saphyr::to_string(self).map_err(|e| ConfigError::Encode(e.to_string()))
    }

    /// Writes JSON that [`StageConfig::from_json`] reads back to the same value.
    ///
    /// # Errors
    /// [`ConfigError::Encode`] when a path is not UTF-8.
    pub fn to_json(&self) -> Result<String, ConfigError> {
        serde_json::to_string_pretty(self).map_err(|e| ConfigError::Encode(e.to_string()))
    }

    /// Whether this stage has the API and the tokens.
    #[must_use]
    pub const fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// Whether this stage has the head and the samplers.
    #[must_use]
    pub const fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// Prompt tokens in a frame when no answer is running.
    #[must_use]
    pub fn prefill_chunk(&self) -> u32 {
        let whole = self.engine.n_ubatch;
        self.scheduling.prefill_chunk.unwrap_or(if self.stages == 1 { whole } else { whole.div_ceil(4) })
    }

    /// Prompt tokens under way at once at most while answers are running.
    #[must_use]
    pub fn prefill_chunk_shared(&self) -> u32 {
        self.scheduling.prefill_chunk_shared.unwrap_or(self.engine.n_ubatch)
    }

    /// Resident prefixes that there is room for: sequences left beside the lanes.
    #[must_use]
    pub fn residents(&self) -> u32 {
        let left = MAX_SEQUENCES.saturating_sub(self.engine.lanes);
        if self.kv_cache.enabled { self.kv_cache.max_entries.min(left) } else { 0 }
    }

    /// Frames in flight at once.
    #[must_use]
    pub fn max_in_flight(&self) -> u32 {
        self.scheduling.max_in_flight.unwrap_or(self.stages)
    }

    fn validated(config: Self) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(config)
    }
}

fn parse_yaml(text: &str, origin: String) -> Result<StageConfig, ConfigError> {
    serde_saphyr::from_str(text).map_err(|e| ConfigError::Parse { origin, message: e.to_string() })
}
