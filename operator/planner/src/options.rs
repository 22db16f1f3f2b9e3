//! What a plan is made for.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use splitmodel_gguf::{ModelFacts, TensorType};

use crate::PlanError;

/// Devices that one plan may choose from.
pub(crate) const MAX_DEVICES: usize = 128;
/// Stages of a chain.
pub(crate) const MAX_STAGES: u32 = 64;
/// Layers of a model.
const MAX_LAYERS: usize = 1024;
/// Sequences that llama.cpp can hold in one context.
const MAX_SEQUENCES: u64 = 256;

/// A place for one stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// Name for messages.
    pub name: String,
    /// Bytes of memory for the stage; absent: not limited.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Speed relative to the other devices (bytes of weights a second, in any unit), above 0.
    #[serde(default = "one")]
    pub speed: f64,
    /// Whether its memory is the host's: stage 0's embedding table then counts against it.
    #[serde(default)]
    pub host: bool,
}

fn one() -> f64 {
    1.0
}

impl Device {
    /// A device of `memory` bytes and speed 1.
    #[must_use]
    pub fn new(name: impl Into<String>, memory: Option<u64>) -> Self {
        Self { name: name.into(), memory, speed: 1.0, host: false }
    }

    /// Bytes that a stage may use when the fraction `headroom` stays free.
    pub(crate) fn usable(&self, headroom: f64) -> Option<u64> {
        self.memory.map(|m| (m as f64 * (1.0 - headroom)) as u64)
    }
}

/// How the layers are distributed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// As few stages as fit.
    #[default]
    Auto,
    /// This many stages.
    Stages(u32),
    /// Exactly these ranges (`first..end`), stage by stage, on the devices in their order.
    Layers(Vec<Range<u32>>),
}

/// What the chain must hold besides weights.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlanOptions {
    /// Distribution of the layers.
    pub layout: Layout,
    /// Sessions at once.
    pub lanes: u32,
    /// Tokens of each session.
    pub context_length: u32,
    /// Prefixes kept resident.
    pub residents: u32,
    /// Tokens of all resident prefixes together.
    pub resident_tokens: u64,
    /// Element type of cached keys.
    pub cache_type_k: TensorType,
    /// Element type of cached values.
    pub cache_type_v: TensorType,
    /// Tokens computed at once.
    pub n_ubatch: u32,
    /// Whether sliding-window layers keep whole caches.
    pub swa_full: bool,
    /// Whether attention scores are never stored.
    pub flash_attn: bool,
    /// Fraction of each device's memory that stays free, in [0, 1).
    pub headroom: f64,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            layout: Layout::Auto,
            lanes: 4,
            context_length: 4096,
            residents: 0,
            resident_tokens: 0,
            cache_type_k: TensorType::F16,
            cache_type_v: TensorType::F16,
            n_ubatch: 512,
            swa_full: false,
            flash_attn: true,
            headroom: 0.1,
        }
    }
}

impl PlanOptions {
    /// Sequences of the context: lanes and residents.
    #[must_use]
    pub fn sequences(&self) -> u64 {
        u64::from(self.lanes) + u64::from(self.residents)
    }

    /// Refuses what has no meaning; `facts` may come from another process.
    pub(crate) fn check(&self, facts: &ModelFacts, devices: &[Device]) -> Result<(), PlanError> {
        let bad = |field: &'static str, reason: String| Err(PlanError::Invalid { field, reason });
        if facts.layers.is_empty() || facts.layers.len() > MAX_LAYERS || facts.layers.len() != facts.n_layers as usize {
            let reason = format!("names {} layers and describes {}", facts.n_layers, facts.layers.len());
            return bad("model", reason);
        }
        if devices.is_empty() || devices.len() > MAX_DEVICES {
            return bad("devices", format!("has {} entries; give 1 to {MAX_DEVICES}", devices.len()));
        }
        if let Some(device) = devices.iter().find(|d| !(d.speed.is_finite() && d.speed > 0.0)) {
            return bad("devices", format!("give {} the speed {}; it must be above 0", device.name, device.speed));
        }
        if self.lanes == 0 {
            return bad("lanes", "is 0; a chain serves at least one session".into());
        }
        if self.sequences() > MAX_SEQUENCES {
            let reason = format!("and residents need {} sequences; llama.cpp holds {MAX_SEQUENCES}", self.sequences());
            return bad("lanes", reason);
        }
        if self.context_length == 0 {
            return bad("context_length", "is 0; a session needs room for tokens".into());
        }
        if self.n_ubatch == 0 {
            return bad("n_ubatch", "is 0; at least one token is computed at once".into());
        }
        if !(0.0..1.0).contains(&self.headroom) {
            return bad("headroom", format!("is {}; give a fraction from 0 to below 1", self.headroom));
        }
        match &self.layout {
            Layout::Stages(n) if *n == 0 || *n > MAX_STAGES => bad("stages", format!("is {n}; give 1 to {MAX_STAGES}")),
            Layout::Layers(ranges) if ranges.is_empty() || ranges.len() > MAX_STAGES as usize => {
                bad("layers", format!("has {} stages; give 1 to {MAX_STAGES}", ranges.len()))
            }
            _ => Ok(()),
        }
    }
}
