use serde::{Deserialize, Serialize};

/// Reuse of computed prefixes. Equal on all stages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvCacheConfig {
    /// Whether prefixes are kept.
    pub enabled: bool,
    /// Prefixes kept at most.
    pub max_entries: u32,
    /// Shortest prefix worth keeping, in tokens.
    pub min_tokens: u32,
    /// Bytes of prefixes that a stage keeps in host memory at most. With 0, models with full attention only keep them in the KV
    /// cache, where every running session passes over them; others keep none.
    pub max_bytes: u64,
    /// Bytes of prefixes that a stage keeps as files, too, in `prefixes/` of the slices' directory, for when it starts again; 0
    /// keeps none. Not for prefixes in the KV cache.
    pub disk_bytes: u64,
    /// Bytes of activations of prefixes that stage 0 of several keeps in host memory at most, so that it need not compute again what
    /// another stage has lost; 0 keeps none. A token has width × 4 bytes.
    pub activation_bytes: u64,
    /// Distance of the lengths at which exact states are taken, in tokens.
    pub shared_prefix_stride_tokens: u32,
    /// Exact states of one prompt at most.
    pub shared_prefix_record_limit: u32,
    /// For diagnosis: whole states of sequences at recorded lengths also where a cache can be cut anywhere.
    pub full_states: bool,
    /// Deterministic answers of which the first eight tokens are kept for the same request, at most; 0 keeps none.
    pub replay_entries: u32,
}

impl Default for KvCacheConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            max_entries: 8,
            min_tokens: 64,
            max_bytes: 1 << 30,
            disk_bytes: 0,
            activation_bytes: 0,
            shared_prefix_stride_tokens: 128,
            shared_prefix_record_limit: 2,
            full_states: false,
            replay_entries: 1024,
        }
    }
}
