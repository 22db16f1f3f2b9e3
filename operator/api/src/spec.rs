//! What the user asks for.

use std::collections::BTreeMap;
use std::ops::Range;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LayerRange, Quantity, SplitModelStatus, StageSpec};

/// A model served by chains of stages.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "splitmodel.dev",
    version = "v1alpha1",
    kind = "SplitModel",
    namespaced,
    shortname = "sm",
    status = "SplitModelStatus",
    derive = "PartialEq",
    doc = "A language model cut into stages that together serve one OpenAI-compatible API.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.ready"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Layers", type_ = "string", json_path = ".status.layers"),
    printcolumn(name = "URL", type_ = "string", json_path = ".status.url"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("size(self.metadata.name) <= 40").message("metadata.name must have at most 40 characters: the names of its stages are longer"),
    validation = Rule::new("self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("metadata.name must start with a letter and have lower-case letters, digits and '-' only: a Service gets it"),
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.stages) || !has(self.stageList) || self.stages == size(self.stageList)").message("stages and the number of entries of stageList must be equal; leave one of them out").field_path(".stages"))]
pub struct SplitModelSpec {
    /// The model.
    pub model: ModelSpec,
    /// Number of stages; absent: as few as fit on the devices, or the length of stageList.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub stages: Option<u32>,
    /// The stages one by one, each with what differs from stageDefaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("self.all(s, has(s.layers)) || !self.exists(s, has(s.layers))").message("either every stage names its layers or none does"))]
    #[x_kube(validation = Rule::new("!self.all(s, has(s.layers) && s.layers.matches('^[0-9]{1,5}-[0-9]{1,5}$')) || (self.all(s, int(s.layers.split('-')[0]) <= int(s.layers.split('-')[1])) && [0] + self.map(s, int(s.layers.split('-')[1]) + 1) == self.map(s, int(s.layers.split('-')[0])) + [int(self[size(self) - 1].layers.split('-')[1]) + 1])").message("the layers of the stages must start at 0 and follow each other without gap or overlap"))]
    pub stage_list: Option<Vec<StageSpec>>,
    /// What all stages have in common.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("!has(self.layers)").message("layers belong into stageList").field_path(".layers"))]
    pub stage_defaults: Option<StageSpec>,
    /// Tokens of each session.
    #[serde(default = "context_length")]
    #[schemars(range(min = 1, max = 16_777_216))]
    pub context_length: u32,
    /// Sessions at once, per chain.
    #[serde(default = "parallel")]
    #[schemars(range(min = 1, max = 128))]
    pub parallel: u32,
    /// Chains.
    #[serde(default = "replicas")]
    #[schemars(range(min = 0, max = 100))]
    pub replicas: u32,
    /// Name of the model in the API; absent: the name of this object.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = Rule::new(r"!self.matches('[\\p{Cc}]')").message("must not contain control characters"))]
    pub model_name: Option<String>,
    /// Further names under which the API serves it.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    #[schemars(length(max = 32), inner(length(min = 1, max = 128)))]
    #[x_kube(validation = Rule::new(r"!self.exists(a, a.matches('[\\p{Cc}]'))").message("must not contain control characters"))]
    pub model_aliases: Vec<String>,
    /// Image of the stages; absent: the operator's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9][-A-Za-z0-9._/:@]*$')").message("must be an image, as in registry/name:tag"))]
    pub image: Option<String>,
    /// What the pods of all stages get.
    #[serde(default)]
    pub pods: PodSpec,
    /// Where stages keep their slices. It cannot be changed later.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf").message("cacheVolume cannot be changed; make a new SplitModel"))]
    pub cache_volume: CacheVolume,
    /// Reuse of computed prefixes.
    #[serde(default)]
    pub kv_cache: KvCacheSpec,
    /// Type of activations between stages: f32 is bit-exact, f16 halves the bytes.
    #[serde(default)]
    pub wire_type: WireType,
    /// The API that clients use.
    #[serde(default)]
    pub api: ApiSpec,
    /// Whether links between stages are encrypted and authenticated.
    #[serde(default = "yes")]
    pub mtls: bool,
    /// How long things may take.
    #[serde(default)]
    pub deadlines: Deadlines,
}

fn context_length() -> u32 {
    4096
}

fn parallel() -> u32 {
    4
}

fn replicas() -> u32 {
    1
}

fn yes() -> bool {
    true
}

impl SplitModelSpec {
    /// A spec with nothing but a source.
    #[must_use]
    pub fn new(source: impl Into<String>) -> Self {
        Self {
            model: ModelSpec { source: source.into(), credentials_secret: None, ca_config_map: None },
            stages: None,
            stage_list: None,
            stage_defaults: None,
            context_length: context_length(),
            parallel: parallel(),
            replicas: replicas(),
            model_name: None,
            model_aliases: Vec::new(),
            image: None,
            pods: PodSpec::default(),
            cache_volume: CacheVolume::default(),
            kv_cache: KvCacheSpec::default(),
            wire_type: WireType::default(),
            api: ApiSpec::default(),
            mtls: true,
            deadlines: Deadlines::default(),
        }
    }

    /// Number of stages, where the user gave one.
    #[must_use]
    pub fn stage_count(&self) -> Option<u32> {
        let listed = self.stage_list.as_ref().and_then(|l| u32::try_from(l.len()).ok());
        listed.or(self.stages)
    }

    /// Stage `index` with the defaults applied.
    #[must_use]
    pub fn stage(&self, index: usize) -> StageSpec {
        let defaults = self.stage_defaults.clone().unwrap_or_default();
        self.stage_list.as_ref().and_then(|l| l.get(index)).map_or_else(|| defaults.clone(), |s| s.or(&defaults))
    }

    /// The layers of every stage (`first..end`), where the user gave them well.
    #[must_use]
    pub fn layers(&self) -> Option<Vec<Range<u32>>> {
        self.stage_list.as_ref()?.iter().map(|s| s.layers.as_ref().and_then(LayerRange::range)).collect()
    }
}

/// The model to serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelSpec {
    /// hf://owner/repo/file.gguf, https://host/path, pvc://claim/path, oci://image@sha256:digest#path, or file://path for
    /// local runs. Of a sharded model the first shard.
    #[schemars(length(min = 1, max = 2048))]
    #[x_kube(validation = Rule::new(r"self.matches('^(hf|https|pvc|oci|file)://')").message("needs a scheme: hf://owner/repo/file.gguf, https://, pvc://claim/path, oci://image@sha256:…#path or file://"))]
    #[x_kube(validation = Rule::new(r"!self.matches('[\\s\\p{Z}\\p{Cc}]')").message("must not contain spaces or control characters"))]
    #[x_kube(validation = Rule::new(r"!self.startsWith('hf://') || self.matches('^hf://[-A-Za-z0-9_.]+/[-A-Za-z0-9_.]+(@[-A-Za-z0-9_.]+)?(/[^/]+)+$')").message("must look like hf://owner/repo/file.gguf"))]
    #[x_kube(validation = Rule::new(r"!self.startsWith('https://') || self.matches('^https://[-A-Za-z0-9.:\\[\\]]+/.+$')").message("must look like https://host/path/file.gguf, without user or password"))]
    #[x_kube(validation = Rule::new(r"!self.startsWith('pvc://') || self.matches('^pvc://[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?(/[^/]+)+$')").message("must look like pvc://claim/path/file.gguf"))]
    #[x_kube(validation = Rule::new(r"!self.startsWith('oci://') || self.matches('^oci://[-A-Za-z0-9_.:/]+@sha256:[0-9a-f]{64}#[^/]+(/[^/]+)*$')").message("must look like oci://registry/image@sha256:<64 hex digits>#path/file.gguf"))]
    #[x_kube(validation = Rule::new(r"!self.startsWith('file://') || self.matches('^file://[^~](.*[^/])?$') && self != 'file:///'").message("must look like file://path/file.gguf"))]
    #[x_kube(validation = Rule::new(r"self.matches('^(file|https)://') || !self.matches('[/#][.][.]([/#]|$)')").message("must not contain '..' in its path"))]
    pub source: String,
    /// Secret with `token`, or `username` and `password`, for the source.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("must be the name of a Secret"))]
    pub credentials_secret: Option<String>,
    /// ConfigMap with `ca.crt`: authorities (PEM) to trust, in place of the image's own, when the source is read over https.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("must be the name of a ConfigMap"))]
    pub ca_config_map: Option<String>,
}

