use serde::{Deserialize, Serialize};
use splitmodel_control::config::{CacheType, FlashAttention, SplitMode};

use crate::EngineError;

/// Sequences llama.cpp can tell apart.
const MAX_LANES: u32 = 256;

/// Options of a llama.cpp model and context. Names and meaning are llama.cpp's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Cells of the KV cache, shared by all lanes.
    pub n_ctx: u32,
    /// Rows one call may have; at least `n_ubatch`.
    pub n_batch: u32,
    /// Rows of one computation: the most rows of a frame.
    pub n_ubatch: u32,
    /// Layers to put on devices. Absent: all of them where there is a device; 0: the CPU. A number above 0 without a
    /// device is an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n_gpu_layers: Option<u32>,
    /// Devices by name, such as `CUDA0`; a name that does not exist is an error. Empty: every GPU.
    pub devices: Vec<String>,
    /// Index into the devices used, of the one that takes all with `split_mode: none`.
    pub main_gpu: u32,
    /// How layers are spread over several devices.
    pub split_mode: SplitMode,
    /// Type of the K cache.
    pub cache_type_k: CacheType,
    /// Type of the V cache; a quantised one needs flash attention.
    pub cache_type_v: CacheType,
    /// Flash attention.
    pub flash_attn: FlashAttention,
    /// Map the file into memory instead of reading it.
    pub mmap: bool,
    /// Lock the weights in memory.
    pub mlock: bool,
    /// Repack weights on the CPU into layouts that are faster there (llama.cpp's `--no-repack` is `false`).
    pub repack: bool,
    /// Keep every cell of sliding-window layers instead of the window only.
    pub swa_full: bool,
    /// One KV buffer for all lanes, which may share cells; each row then passes over the cells of all lanes. `false`: each lane has
    /// `n_ctx` ÷ `lanes` cells of its own. Models with recurrent layers always have one.
    pub kv_unified: bool,
    /// With `kv_unified: false`, so many lanes between two that compute are filled with rows of nothing, so that these compute
    /// together; a wider gap parts them. `None`: 4 on a device, 0 on the processor, where a row costs what a computation does.
    pub widest_gap: Option<u32>,
    /// Threads of a computation of one row; 0: the cores of this machine.
    pub threads: u32,
    /// Threads of a computation of several rows; 0: as `threads`.
    pub threads_batch: u32,
    /// KV sequences (llama.cpp's `n_seq_max`), 1 to 256.
    pub lanes: u32,
    /// ggml-RPC servers, `host:port`, used as devices.
    pub rpc: Vec<String>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            n_ctx: 4096,
            n_batch: 512,
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
            repack: true,
            swa_full: false,
            kv_unified: true,
            widest_gap: None,
            threads: 0,
            threads_batch: 0,
            lanes: 4,
            rpc: Vec::new(),
        }
    }
}

impl EngineConfig {
    /// Checks what can be checked without a model or a device.
    ///
    /// # Errors
    /// [`EngineError::Config`] naming the first field that cannot be used.
    pub fn validate(&self) -> Result<(), EngineError> {
        let in_range = |field, value: u32| {
            if value == 0 || i32::try_from(value).is_err() {
                return Err(EngineError::config(field, format!("is {value}; it must be between 1 and {}", i32::MAX)));
            }
            Ok(())
        };
        in_range("n_ctx", self.n_ctx)?;
        in_range("n_ubatch", self.n_ubatch)?;
        in_range("n_batch", self.n_batch)?;
        if self.n_batch < self.n_ubatch {
            return Err(EngineError::config(
                "n_batch",
                format!("is {}, below `n_ubatch` ({}): a frame must fit one call", self.n_batch, self.n_ubatch),
            ));
        }
        if self.lanes == 0 || self.lanes > MAX_LANES {
            return Err(EngineError::config(
                "lanes",
                format!("is {}; it must be between 1 and {MAX_LANES}", self.lanes),
            ));
        }
        if !self.kv_unified && self.n_ubatch < self.lanes {
            return Err(EngineError::config(
                "n_ubatch",
                format!("is {}, below `lanes` ({}): a row of each must fit one call", self.n_ubatch, self.lanes),
            ));
        }
        if self.cache_type_v.is_quantized() && self.flash_attn == FlashAttention::Off {
            return Err(EngineError::config(
                "cache_type_v",
                format!("{} needs flash attention; set `flash_attn` to on", self.cache_type_v.name()),
            ));
        }
        for (field, threads) in [("threads", self.threads), ("threads_batch", self.threads_batch)] {
            // ggml's limit, GGML_MAX_N_THREADS.
            if threads > 512 {
                return Err(EngineError::config(field, format!("is {threads}; 512 is the most")));
            }
        }
        if self.n_gpu_layers == Some(0) && !(self.devices.is_empty() && self.rpc.is_empty()) {
            return Err(EngineError::config(
                "n_gpu_layers",
                "is 0 although `devices` or `rpc` name devices; leave it out to use them",
            ));
        }
        Ok(())
    }

    /// Threads for one row and for several rows, with the defaults filled in.
    pub(crate) fn thread_counts(&self) -> (u32, u32) {
        let cores =
            || std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(512).min(512));
        let one = if self.threads == 0 { cores() } else { self.threads };
        (one, if self.threads_batch == 0 { one } else { self.threads_batch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut EngineConfig)) -> String {
        let mut config = EngineConfig::default();
        change(&mut config);
        config.validate().expect_err("refused").to_string()
    }

    #[test]
    fn defaults_are_valid_and_survive_serde() {
        let config = EngineConfig::default();
        config.validate().unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<EngineConfig>(&text).unwrap(), config);
        assert_eq!(serde_json::from_str::<EngineConfig>("{}").unwrap(), config);
    }

    #[test]
    fn refusals_name_the_field() {
        assert!(refused(|c| c.n_ctx = 0).contains("`n_ctx`"));
        assert!(refused(|c| c.n_ubatch = u32::MAX).contains("`n_ubatch`"));
        assert!(refused(|c| c.n_batch = 10).contains("`n_batch`"));
        assert!(refused(|c| c.lanes = 257).contains("`lanes`"));
        assert!(refused(|c| c.threads = 513).contains("`threads`"));
        assert!(
            refused(|c| {
                c.cache_type_v = CacheType::Q8_0;
                c.flash_attn = FlashAttention::Off;
            })
            .contains("`cache_type_v`")
        );
        assert!(
            refused(|c| {
                c.n_gpu_layers = Some(0);
                c.devices = vec!["CUDA0".into()];
            })
            .contains("`n_gpu_layers`")
        );
    }

    #[test]
    fn unknown_names_are_refused_with_what_exists() {
        let error = serde_json::from_str::<EngineConfig>(r#"{"cache_type_k":"q3_k"}"#).unwrap_err().to_string();
        assert!(error.contains("q3_k") && error.contains("iq4_nl"), "{error}");
        let error = serde_json::from_str::<EngineConfig>(r#"{"n_gpu_layer":1}"#).unwrap_err().to_string();
        assert!(error.contains("n_gpu_layer"), "{error}");
    }
}
