use serde::{Deserialize, Serialize};

/// Options of the llama.cpp model and context; names and meaning are llama.cpp's unless said otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Tokens one session may have, prompt and answer together. Equal on all stages.
    pub context_length: u32,
    /// Sessions at once; each holds a lane (a KV sequence). Equal on all stages.
    pub lanes: u32,
    /// Cells of the KV cache. Absent: `context_length × lanes`. Equal on all stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_ctx: Option<u32>,
    /// Rows one call may have, at least `n_ubatch`.
    pub n_batch: u32,
    /// Rows of one computation: the most rows of a frame. Equal on all stages.
    pub n_ubatch: u32,
    /// Layers of the slice to put on devices. Absent: all of them where there is a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_gpu_layers: Option<u32>,
    /// Devices by llama.cpp's names, such as `CUDA0`; a name that is not there is an error. Empty: llama.cpp chooses.
    pub devices: Vec<String>,
    /// Index into the devices of the one that is used with `split_mode: none`.
    pub main_gpu: u32,
    /// How the slice is spread over several devices.
    pub split_mode: SplitMode,
    /// Type of the K cache.
    pub cache_type_k: CacheType,
    /// Type of the V cache; a quantised one needs flash attention.
    pub cache_type_v: CacheType,
    /// Flash attention.
    pub flash_attn: FlashAttention,
    /// Map the slice into memory instead of reading it.
    pub mmap: bool,
    /// Lock the slice in memory.
    pub mlock: bool,
    /// One KV buffer for all lanes: a row then passes over the cells of all of them. Models with recurrent layers, prefixes in the
    /// cache (`kv_cache.max_bytes: 0`) and `n_ctx` have it always.
    pub kv_unified: bool,
    /// Keep whole caches of sliding-window layers instead of the window only.
    pub swa_full: bool,
    /// Threads of a computation. Absent: the cores of this machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u32>,
    /// ggml-RPC servers, `host:port`, to be used as devices.
    pub rpc: Vec<String>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            context_length: 4096,
            lanes: 4,
            n_ctx: None,
            n_batch: 2048,
            n_ubatch: 512,
            n_gpu_layers: None,
            devices: Vec::new(),
            main_gpu: 0,
            split_mode: SplitMode::Layer,
            cache_type_k: CacheType::F16,
            cache_type_v: CacheType::F16,
            flash_attn: FlashAttention::Auto,
            mmap: true,
            mlock: false,
            kv_unified: false,
            swa_full: false,
            threads: None,
            rpc: Vec::new(),
        }
    }
}

impl EngineConfig {
    /// Cells of the KV cache: `n_ctx`, or `context_length × lanes`, saturating.
    #[must_use]
    pub fn cells(&self) -> u32 {
        self.n_ctx.unwrap_or_else(|| self.context_length.saturating_mul(self.lanes))
    }
}

/// How a slice is spread over several devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SplitMode {
    /// One device, `main_gpu`.
    None,
    /// Whole layers.
    #[default]
    Layer,
    /// Rows of matrices.
    Row,
}

/// Element type of a KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "ggml's types, by ggml's names")]
pub enum CacheType {
    F32,
    F16,
    Bf16,
    #[serde(rename = "q8_0")]
    Q8_0,
    #[serde(rename = "q5_1")]
    Q5_1,
    #[serde(rename = "q5_0")]
    Q5_0,
    #[serde(rename = "q4_1")]
    Q4_1,
    #[serde(rename = "q4_0")]
    Q4_0,
    #[serde(rename = "iq4_nl")]
    Iq4Nl,
}

impl CacheType {
    /// Whether values are stored in quantised blocks.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// ggml's name, as in the file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q5_1 => "q5_1",
            Self::Q5_0 => "q5_0",
            Self::Q4_1 => "q4_1",
            Self::Q4_0 => "q4_0",
            Self::Iq4Nl => "iq4_nl",
        }
    }
}

/// Whether flash attention is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FlashAttention {
    /// llama.cpp decides by device.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}
