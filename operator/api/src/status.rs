//! What the operator reports.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How far a chain or a stage is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "a doc comment on a variant makes the schema no plain enum")]
pub enum Phase {
    #[default]
    Pending,
    Planned,
    Scheduled,
    Fetching,
    Loading,
    Linked,
    Serving,
    Degraded,
    Failed,
}

/// Status of a SplitModel.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct SplitModelStatus {
    /// Generation of the spec that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The least far of the chains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// Stages that serve, of all: `3/3`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
    /// Layers per stage: `15/14/1`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<String>,
    /// Where clients find the API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Chains that serve.
    pub replicas: i32,
    /// Selects the pods of stage 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// `Planned`, `Progressing`, `Ready`, `Degraded`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The plan that the chains follow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanStatus>,
    /// The chains.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chains: Vec<ChainStatus>,
}

/// A plan, pinned until the spec changes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PlanStatus {
    /// Identity of the model.
    pub model_digest: String,
    /// Image of the stages, as resolved.
    pub image: String,
    /// The stages.
    pub stages: Vec<PlannedStage>,
    /// What the planner has to say.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A stage of the plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PlannedStage {
    /// First and last layer: `0-9`.
    pub layers: String,
    /// Node or kind of node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Bytes of weights.
    pub weight_bytes: i64,
    /// Bytes of KV cells and states.
    pub kv_bytes: i64,
    /// Bytes of scratch memory.
    pub compute_bytes: i64,
    /// Bytes left on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headroom_bytes: Option<i64>,
}

/// One chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ChainStatus {
    /// Number of the chain, from 0.
    pub index: i32,
    /// The least far of its stages.
    pub phase: Phase,
    /// Hash of the topology that it follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Its stages.
    pub stages: Vec<StageStatus>,
}

/// One stage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct StageStatus {
    /// How far it is.
    pub phase: Phase,
    /// First and last layer: `0-9`.
    pub layers: String,
    /// Its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Its node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Bytes of the slice fetched so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<i64>,
    /// Bytes of the slice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<i64>,
    /// Restarts of its container.
    pub restarts: i32,
    /// How it failed last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

/// How a stage failed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Failure {
    /// Exit code of the process.
    pub exit_code: i32,
    /// Times in a row.
    pub count: i32,
    /// The first fatal lines of its log.
    #[schemars(length(max = 20))]
    pub lines: Vec<String>,
}
