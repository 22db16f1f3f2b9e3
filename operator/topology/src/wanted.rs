//! What a SplitModel asks for, in the terms of stages and plans.

use std::path::PathBuf;

use splitmodel_api::{self as api, EngineSpec, Problem, Quantity, SplitModel, SplitModelSpec, WireType};
use splitmodel_control::config::{
    Activations, ApiConfig, CacheType, EngineConfig, FlashAttention, KvCacheConfig, SchedulingConfig, SplitMode,
};
use splitmodel_gguf::TensorType;
use splitmodel_planner::{Device, Layout, PlanOptions};

/// What a SplitModel asks for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// `metadata.name`.
    pub name: String,
    /// How the layers are distributed.
    pub layout: Layout,
    /// Name of the model in the API.
    pub model_name: String,
    /// Everything else.
    pub spec: SplitModelSpec,
}

impl Wanted {
    /// What `model` asks for.
    ///
    /// # Errors
    /// A [`Problem`] that the rules of the API do not find.
    pub fn new(model: &SplitModel) -> Result<Self, Problem> {
        let spec = &model.spec;
        let layout = match (spec.layers(), spec.stage_count()) {
            (Some(layers), _) => Layout::Layers(layers),
            (None, Some(count)) => Layout::Stages(count),
            (None, None) => Layout::Auto,
        };
        let wanted = Self {
            name: model.metadata.name.clone().unwrap_or_default(),
            layout,
            model_name: model.model_name().to_owned(),
            spec: spec.clone(),
        };
        wanted.check_equal_ubatch()?;
        Ok(wanted)
    }

    /// What the plan must hold besides weights.
    #[must_use]
    pub fn options(&self) -> PlanOptions {
        let engine = self.engine(0);
        PlanOptions {
            layout: self.layout.clone(),
            lanes: engine.lanes,
            context_length: engine.context_length,
            cache_type_k: tensor_type(engine.cache_type_k),
            cache_type_v: tensor_type(engine.cache_type_v),
            n_ubatch: engine.n_ubatch,
            swa_full: engine.swa_full,
            flash_attn: engine.flash_attn != FlashAttention::Off,
            ..PlanOptions::default()
        }
    }

    /// Model and context of stage `index`.
    #[must_use]
    pub fn engine(&self, index: usize) -> EngineConfig {
        let spec = self.spec.stage(index).engine.unwrap_or_default();
        let config = EngineConfig {
            context_length: self.spec.context_length,
            lanes: self.spec.parallel,
            ..EngineConfig::default()
        };
        engine(spec, config)
    }

    /// Deadlines and batching.
    #[must_use]
    pub fn scheduling(&self) -> SchedulingConfig {
        let deadlines = &self.spec.deadlines;
        SchedulingConfig {
            admission_deadline_s: deadlines.admission_seconds,
            recovery_deadline_s: deadlines.recovery_seconds,
            drain_grace_s: deadlines.drain_seconds,
            progress_deadline_s: deadlines.progress_seconds,
            ..SchedulingConfig::default()
        }
    }

    /// Reuse of computed prefixes.
    #[must_use]
    pub fn kv_cache(&self) -> KvCacheConfig {
        let spec = &self.spec.kv_cache;
        KvCacheConfig {
            enabled: spec.enabled,
            max_entries: spec.max_entries,
            min_tokens: spec.min_tokens,
            // Other texts were refused.
            max_bytes: spec.max_bytes.bytes().unwrap_or(0),
            disk_bytes: spec.disk_bytes.as_ref().and_then(Quantity::bytes).unwrap_or(0),
            activation_bytes: spec.activation_bytes.as_ref().and_then(Quantity::bytes).unwrap_or(0),
            shared_prefix_stride_tokens: spec.shared_prefix_stride_tokens,
            shared_prefix_record_limit: spec.shared_prefix_record_limit,
            full_states: false,
            replay_entries: spec.replay_entries,
        }
    }

