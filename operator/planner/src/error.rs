//! Why there is no plan.

use std::fmt;

use crate::{StageBytes, UnusedDevice, plan::human};

/// Why there is no plan, and what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// An option or fact without meaning.
    #[error("{field} {reason}")]
    Invalid {
        /// The option.
        field: &'static str,
        /// What is wrong.
        reason: String,
    },
    /// More stages than devices.
    #[error("{stages} stages need as many devices, but there are {devices}; add devices or ask for fewer stages")]
    NotEnoughDevices {
        /// Stages asked for.
        stages: u32,
        /// Devices given.
        devices: usize,
    },
    /// The model cannot be cut into so many stages.
    #[error("the model cannot be cut into {stages} stages: its {layers} layers and legal cuts allow at most {most}")]
    TooManyStages {
        /// Stages asked for.
        stages: u32,
        /// Layers of the model.
        layers: u32,
        /// Most stages possible; 0 where it cannot be held by one either.
        most: u32,
    },
    /// The ranges given do not cover the layers once each, in order.
    #[error("stage {stage} has layers {}, but must start at {expected_first}{}; layers run from 0 to {}", inclusive(*first, *end), reason, layers - 1)]
    Ranges {
        /// The first stage that is wrong.
        stage: usize,
        /// Its first layer.
        first: u32,
        /// One past its last layer.
        end: u32,
        /// What its first layer must be.
        expected_first: u32,
        /// Anything else that is wrong with it.
        reason: &'static str,
        /// Layers of the model.
        layers: u32,
    },
    /// A cut where the model may not be cut.
    #[error("stage {stage} cannot begin at layer {layer}: {reason}; nearest legal cuts: {}", nearest(*below, *above))]
    IllegalCut {
        /// The stage that would begin there.
        stage: usize,
        /// First layer after the cut.
        layer: u32,
        /// Why not.
        reason: String,
        /// Next legal cut before.
        below: Option<u32>,
        /// Next legal cut after.
        above: Option<u32>,
    },
    /// Legal cuts that are too close to each other.
    #[error("stage {stage}: {reason}")]
    IllegalStage {
        /// The stage.
        stage: usize,
        /// Why not.
        reason: String,
    },
    /// A stage of the user's own ranges cannot even load.
    #[error(
        "stage {stage} (layers {}) cannot load on {device}: its weights are {}, the device has {}; give it fewer layers",
        inclusive(*first, *end), human(*weights), human(*memory)
    )]
    CannotLoad {
        /// The stage.
        stage: usize,
        /// Its first layer.
        first: u32,
        /// One past its last layer.
        end: u32,
        /// Its device.
        device: String,
        /// Bytes of its weights.
        weights: u64,
        /// Bytes of the device.
        memory: u64,
    },
    /// No distribution fits.
    #[error("{0}")]
    DoesNotFit(Box<Shortfall>),
}

/// The stage that misses most memory in the plan that misses least.
#[derive(Debug, Clone, PartialEq)]
pub struct Shortfall {
    /// Stages of that plan.
    pub stages: usize,
    /// The stage that misses most.
    pub stage: usize,
    /// Its first layer.
    pub first: u32,
    /// One past its last layer.
    pub end: u32,
    /// Its device.
    pub device: String,
    /// Bytes it may use there.
    pub usable: u64,
    /// What it needs.
    pub bytes: StageBytes,
    /// Bytes that are missing.
    pub missing: u64,
    /// Devices that hold no stage in that plan.
    pub unused: Vec<UnusedDevice>,
}

impl fmt::Display for Shortfall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let b = &self.bytes;
        write!(
            f,
            "the model does not fit: even in the best of the plans with {} stages, stage {} (layers {}) needs {} on {} \
             (weights {}, KV {}, compute {}) and may use {}: {} are missing; lower contextLength or parallel, or add \
             devices",
            self.stages,
            self.stage,
            inclusive(self.first, self.end),
            human(self.usable.saturating_add(self.missing)),
            self.device,
            human(b.weights),
            human(b.kv),
            human(b.compute),
            human(self.usable),
            human(self.missing),
        )?;
        for unused in &self.unused {
            write!(f, "; {} is not used: {}", unused.device, unused.reason)?;
        }
        Ok(())
    }
}

/// `first..end` as people write it.
pub(crate) fn inclusive(first: u32, end: u32) -> String {
    match end.checked_sub(1) {
        Some(last) if last > first => format!("{first}-{last}"),
        Some(last) if last == first => format!("{first}"),
        _ => format!("{first}..{end} (none)"),
    }
}

fn nearest(below: Option<u32>, above: Option<u32>) -> String {
    match (below, above) {
        (Some(b), Some(a)) => format!("{b} and {a}"),
        (Some(one), None) | (None, Some(one)) => one.to_string(),
        (None, None) => "none, it must stay in one piece".into(),
    }
}
