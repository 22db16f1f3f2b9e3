//! What a stage is and where it runs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;

use k8s_openapi::api::core::v1::Toleration;
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A stage, or what all stages have in common. Every field may be absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct StageSpec {
    /// First and last layer, counted from 0: `0-9`. Either every stage names its layers or none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 11))]
    #[x_kube(validation = Rule::new("self.matches('^(0|[1-9][0-9]{0,4})-(0|[1-9][0-9]{0,4})$')").message("must be the first and the last layer, as in 0-9"))]
    pub layers: Option<LayerRange>,
    /// GPUs; absent: the stage computes on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu: Option<GpuSpec>,
    /// Host memory to request; absent: from the plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
    /// CPU cores to request, as in `4` or `500m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    #[x_kube(validation = Rule::new("self.matches('^[0-9]+(m|[.][0-9]+)?$')").message("must be a number of cores, as in 4, 0.5 or 500m"))]
    pub cpu: Option<String>,
    /// Labels that the node must have.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    #[schemars(extend("maxProperties" = 16, "additionalProperties" = {"type": "string", "maxLength": 63}))]
    #[x_kube(validation = Rule::new("self.all(k, k.matches('^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$') && self[k].matches('^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$'))").message("must be labels: names as in example.org/pool, values of at most 63 letters, digits, '-', '_' and '.'"))]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that the pod tolerates.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    #[schemars(length(max = 32))]
    pub tolerations: Vec<Toleration>,
    /// Runtime class of the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')").message("must be the name of a RuntimeClass"))]
    pub runtime_class_name: Option<String>,
    /// Image of the stage, for unlike GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^[A-Za-z0-9][-A-Za-z0-9._/:@]*$')").message("must be an image, as in registry/name:tag"))]
    pub image: Option<String>,
    /// llama.cpp's settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineSpec>,
}

impl StageSpec {
    /// This stage with what it leaves open taken from `defaults`.
    #[must_use]
    pub fn or(&self, defaults: &Self) -> Self {
        let over = self.clone();
        let base = defaults.clone();
        Self {
            layers: over.layers,
            gpu: over.gpu.or(base.gpu),
            memory: over.memory.or(base.memory),
            cpu: over.cpu.or(base.cpu),
            node_selector: if over.node_selector.is_empty() { base.node_selector } else { over.node_selector },
            tolerations: if over.tolerations.is_empty() { base.tolerations } else { over.tolerations },
            runtime_class_name: over.runtime_class_name.or(base.runtime_class_name),
            image: over.image.or(base.image),
            engine: match (over.engine, base.engine) {
                (Some(over), Some(base)) => Some(over.or(base)),
                (over, base) => over.or(base),
            },
        }
    }
}

/// GPUs of a stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuSpec {
    /// Name of the extended resource, as in `nvidia.com/gpu`.
    #[serde(default = "nvidia")]
    #[schemars(length(min = 1, max = 317))]
    #[x_kube(validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')").message("must be the name of a resource, as in nvidia.com/gpu"))]
    pub resource: String,
    /// How many.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub count: u32,
    /// Memory of each, where nodes do not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Quantity>,
}

fn nvidia() -> String {
    "nvidia.com/gpu".into()
}

fn one() -> u32 {
    1
}

/// Settings of llama.cpp, by its names; absent ones keep the stage's defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.flashAttn) || self.flashAttn != 'off' || !has(self.cacheTypeV) || self.cacheTypeV in ['f32', 'f16', 'bf16']").message("a quantised cacheTypeV needs flash attention").field_path(".cacheTypeV"))]
#[x_kube(validation = Rule::new("!has(self.nBatch) || !has(self.nUbatch) || self.nUbatch <= self.nBatch").message("nUbatch must not be above nBatch").field_path(".nUbatch"))]
pub struct EngineSpec {
    /// Layers of the slice on the GPU; absent: all where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1024))]
    pub n_gpu_layers: Option<u32>,
    /// Devices to use, by ggml's names; one that is missing is an error.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    #[schemars(length(max = 16), inner(length(min = 1, max = 128)))]
    pub devices: Vec<String>,
    /// The device that holds small tensors.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 63))]
    pub main_gpu: Option<u32>,
    /// How a slice is spread over several devices.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_mode: Option<SplitMode>,
    /// Threads of a computation; absent: the cores that the pod may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub threads: Option<u32>,
    /// Tokens accepted in one call.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536))]
    pub n_batch: Option<u32>,
    /// Tokens computed at once; equal on all stages.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536))]
    pub n_ubatch: Option<u32>,
    /// Element type of cached keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_type_k: Option<CacheType>,
    /// Element type of cached values.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_type_v: Option<CacheType>,
    /// Flash attention.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flash_attn: Option<FlashAttention>,
    /// Map the slice into memory instead of reading it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mmap: Option<bool>,
    /// Lock the slice in memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mlock: Option<bool>,
    /// Keep whole caches of sliding-window layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swa_full: Option<bool>,
}

