//! What a chain is to be.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

use splitmodel_control::StageConfig;
use splitmodel_control::config::{
    Activations, ApiConfig, BindConfig, CacheConfig, CacheType, EngineConfig, FlashAttention, KvCacheConfig,
    LinkConfig, LogConfig, LogFormat, ModelConfig, SchedulingConfig, TelemetryConfig, TlsConfig,
};

use super::models;

/// A chain to be started: change what a test is about.
#[derive(Clone)]
pub struct Plan {
    pub model: PathBuf,
    /// Boundaries of the stages: `[0, 22, 30]` is two stages.
    pub cuts: Vec<u32>,
    pub engine: EngineConfig,
    pub kv_cache: KvCacheConfig,
    pub scheduling: SchedulingConfig,
    pub json_logs: bool,
    /// Whether every stage writes its schedule.
    pub schedule: bool,
    /// Folder of slices; shared by all tests unless one is about fetching.
    pub slices: PathBuf,
    /// Certificates of each stage.
    pub tls: Option<Vec<TlsConfig>>,
    pub peer_deadline_ms: u32,
    /// Environment of the stages.
    pub env: Vec<(&'static str, String)>,
}

impl Plan {
    /// The sample model, cut at `cuts`.
    pub fn sample(cuts: &[u32]) -> Self {
        Self::of(models::sample(), cuts)
    }

    /// A tiny model, cut at `cuts` of 8 layers.
    pub fn tiny(cuts: &[u32]) -> Self {
        Self::of(models::tiny(1), cuts)
    }

    /// The precise setting: F32 everywhere, no flash attention.
    pub fn precise(cuts: &[u32]) -> Self {
        let mut plan = Self::of(models::sample_f32(), cuts);
        plan.engine.flash_attn = FlashAttention::Off;
        plan.engine.cache_type_k = CacheType::F32;
        plan.engine.cache_type_v = CacheType::F32;
        plan
    }

    /// Any model.
    pub fn of(model: PathBuf, cuts: &[u32]) -> Self {
        Self {
            model,
            cuts: cuts.to_vec(),
            engine: EngineConfig {
                context_length: 1024,
                lanes: 4,
                threads: Some(1),
                n_gpu_layers: Some(0),
                ..EngineConfig::default()
            },
            kv_cache: KvCacheConfig::default(),
            scheduling: SchedulingConfig::default(),
            json_logs: false,
            schedule: false,
            slices: models::cache().join("slices"),
            tls: None,
            peer_deadline_ms: 10_000,
            env: Vec::new(),
        }
    }

    pub fn stages(&self) -> usize {
        self.cuts.len() - 1
    }

    /// Configurations of all stages on free ports, with files in `dir`.
    pub fn configs(&self, dir: &Path) -> Vec<StageConfig> {
        let ports = free_ports(5 * self.stages());
        let stages = self.stages();
        let at = |stage: usize, service: usize| ports[5 * stage + service];
        (0..stages)
            .map(|i| StageConfig {
                chain: "e2e".to_owned(),
                stage: i as u32,
                stages: stages as u32,
                layers: [self.cuts[i], self.cuts[i + 1]],
                n_layers: *self.cuts.last().unwrap(),
                model: ModelConfig { source: self.model.display().to_string(), digest: None, credentials: None },
                cache: CacheConfig { dir: self.slices.clone(), max_bytes: 4 << 30 },
                link: LinkConfig {
                    bind: at(i, 0),
                    downstream: (i + 1 < stages).then(|| at(i + 1, 0).to_string()),
                    return_to: (i + 1 == stages && stages > 1).then(|| at(0, 0).to_string()),
                    tls: self.tls.as_ref().map(|t| t[i].clone()),
                    peer_deadline_ms: self.peer_deadline_ms,
                    activations: Activations::F32,
                    ..LinkConfig::default()
                },
                control: BindConfig { bind: at(i, 1) },
                health: BindConfig { bind: at(i, 2) },
                api: (i == 0).then(|| ApiConfig::new(at(0, 3), "e2e".to_owned())),
                engine: self.engine.clone(),
                kv_cache: self.kv_cache.clone(),
                scheduling: self.scheduling.clone(),
                log: LogConfig {
                    format: if self.json_logs { LogFormat::Json } else { LogFormat::Text },
                    level: "info,splitmodel_server=debug".to_owned(),
                },
                telemetry: TelemetryConfig::default(),
                metrics: Some(BindConfig { bind: at(i, 4) }),
                schedule_log: self.schedule.then(|| dir.join(format!("schedule-{i}.jsonl"))),
            })
            .collect()
    }
}

/// Ports that are free on a loopback address which only this chain uses, so that nobody takes them before its stages do.
fn free_ports(count: usize) -> Vec<SocketAddr> {
    static CHAINS: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let ip = Ipv4Addr::new(127, 64 | (high & 63), low, CHAINS.fetch_add(1, Ordering::Relaxed));
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind((IpAddr::V4(ip), 0)).unwrap()).collect();
    listeners.iter().map(|l| l.local_addr().unwrap()).collect()
}
