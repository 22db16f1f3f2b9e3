//! The SplitModel resource: types, defaults, validation rules and CRD generation. No I/O.
//!
//! One manifest serves the cluster and local runs. [`SplitModel::from_yaml`] reads it as strictly as the API server with
//! `--validate=strict`; [`SplitModel::validate`] applies the rules that the CRD carries as CEL. The API server cannot check
//! a field that is a number or a list, so `stages` is the number and `stageList` the list.

mod crd;
mod manifest;
mod reference;
mod schema;
mod source;
mod spec;
mod stage;
mod status;
mod validate;

pub use crd::{crd, crd_template, crd_yaml};
pub use manifest::{ManifestError, Problem};
pub use reference::crd_reference;
pub use source::{ModelSource, SourceError};
pub use spec::{
    ApiSpec, CacheVolume, Deadlines, EnvVar, KvCacheSpec, ModelSpec, PodSpec, ServiceType, SessionAffinity, SplitModel,
    SplitModelSpec, WireType,
};
pub use stage::{CacheType, EngineSpec, FlashAttention, GpuSpec, LayerRange, Quantity, SplitMode, StageSpec};
pub use status::{ChainStatus, Failure, Phase, PlanStatus, PlannedStage, SplitModelStatus, StageStatus};

/// API group.
pub const GROUP: &str = "splitmodel.dev";
/// API version.
pub const VERSION: &str = "v1alpha1";
/// Longest name of a SplitModel: names of its children and their labels must stay within Kubernetes' 63 characters.
pub const MAX_NAME: usize = 40;
/// Most stages of a chain.
pub const MAX_STAGES: usize = 64;
