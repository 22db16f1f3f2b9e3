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
    /// Name of what this plan makes; pods that follow it carry it.
    pub revision: String,
    /// Hash of the fields of the spec that the plan and the pods were made from.
    pub spec_hash: String,
    /// What `splitmodel.dev/retry` said when the model's header was read for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<String>,
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
    /// Bytes of the embedding table beside the slice, in host memory; 0 but on stage 0.
    pub embedding_bytes: i64,
    /// Bytes of KV cells and states.
    pub kv_bytes: i64,
    /// Bytes of scratch memory.
    pub compute_bytes: i64,
    /// Bytes left on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub headroom_bytes: Option<i64>,
    /// MiB that each GPU must have by its node's label; absent where the label does not matter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_mib: Option<i64>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(n: &i32) -> bool {
    *n == 0
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
    /// Type of the activations that it sends: f32 or f16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activations: Option<String>,
    /// What it waits for, where it waits for something that is not a stage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
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
    /// Restarts of the container before the first of them; below 0 where its pod was replaced meanwhile.
    #[serde(skip_serializing_if = "is_zero")]
    pub base: i32,
    /// What `splitmodel.dev/retry` said when the stage was given up; absent while it is still tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given_up: Option<String>,
    /// The first fatal lines of its log.
    #[schemars(length(max = 20))]
    pub lines: Vec<String>,
}