/// What pods get.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodSpec {
    /// Further labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    #[schemars(extend("maxProperties" = 32, "additionalProperties" = {"type": "string", "maxLength": 63}))]
    #[x_kube(validation = Rule::new("self.all(k, k.matches('^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && self[k].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$'))").message("must be labels: names as in example.org/team, values of at most 63 letters, digits, '-', '_' and '.'"))]
    #[x_kube(validation = Rule::new("self.all(k, !k.startsWith('splitmodel.dev/') && !(k in ['app.kubernetes.io/name', 'app.kubernetes.io/instance', 'app.kubernetes.io/managed-by']))").message("must not have labels that the operator itself sets: splitmodel.dev/… and app.kubernetes.io/name, instance and managed-by"))]
    pub labels: BTreeMap<String, String>,
    /// Further annotations.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    #[schemars(extend("maxProperties" = 32, "additionalProperties" = {"type": "string", "maxLength": 4096}))]
    #[x_kube(validation = Rule::new("self.all(k, k.matches('^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))").message("must have names as in example.org/note"))]
    #[x_kube(validation = Rule::new("self.all(k, !k.startsWith('splitmodel.dev/'))").message("must not have annotations that the operator itself sets: splitmodel.dev/…"))]
    pub annotations: BTreeMap<String, String>,
    /// Further environment variables.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub env: Vec<EnvVar>,
    /// Secrets for pulling images.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    #[schemars(length(max = 16), inner(length(min = 1, max = 253)))]
    #[x_kube(validation = Rule::new("self.all(s, s.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$'))").message("must be names of Secrets"))]
    pub image_pull_secrets: Vec<String>,
    /// Priority class.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("must be the name of a PriorityClass"))]
    pub priority_class_name: Option<String>,
}