    /// Names of the API at `bind`, with keys from `api_key_file`.
    #[must_use]
    pub fn api(&self, bind: std::net::SocketAddr, api_key_file: Option<PathBuf>) -> ApiConfig {
        ApiConfig {
            aliases: self.spec.model_aliases.clone(),
            api_key_file,
            ..ApiConfig::new(bind, self.model_name.clone())
        }
    }

    /// Type of activations between stages.
    #[must_use]
    pub const fn activations(&self) -> Activations {
        match self.spec.wire_type {
            WireType::F32 => Activations::F32,
            WireType::F16 => Activations::F16,
        }
    }

    /// The GPUs of the stages, if the manifest says how large each of them is.
    #[must_use]
    pub fn devices(&self) -> Option<Vec<Device>> {
        let count = self.spec.stage_count()? as usize;
        (0..count)
            .map(|index| {
                let gpu = self.spec.stage(index).gpu?;
                let memory = gpu.memory?.bytes()?.checked_mul(gpu.count.into())?;
                Some(Device::new(format!("{} {index}", gpu.resource), Some(memory)))
            })
            .collect()
    }

    /// A frame is one computation on every stage, so all must take as many rows.
    fn check_equal_ubatch(&self) -> Result<(), Problem> {
        let first = self.engine(0).n_ubatch;
        let stages = self.spec.stage_list.as_ref().map_or(0, Vec::len);
        match (1..stages).find(|index| self.engine(*index).n_ubatch != first) {
            Some(index) => Err(Problem {
                path: format!("spec.stageList[{index}].engine.nUbatch"),
                message: format!(
                    "is {}, but {first} on the first stage; it must be equal on all: put it into spec.stageDefaults",
                    self.engine(index).n_ubatch
                ),
            }),
            None => Ok(()),
        }
    }
}

fn engine(spec: EngineSpec, default: EngineConfig) -> EngineConfig {
    let n_ubatch = spec.n_ubatch.unwrap_or_else(|| default.n_ubatch.min(spec.n_batch.unwrap_or(u32::MAX)));
    EngineConfig {
        n_gpu_layers: spec.n_gpu_layers,
        devices: spec.devices,
        main_gpu: spec.main_gpu.unwrap_or(default.main_gpu),
        split_mode: spec.split_mode.map_or(default.split_mode, split_mode),
        threads: spec.threads,
        n_batch: spec.n_batch.unwrap_or_else(|| default.n_batch.max(n_ubatch)),
        n_ubatch,
        cache_type_k: spec.cache_type_k.map_or(default.cache_type_k, cache_type),
        cache_type_v: spec.cache_type_v.map_or(default.cache_type_v, cache_type),
        flash_attn: spec.flash_attn.map_or(default.flash_attn, flash_attention),
        mmap: spec.mmap.unwrap_or(default.mmap),
        mlock: spec.mlock.unwrap_or(default.mlock),
        swa_full: spec.swa_full.unwrap_or(default.swa_full),
        ..default
    }
}

const fn split_mode(mode: api::SplitMode) -> SplitMode {
    match mode {
        api::SplitMode::None => SplitMode::None,
        api::SplitMode::Layer => SplitMode::Layer,
        api::SplitMode::Row => SplitMode::Row,
    }
}

const fn flash_attention(flash: api::FlashAttention) -> FlashAttention {
    match flash {
        api::FlashAttention::Auto => FlashAttention::Auto,
        api::FlashAttention::On => FlashAttention::On,
        api::FlashAttention::Off => FlashAttention::Off,
    }
}

const fn cache_type(cache: api::CacheType) -> CacheType {
    match cache {
        api::CacheType::F32 => CacheType::F32,
        api::CacheType::F16 => CacheType::F16,
        api::CacheType::Bf16 => CacheType::Bf16,
        api::CacheType::Q8_0 => CacheType::Q8_0,
        api::CacheType::Q5_1 => CacheType::Q5_1,
        api::CacheType::Q5_0 => CacheType::Q5_0,
        api::CacheType::Q4_1 => CacheType::Q4_1,
        api::CacheType::Q4_0 => CacheType::Q4_0,
        api::CacheType::Iq4Nl => CacheType::Iq4Nl,
    }
}

