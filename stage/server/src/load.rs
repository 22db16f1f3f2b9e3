//! From a configuration to a loaded slice: brings the packages, then loads them on the engine's own thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use splitmodel_cache::{Payload, Settings};
use splitmodel_chain::schedule::{Head, Log, VERSION};
use splitmodel_chain::worker::{Place, Worker};
use splitmodel_control::{Phase, StageConfig, StatusHub};
use splitmodel_engine::{EngineConfig, EngineError, Slice, SliceFiles, Tokenizer};
use splitmodel_fetch::FetchError;
use splitmodel_gguf::cache::{Alive, Cache, Entry};
use splitmodel_gguf::{Model, ModelFacts, Package, SlicePlan};
use splitmodel_sampling::{GrammarFactory, SamplingError};

use crate::heartbeat::Heartbeat;
use crate::kept;
use crate::telemetry::Telemetry;

/// Why a stage cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The way to the model.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// The model or a package.
    #[error(transparent)]
    Gguf(#[from] splitmodel_gguf::Error),
    /// The model is not the one that was planned.
    #[error(
        "model.digest: the plan was made for {want}, {source} has {got}; the file was exchanged: apply the manifest again"
    )]
    Digest {
        /// Digest in the configuration.
        want: String,
        /// Digest of the file.
        got: String,
        /// The file.
        r#source: String,
    },
    /// The layers do not fit the model.
    #[error("n_layers: the configuration says {want}, the model has {got}")]
    Layers {
        /// In the configuration.
        want: u32,
        /// In the model.
        got: u32,
    },
    /// llama.cpp or the tokenizer.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The vocabulary cannot be used for grammars.
    #[error("the vocabulary: {0}")]
    Vocabulary(#[from] SamplingError),
    /// The schedule log.
    #[error("schedule_log: {}: {source}", path.display())]
    Log {
        /// File.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// Packages of a stage, kept on disk while this lives.
pub struct Packages {
    slice: Entry,
    embedding: Option<Entry>,
    tokenizer: Option<Entry>,
    /// Digest of the model.
    pub digest: String,
    /// Chat template, where the model has one.
    pub chat_template: Option<String>,
    /// Width of a row.
    pub n_embd: u32,
    /// Whether every layer keeps all positions and no recurrent state, so that prefixes of any length can be shared.
    pub dense: bool,
}

impl LoadError {
    /// Whether starting again is pointless as long as neither the model nor the configuration is changed.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match self {
            Self::Fetch(e) => e.is_permanent(),
            Self::Gguf(e) => splitmodel_fetch::is_permanent(e),
            Self::Digest { .. } | Self::Layers { .. } | Self::Vocabulary(_) => true,
            Self::Engine(e) => e.is_permanent(),
            Self::Log { .. } => false,
        }
    }
}

/// What a stage needs, of each package something: its entry in the cache, its bytes.
struct Needs<T> {
    slice: T,
    embedding: Option<T>,
    tokenizer: Option<T>,
}

impl<T> Needs<T> {
    /// Takes it one after the other.
    fn of<E>(config: &StageConfig, mut get: impl FnMut(Package) -> Result<T, E>) -> Result<Self, E> {
        let [first, end] = config.layers;
        let slice = get(Package::Stage { first, end })?;
        let embedding = config.is_first().then(|| get(Package::Embedding)).transpose()?;
        let tokenizer = (config.is_first() || config.is_last()).then(|| get(Package::Tokenizer)).transpose()?;
        Ok(Self { slice, embedding, tokenizer })
    }

    fn sum(&self, bytes: impl Fn(&T) -> u64) -> u64 {
        let all = [Some(&self.slice), self.embedding.as_ref(), self.tokenizer.as_ref()];
        all.into_iter().flatten().map(bytes).sum()
    }
}