impl EngineSpec {
    fn or(self, base: Self) -> Self {
        Self {
            n_gpu_layers: self.n_gpu_layers.or(base.n_gpu_layers),
            devices: if self.devices.is_empty() { base.devices } else { self.devices },
            main_gpu: self.main_gpu.or(base.main_gpu),
            split_mode: self.split_mode.or(base.split_mode),
            threads: self.threads.or(base.threads),
            n_batch: self.n_batch.or(base.n_batch),
            n_ubatch: self.n_ubatch.or(base.n_ubatch),
            cache_type_k: self.cache_type_k.or(base.cache_type_k),
            cache_type_v: self.cache_type_v.or(base.cache_type_v),
            flash_attn: self.flash_attn.or(base.flash_attn),
            mmap: self.mmap.or(base.mmap),
            mlock: self.mlock.or(base.mlock),
            swa_full: self.swa_full.or(base.swa_full),
        }
    }
}

/// How a slice is spread over several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "a doc comment on a variant makes the schema no plain enum")]
pub enum SplitMode {
    None,
    Layer,
    Row,
}

/// Whether flash attention is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "as above")]
pub enum FlashAttention {
    Auto,
    On,
    Off,
}

/// Element type of a KV cache, by ggml's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "as above")]
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
    /// Whether elements are stored in quantised blocks.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }
}

/// Layers as `first-last`, both included. Any text is kept; [`LayerRange::range`] parses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
#[schemars(inline)]
pub struct LayerRange(pub String);

impl LayerRange {
    /// The layers `first..end`; `None` where the text is no range or runs backwards.
    #[must_use]
    pub fn range(&self) -> Option<Range<u32>> {
        let number = |text: &str| {
            let plain = text == "0" || !text.starts_with('0');
            let digits = !text.is_empty() && text.len() <= 5 && text.bytes().all(|b| b.is_ascii_digit());
            (plain && digits).then(|| u32::from_str(text).ok()).flatten()
        };
        let (first, last) = self.0.split_once('-')?;
        let (first, last) = (number(first)?, number(last)?);
        (first <= last).then_some(first..last + 1)
    }
}

/// Bytes as Kubernetes writes them: `80Gi`, `500M`. Any text is kept; [`Quantity::bytes`] parses it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Quantity(pub String);

impl Quantity {
    /// The number of bytes, parts rounded up, at most 2⁶³ − 1; `None` where the text is no quantity above 0.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        let split = self.0.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(self.0.len());
        let (number, unit) = self.0.split_at(split);
        let factor: u64 = match unit {
            "" => 1,
            "k" => 1000,
            "M" => 1000_u64.pow(2),
            "G" => 1000_u64.pow(3),
            "T" => 1000_u64.pow(4),
            "P" => 1000_u64.pow(5),
            "Ki" => 1 << 10,
            "Mi" => 1 << 20,
            "Gi" => 1 << 30,
            "Ti" => 1 << 40,
            "Pi" => 1 << 50,
            _ => return None,
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |t: &str| !t.is_empty() && t.len() <= 15 && t.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(fraction) {
            return None;
        }
        let whole = whole.parse::<u64>().ok()?.saturating_mul(factor);
        let fraction = (format!("0.{fraction}").parse::<f64>().ok()? * factor as f64).ceil();
        Some(whole.saturating_add(fraction as u64).min(i64::MAX as u64)).filter(|b| *b > 0)
    }
}

impl JsonSchema for Quantity {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Quantity".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "type": "string",
            "maxLength": 34,
            "x-kubernetes-validations": [{
                "rule": "self.matches('^[0-9]{1,15}([.][0-9]{1,15})?([kMGTP]|[KMGTP]i)?$') && self.matches('[1-9]')",
                "message": "must be bytes above 0, as in 80Gi or 500M",
            }],
        })
    }
}
