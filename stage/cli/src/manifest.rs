//! What a `SplitModel` manifest asks for, in the terms of stages and plans.
use std::io::Read as _;
use std::path::{Path, PathBuf};

use splitmodel_api::{self as api, EngineSpec, SplitModel, SplitModelSpec, WireType};
use splitmodel_control::config::{
    Activations, ApiConfig, CacheType, EngineConfig, FlashAttention, KvCacheConfig, SchedulingConfig, SplitMode,
};
use splitmodel_planner::{Device, Layout};

use crate::error::CliError;

/// Largest manifest worth reading, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// What a manifest asks for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// `metadata.name`.
    pub name: String,
    /// The file that `spec.model.source` means on this machine, absolute.
    pub path: PathBuf,
    /// How the layers are distributed.
    pub layout: Layout,
    /// Name of the model in the API.
    pub model_name: String,
    /// Everything else.
    pub spec: SplitModelSpec,
}

/// Reads and checks the manifest `file`.
///
/// # Errors
/// [`CliError::File`], [`CliError::Manifest`] with every problem, or [`CliError::Model`] for a source that is not on this
/// machine.
pub fn load(file: &Path) -> Result<Wanted, CliError> {
    let length = std::fs::metadata(file).map_err(CliError::file("read", file))?.len();
    let wrong = |message: String| CliError::Manifest { path: file.to_owned(), message };
    if length > MAX_BYTES {
        return Err(wrong(format!("has {length} bytes, too many for a manifest; is this the right file?")));
    }
    // Devices and pipes have no length of their own.
    let mut text = String::new();
    let opened = std::fs::File::open(file).map_err(CliError::file("read", file))?;
    opened.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(CliError::file("read", file))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(wrong(format!(
            "has more than {MAX_BYTES} bytes, too many for a manifest; is this the right file?"
        )));
    }
    let model = SplitModel::from_yaml(&text).map_err(|e| wrong(e.to_string()))?;
    let source = model.source().map_err(|e| wrong(format!("spec.model.source {e}")))?;
    let absolute = std::path::absolute(file).map_err(CliError::file("find", file))?;
    let Some(path) = source.local_path(absolute.parent().unwrap_or(Path::new("/"))) else {
        return Err(CliError::Model {
            model: model.spec.model.source.clone(),
            message: format!(
                "{}:// works in a cluster; here, bring the file and write its path as file://path",
                source.scheme()
            ),
        });
    };
    let spec = &model.spec;
    let layout = match (spec.layers(), spec.stage_count()) {
        (Some(layers), _) => Layout::Layers(layers),
        (None, Some(count)) => Layout::Stages(count),
        (None, None) => Layout::Auto,
    };
    let wanted = Wanted {
        name: model.metadata.name.clone().unwrap_or_default(),
        path,
        layout,
        model_name: model.model_name().to_owned(),
        spec: model.spec,
    };
    wanted.check_equal_ubatch().map_err(wrong)?;
    Ok(wanted)
}

impl Wanted {
    /// Makes it `stages` stages.
    ///
    /// # Errors
    /// [`CliError::Flag`] when the manifest lists another number of them.
    pub fn override_stages(&mut self, stages: u32) -> Result<(), CliError> {
        if let Some(list) = &self.spec.stage_list
            && list.len() != stages as usize
        {
            let message =
                format!("is {stages}, but spec.stageList has {} entries; leave the flag or the list out", list.len());
            return Err(CliError::Flag { flag: "stages", message });
        }
        if !matches!(self.layout, Layout::Layers(_)) {
            self.layout = Layout::Stages(stages);
        }
        Ok(())
    }

    /// The source, as written.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.spec.model.source
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
            ..SchedulingConfig::default()
        }
    }

    /// Reuse of computed prefixes.
    #[must_use]
    pub const fn kv_cache(&self) -> KvCacheConfig {
        let spec = &self.spec.kv_cache;
        KvCacheConfig { enabled: spec.enabled, max_entries: spec.max_entries, min_tokens: spec.min_tokens }
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
    fn check_equal_ubatch(&self) -> Result<(), String> {
        let first = self.engine(0).n_ubatch;
        let stages = self.spec.stage_list.as_ref().map_or(0, Vec::len);
        match (1..stages).find(|index| self.engine(*index).n_ubatch != first) {
            Some(index) => Err(format!(
                "spec.stageList[{index}].engine.nUbatch is {}, but {first} on the first stage; it must be equal on all: put \
                 it into spec.stageDefaults",
                self.engine(index).n_ubatch
            )),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(spec: &str) -> Result<Wanted, CliError> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.yaml");
        let head = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: { name: smol }\nspec:\n";
        std::fs::write(&file, format!("{head}{spec}")).unwrap();
        load(&file)
    }

    #[test]
    fn the_smallest_manifest() {
        let wanted = read("  model: { source: 'file:///models/m.gguf' }\n").unwrap();
        assert_eq!((wanted.name.as_str(), wanted.model_name.as_str()), ("smol", "smol"));
        assert_eq!(wanted.path, Path::new("/models/m.gguf"));
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
        assert!(wanted.path.is_absolute() && wanted.path.ends_with("m.gguf"));
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
    fn what_is_wrong_is_named() {
        let model = "  model: { source: 'file://m.gguf' }\n";
        let unequal = "  stageList: [{}, { engine: { nUbatch: 8 } }]\n";
        let cases = [
            (format!("{model}  paralel: 2\n"), "spec.paralel"),
            (format!("{model}  parallel: 0\n"), "spec.parallel"),
            (format!("{model}{unequal}"), "spec.stageList[1].engine.nUbatch"),
            ("  model: { source: 'hf://a/b/c.gguf' }\n".into(), "hf:// works in a cluster"),
            ("  model: { source: 'm.gguf' }\n".into(), "spec.model.source"),
        ];
        for (spec, words) in cases {
            let text = read(&spec).unwrap_err().to_string();
            assert!(text.contains(words), "{words}: {text}");
        }
    }

    #[test]
    fn the_flag_does_not_contradict_a_list() {
        let model = "  model: { source: 'file://m.gguf' }\n";
        let mut wanted = read(&format!("{model}  stages: 2\n")).unwrap();
        wanted.override_stages(5).unwrap();
        assert_eq!(wanted.layout, Layout::Stages(5));
        let mut wanted = read(&format!("{model}  stageList: [{{}}, {{}}]\n")).unwrap();
        assert!(wanted.override_stages(5).unwrap_err().to_string().starts_with("--stages: is 5"));
        wanted.override_stages(2).unwrap();
    }
}
