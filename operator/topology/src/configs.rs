//! One stage configuration per stage of a chain.

use std::net::SocketAddr;
use std::path::PathBuf;

use splitmodel_control::StageConfig;
use splitmodel_control::config::{
    BindConfig, CacheConfig, ConfigError, LinkConfig, LogConfig, ModelConfig, TelemetryConfig, TlsConfig,
};

use crate::Wanted;

/// Where one stage listens, and where the others find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its link listens here.
    pub link: SocketAddr,
    /// `host:port` of its link for the other stages.
    pub address: String,
    /// Its control service listens here.
    pub control: SocketAddr,
    /// Its health service listens here.
    pub health: SocketAddr,
    /// Its metrics are served here.
    pub metrics: SocketAddr,
}

/// What the surroundings of a chain add to its SplitModel: a cluster, or one machine.
#[derive(Clone, Debug)]
pub struct Site {
    /// Name of the chain.
    pub chain: String,
    /// The model, as stages find it.
    pub model: ModelConfig,
    /// Slices.
    pub cache: CacheConfig,
    /// Where the API listens.
    pub api: SocketAddr,
    /// API keys, a file or a directory of files.
    pub api_key_file: Option<PathBuf>,
    /// Certificates of the links.
    pub tls: Option<TlsConfig>,
    /// Whether links may go in plain text beyond this machine.
    pub insecure: bool,
    /// Logs.
    pub log: LogConfig,
    /// The stages.
    pub places: Vec<Place>,
}

/// How the model is cut: layers `[first, end)` of each stage, of so many.
#[derive(Clone, Copy, Debug)]
pub struct Cut<'a> {
    /// Layers of the stages.
    pub stages: &'a [[u32; 2]],
    /// Layers of the model.
    pub n_layers: u32,
}

/// The configurations of all stages.
///
/// # Errors
/// [`ConfigError`] when the SplitModel asks for what no stage can do.
pub fn stage_configs(wanted: &Wanted, cut: Cut<'_>, site: &Site) -> Result<Vec<StageConfig>, ConfigError> {
    let stages = u32::try_from(cut.stages.len()).unwrap_or(u32::MAX);
    let configs = (0..stages).zip(cut.stages).zip(&site.places).map(|((stage, layers), own)| {
        let next = site.places.get(stage as usize + 1);
        let first = site.places.first().filter(|_| stage > 0 && next.is_none());
        let config = StageConfig {
            chain: site.chain.clone(),
            stage,
            stages,
            layers: *layers,
            n_layers: cut.n_layers,
            model: site.model.clone(),
            cache: site.cache.clone(),
            link: LinkConfig {
                bind: own.link,
                downstream: next.map(|p| p.address.clone()),
                return_to: first.map(|p| p.address.clone()),
                tls: site.tls.clone(),
                insecure: site.insecure,
                activations: wanted.activations(),
                ..LinkConfig::default()
            },
            control: BindConfig { bind: own.control },
            health: BindConfig { bind: own.health },
            api: (stage == 0).then(|| wanted.api(site.api, site.api_key_file.clone())),
            kv_cache: wanted.kv_cache(),
            scheduling: wanted.scheduling(),
            engine: wanted.engine(stage as usize),
            log: site.log.clone(),
            telemetry: TelemetryConfig::default(),
            metrics: Some(BindConfig { bind: own.metrics }),
            schedule_log: None,
        };
        config.validate()?;
        Ok(config)
    });
    configs.collect()
}
