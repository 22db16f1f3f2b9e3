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
}

impl Default for KvCacheConfig {
    fn default() -> Self {
        Self { enabled: true, max_entries: 8, min_tokens: 64 }
    }
}