/// An environment variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
pub struct EnvVar {
    /// Its name.
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z_][A-Za-z0-9_]*$')").message("must be the name of a variable"))]
    pub name: String,
    /// Its value.
    #[serde(default)]
    #[schemars(length(max = 4096))]
    pub value: String,
}

/// Where a stage keeps its slice.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self.persistent || !has(self.storageClassName)").message("storageClassName needs persistent: true").field_path(".storageClassName"))]
pub struct CacheVolume {
    /// A PersistentVolumeClaim per stage instead of an emptyDir: slices survive the pod.
    #[serde(default)]
    pub persistent: bool,
    /// Size; absent: from the plan.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub size: Option<Quantity>,
    /// Storage class of the claims; absent: the cluster's default.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("must be the name of a StorageClass"))]
    pub storage_class_name: Option<String>,
}

/// Reuse of computed prefixes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct KvCacheSpec {
    /// Whether prefixes are kept.
    pub enabled: bool,
    /// Prefixes kept at most.
    #[schemars(range(max = 127))]
    pub max_entries: u32,
    /// Shortest prefix worth keeping, in tokens.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub min_tokens: u32,
    /// Host memory of each stage for kept prefixes.
    pub max_bytes: Quantity,
    /// Bytes of kept prefixes that each stage keeps on its cache volume, too, for when it starts again; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<Quantity>,
    /// Host memory of stage 0 for activations of kept prefixes, so that it need not compute again what another stage has lost; absent:
    /// none. A token has as many bytes as the model's width, four times.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation_bytes: Option<Quantity>,
    /// Distance of the lengths at which exact states are taken, in tokens.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub shared_prefix_stride_tokens: u32,
    /// Exact states of one prompt at most.
    #[schemars(range(min = 1, max = 127))]
    pub shared_prefix_record_limit: u32,
    /// Deterministic answers of which the first eight tokens are kept for the same request, at most; 0 keeps none.
    #[schemars(range(max = 65_536))]
    pub replay_entries: u32,
}

impl Default for KvCacheSpec {
    fn default() -> Self {
        Self {
            enabled: true,
            max_entries: 8,
            min_tokens: 64,
            max_bytes: Quantity("1Gi".to_owned()),
            disk_bytes: None,
            activation_bytes: None,
            shared_prefix_stride_tokens: 128,
            shared_prefix_record_limit: 2,
            replay_entries: 1024,
        }
    }
}

/// Type of activations between stages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "a doc comment on a variant makes the schema no plain enum")]
pub enum WireType {
    #[default]
    F32,
    F16,
}

/// The API that clients use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiSpec {
    /// Secret whose values are the keys that clients may use; absent: no key is asked for.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("must be the name of a Secret"))]
    pub key_secret: Option<String>,
    /// Type of the Service.
    #[serde(default)]
    pub service_type: ServiceType,
    /// Port of the Service.
    #[serde(default = "port")]
    #[schemars(range(min = 1, max = 65535))]
    pub port: u32,
    /// Whether a client stays with one chain.
    #[serde(default)]
    pub session_affinity: SessionAffinity,
}

fn port() -> u32 {
    8000
}

impl Default for ApiSpec {
    fn default() -> Self {
        Self {
            key_secret: None,
            service_type: ServiceType::default(),
            port: port(),
            session_affinity: SessionAffinity::default(),
        }
    }
}

/// Type of the Service that clients use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "as above")]
pub enum ServiceType {
    #[default]
    ClusterIP,
    NodePort,
    LoadBalancer,
}

/// Whether a client stays with one chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[allow(missing_docs, reason = "as above")]
pub enum SessionAffinity {
    #[default]
    None,
    ClientIP,
}

/// How long things may take, in seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Deadlines {
    /// A request may wait for a free session.
    #[schemars(range(min = 1, max = 86400))]
    pub admission_seconds: u32,
    /// A request may wait for a broken chain to come back.
    #[schemars(range(min = 1, max = 86400))]
    pub recovery_seconds: u32,
    /// Running requests may go on when a stage is told to end.
    #[schemars(range(min = 0, max = 86400))]
    pub drain_seconds: u32,
    /// A stage may make no progress while it fetches or loads.
    #[schemars(range(min = 10, max = 86400))]
    pub progress_seconds: u32,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { admission_seconds: 60, recovery_seconds: 60, drain_seconds: 30, progress_seconds: 600 }
    }
}