/// Brings the packages of a stage into its cache; only its own bytes are read. Blocks.
///
/// # Errors
/// [`LoadError`].
pub fn fetch(config: &StageConfig, status: &StatusHub, alive: &Alive) -> Result<Packages, LoadError> {
    status.set_phase(Phase::Fetching);
    let limit = if config.cache.max_bytes == 0 { u64::MAX } else { config.cache.max_bytes };
    let cache = Cache::open(&config.cache.dir, limit)?.with_alive(alive.clone());
    if let Some((entries, facts)) = kept(config, &cache) {
        let tokenizer = entries.tokenizer.as_ref().map(|e| Model::open(e.path())?.tokenizer()).transpose()?;
        let bytes = entries.sum(|e| e.record().bytes);
        status.update(|s| (s.fetched_bytes, s.total_bytes) = (bytes, bytes));
        return Packages::new(config, &facts, entries, tokenizer.and_then(|t| t.chat_template));
    }
    let source = &config.model.source;
    let credentials = config.model.credentials.clone();
    let options = splitmodel_fetch::Options { credentials, alive: alive.clone(), ..Default::default() };
    let model = splitmodel_fetch::open(source, &options)?;
    if let Some(want) = &config.model.digest
        && want != model.digest()
    {
        let (want, got) = (want.clone(), model.digest().to_owned());
        return Err(LoadError::Digest { want, got, source: source.clone() });
    }
    let facts = model.facts()?;
    check_layers(config, &facts)?;
    let entries = bring(config, &model, &cache, (status, alive))?;
    Packages::new(config, &facts, entries, model.tokenizer()?.chat_template)
}

/// The packages from the cache, or into it.
fn bring(
    config: &StageConfig,
    model: &Model,
    cache: &Cache,
    (status, alive): (&StatusHub, &Alive),
) -> Result<Needs<Entry>, LoadError> {
    let plans = Needs::of(config, |package| SlicePlan::new(model, package))?;
    let total = plans.sum(SlicePlan::total_bytes);
    let mut before = 0;
    Needs::of(config, |package| {
        let show = |done| status.update(|s| (s.fetched_bytes, s.total_bytes) = (before + done, total));
        let entry = cache.get(model, package, &mut |done, _| {
            alive();
            show(done);
        })?;
        show(entry.record().bytes);
        before += entry.record().bytes;
        Ok(entry)
    })
}

/// The packages of a remote model whose digest is known, where all are on disk: a stage that starts again asks nobody.
fn kept(config: &StageConfig, cache: &Cache) -> Option<(Needs<Entry>, ModelFacts)> {
    let digest = config.model.digest.as_ref().filter(|_| splitmodel_fetch::is_remote(&config.model.source))?;
    // What is not as it should be is written again.
    let entries = Needs::of(config, |package| cache.find(digest, package).ok().flatten().ok_or(())).ok()?;
    let facts = ModelFacts::from_compact(entries.slice.record().facts.as_deref()?).ok()?;
    Some((entries, facts))
}

fn check_layers(config: &StageConfig, facts: &ModelFacts) -> Result<(), LoadError> {
    if facts.n_layers == config.n_layers {
        return Ok(());
    }
    Err(LoadError::Layers { want: config.n_layers, got: facts.n_layers })
}

impl Packages {
    fn new(
        config: &StageConfig,
        facts: &ModelFacts,
        entries: Needs<Entry>,
        chat_template: Option<String>,
    ) -> Result<Self, LoadError> {
        check_layers(config, facts)?;
        let Needs { slice, embedding, tokenizer } = entries;
        // Saved sequences hold the last window only of such layers, also where the cache holds all (`swa_full`).
        let dense = !facts.layers.iter().any(|l| l.recurrent || l.window.is_some());
        let (digest, n_embd) = (facts.digest.clone(), facts.n_embd);
        Ok(Self { slice, embedding, tokenizer, digest, chat_template, n_embd, dense })
    }
}

/// The vocabulary, as tokenizer and as the bytes of every token.
pub struct Vocabulary {
    /// For text.
    pub tokenizer: Arc<Tokenizer>,
    /// For grammars.
    pub grammars: GrammarFactory,
}

/// Loads the vocabulary of a stage that has one (the first and the last).
///
/// # Errors
/// [`LoadError`].
pub fn vocabulary(packages: &Packages) -> Result<Option<Vocabulary>, LoadError> {
    packages.tokenizer.as_ref().map(|entry| vocabulary_of(entry.path())).transpose()
}

/// Loads the vocabulary of a GGUF file.
///
/// # Errors
/// [`LoadError`].
pub fn vocabulary_of(path: &Path) -> Result<Vocabulary, LoadError> {
    let tokenizer = Tokenizer::load(path)?;
    let ids = 0..i32::try_from(tokenizer.n_vocab()).unwrap_or(i32::MAX);
    let pieces = ids.map(|id| tokenizer.token_bytes(id, false)).collect();
    let grammars = GrammarFactory::new(pieces, tokenizer.eog())?;
    Ok(Vocabulary { tokenizer: Arc::new(tokenizer), grammars })
}