const fn tensor_type(cache: CacheType) -> TensorType {
    match cache {
        CacheType::F32 => TensorType::F32,
        CacheType::F16 => TensorType::F16,
        CacheType::Bf16 => TensorType::BF16,
        CacheType::Q8_0 => TensorType::Q8_0,
        CacheType::Q5_1 => TensorType::Q5_1,
        CacheType::Q5_0 => TensorType::Q5_0,
        CacheType::Q4_1 => TensorType::Q4_1,
        CacheType::Q4_0 => TensorType::Q4_0,
        CacheType::Iq4Nl => TensorType::IQ4_NL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &str) -> Result<Wanted, Problem> {
        let head = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: { name: smol }\nspec:\n";
        Wanted::new(&SplitModel::from_yaml(&format!("{head}{spec}")).unwrap())
    }

    #[test]
    fn the_smallest_manifest() {
        let wanted = read("  model: { source: 'file:///models/m.gguf' }\n").unwrap();
        assert_eq!((wanted.name.as_str(), wanted.model_name.as_str()), ("smol", "smol"));
        assert_eq!(wanted.layout, Layout::Auto);
        assert_eq!(wanted.engine(0), EngineConfig::default());
        assert_eq!(wanted.devices(), None);
    }

    #[test]
    fn each_stage_gets_its_settings_over_the_defaults() {
        let wanted = read(
            "  model: { source: 'file://m.gguf' }
  modelName: Smol
  modelAliases: [s]
  parallel: 2
  contextLength: 100
  wireType: f16
  deadlines: { recoverySeconds: 5 }
  stageDefaults:
    gpu: { memory: 8Gi, count: 2 }
    engine: { nUbatch: 32, cacheTypeV: q8_0, flashAttn: 'on', splitMode: row, mmap: false }
  stageList:
  - { layers: 0-9, engine: { devices: [CUDA0], cacheTypeV: f32 } }
  - { layers: 10-29, gpu: { memory: 80G }, engine: { threads: 3 } }
",
        )
        .unwrap();
        assert_eq!(wanted.layout, Layout::Layers(vec![0..10, 10..30]));
        assert_eq!(wanted.activations(), Activations::F16);
        let (a, b) = (wanted.engine(0), wanted.engine(1));
        assert_eq!((a.cache_type_v, b.cache_type_v), (CacheType::F32, CacheType::Q8_0));
        assert_eq!((a.devices.as_slice(), b.threads), (["CUDA0".to_owned()].as_slice(), Some(3)));
        for e in [a, b] {
            assert_eq!((e.context_length, e.lanes, e.n_ubatch, e.n_batch), (100, 2, 32, 2048));
            assert_eq!((e.flash_attn, e.split_mode, e.mmap), (FlashAttention::On, SplitMode::Row, false));
        }
        let scheduling = wanted.scheduling();
        assert_eq!((scheduling.prefill_chunk, scheduling.prefill_chunk_shared), (None, None));
        assert_eq!((scheduling.recovery_deadline_s, scheduling.drain_grace_s), (5, 30));
        let memory: Vec<Option<u64>> = wanted.devices().unwrap().iter().map(|d| d.memory).collect();
        assert_eq!(memory, [Some(16 << 30), Some(80_000_000_000)]);
        let api = wanted.api("127.0.0.1:1".parse().unwrap(), None);
        assert_eq!((api.model.as_str(), api.aliases.as_slice()), ("Smol", ["s".to_owned()].as_slice()));
    }

    #[test]
    fn stages_that_take_unequal_rows_are_refused() {
        let unequal = "  model: { source: 'file://m.gguf' }\n  stageList: [{}, { engine: { nUbatch: 8 } }]\n";
        assert_eq!(read(unequal).unwrap_err().path, "spec.stageList[1].engine.nUbatch");
    }
}