/// What a chain keeps of computed prefixes: copies in host memory, or without such cells in sequences beside the lanes, where a
/// cache can be cut anywhere; else exact states.
#[must_use]
pub fn prefixes(config: &StageConfig, packages: &Packages) -> Settings {
    let c = &config.kv_cache;
    let (payload, entries) = match (packages.dense && !c.full_states, c.enabled && c.max_bytes > 0) {
        (true, true) => (Payload::Copied, c.max_entries),
        (true, false) => (Payload::Resident, config.residents()),
        (false, true) => (Payload::Exact, c.max_entries),
        (false, false) => (Payload::Exact, 0),
    };
    Settings {
        payload,
        max_entries: u16::try_from(entries).unwrap_or(u16::MAX),
        min_tokens: c.min_tokens as usize,
        stride: c.shared_prefix_stride_tokens as usize,
        max_records: c.shared_prefix_record_limit as usize,
        replays: if c.enabled { c.replay_entries as usize } else { 0 },
        // Residents are gone with every formation, at stage 0 as elsewhere.
        activations: payload != Payload::Resident && entries > 0 && c.activation_bytes > 0 && config.stages > 1,
        first_page: 1,
    }
}

/// llama.cpp's options as the stage's configuration says them, with the sequences of `prefixes` added.
#[must_use]
pub fn engine_config(config: &StageConfig, prefixes: &Settings) -> EngineConfig {
    let e = &config.engine;
    // Residents share cells with lanes, and so do lanes that may not all have their whole context at once.
    let residents = if prefixes.payload == Payload::Resident { prefixes.max_entries } else { 0 };
    let unified = e.kv_unified || residents > 0 || e.n_ctx.is_some();
    EngineConfig {
        n_ctx: e.cells(),
        n_batch: e.n_batch.max(e.n_ubatch),
        n_ubatch: e.n_ubatch,
        n_gpu_layers: e.n_gpu_layers,
        devices: e.devices.clone(),
        main_gpu: e.main_gpu,
        split_mode: e.split_mode,
        cache_type_k: e.cache_type_k,
        cache_type_v: e.cache_type_v,
        flash_attn: e.flash_attn,
        mmap: e.mmap,
        mlock: e.mlock,
        swa_full: e.swa_full,
        kv_unified: unified,
        threads: e.threads.unwrap_or(0),
        threads_batch: 0,
        lanes: e.lanes.saturating_add(residents.into()),
        rpc: e.rpc.clone(),
        ..EngineConfig::default()
    }
}

/// Loads the slice and makes its worker. Blocks; to be called on the thread that keeps them.
///
/// # Errors
/// [`LoadError`].
pub fn worker(
    config: &StageConfig,
    packages: &Packages,
    grammars: Option<GrammarFactory>,
    status: &StatusHub,
    (heartbeat, telemetry): (&Heartbeat, &Telemetry),
) -> Result<Worker<Slice>, LoadError> {
    status.set_phase(Phase::Loading);
    let prefixes = prefixes(config, packages);
    let engine = engine_config(config, &prefixes);
    let files = SliceFiles {
        slice: packages.slice.path().to_owned(),
        embedding: packages.embedding.as_ref().map(|e| e.path().to_owned()),
    };
    heartbeat.beat();
    let mut alive = |_| {
        heartbeat.beat();
        true
    };
    let slice = Slice::load(&files, &engine, &mut alive)?;
    let memory = slice.memory().clone();
    status.update(|s| {
        s.memory = Some(splitmodel_control::Memory { weights: memory.weights, kv: memory.kv, compute: memory.compute });
        s.lanes = config.engine.lanes;
    });
    let small = |n: u32| u16::try_from(n).unwrap_or(u16::MAX);
    let place = Place { stage: small(config.stage), stages: small(config.stages) };
    let lanes = config.engine.lanes as usize;
    let mut worker = Worker::new(slice, place, lanes, grammars).with_cache(&prefixes, config.kv_cache.max_bytes);
    if let Some(disk) = kept::open(config, packages, &engine, &prefixes) {
        worker = worker.with_disk(disk);
    }
    if prefixes.activations {
        worker = worker.with_activations(config.kv_cache.activation_bytes);
    }
    if let Some(path) = &config.schedule_log {
        let fail = |source| LoadError::Log { path: path.clone(), source };
        let head = Head {
            version: VERSION,
            model: packages.digest.clone(),
            layers: (config.layers[0], config.layers[1]),
            engine: serde_json::to_value(&engine).map_err(|e| fail(e.into()))?,
        };
        let file = std::fs::File::create(path).map_err(fail)?;
        let log = Log::create(std::io::BufWriter::new(file), &head, false).map_err(fail)?;
        worker.set_sink(Some(Box::new(log)));
    }
    worker.set_observer(telemetry.observer());
    Ok(worker)
}
