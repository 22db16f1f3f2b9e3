//! One stage configuration per stage of a local chain. Pure.
use std::net::SocketAddr;
use std::num::NonZero;
use std::path::PathBuf;

use splitmodel_control::StageConfig;
use splitmodel_control::config::{CacheConfig, LogConfig, ModelConfig};
use splitmodel_topology::{Cut, Place, Site};

use super::ports::StagePorts;
use crate::error::CliError;
use crate::planning::Planned;

/// What a local run adds to the manifest.
#[derive(Clone, Debug)]
pub struct Local {
    /// The model's file, absolute.
    pub model: PathBuf,
    /// Where the API listens.
    pub api: SocketAddr,
    /// Directory of slices.
    pub cache: PathBuf,
    /// Threads of each stage; absent: as the manifest says, or the cores shared out.
    pub threads: Option<u32>,
    /// Logs.
    pub log: LogConfig,
    /// Directory of schedule logs.
    pub schedules: Option<PathBuf>,
    /// ggml-RPC servers.
    pub rpc: Vec<String>,
    /// Seconds that running requests get at the end; absent: as the manifest says.
    pub grace_s: Option<u32>,
    /// File of API keys.
    pub api_key_file: Option<PathBuf>,
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

/// Threads of each stage when the user names none: the cores but one, shared out, at least 1. llama.cpp's threads spin
/// within a computation: with none to spare, whatever else runs would slow them many times over.
fn shared_threads(cores: usize, stages: usize) -> u32 {
    u32::try_from((cores.saturating_sub(1) / stages.max(1)).max(1)).unwrap_or(u32::MAX)
}

/// Frames that may be under way at once in stages that compute on the same cores, `threads` of them each: more would take threads of one
/// computation from their cores, and the others would spin until they are back. One frame that has all cores is as fast as several that
/// share them (docs/benchmarks.md).
fn shared_frames(cores: usize, stages: usize, threads: u32) -> u32 {
    let frames = (cores / threads.max(1) as usize).clamp(1, stages.max(1));
    u32::try_from(frames).unwrap_or(u32::MAX)
}

/// The configurations of all stages, which stand at `ports`.
///
/// # Errors
/// [`CliError::Config`] when the manifest asks for what no stage can do.
pub fn stage_configs(planned: &Planned, local: &Local, ports: &[StagePorts]) -> Result<Vec<StageConfig>, CliError> {
    let layers: Vec<[u32; 2]> = planned.plan.stages.iter().map(|s| [s.first, s.end]).collect();
    let site = Site {
        chain: format!("{}-0", planned.wanted.name),
        model: ModelConfig {
            source: local.model.display().to_string(),
            digest: Some(planned.facts.digest.clone()),
            credentials: None,
        },
        cache: CacheConfig { dir: local.cache.clone(), max_bytes: 0 },
        api: local.api,
        api_key_file: local.api_key_file.clone(),
        tls: None,
        insecure: false,
        log: local.log.clone(),
        places: ports.iter().map(place).collect(),
    };
    let cut = Cut { stages: &layers, n_layers: planned.facts.n_layers };
    let mut configs = splitmodel_topology::stage_configs(&planned.wanted, cut, &site)?;
    for config in &mut configs {
        let threads = local.threads.or(config.engine.threads);
        config.engine.threads = Some(threads.unwrap_or_else(|| shared_threads(cores(), layers.len())));
        config.engine.rpc.extend(local.rpc.iter().cloned());
        config.schedule_log = local.schedules.as_ref().map(|dir| dir.join(format!("stage-{}.schedule", config.stage)));
        if let Some(grace) = local.grace_s {
            config.scheduling.drain_grace_s = grace;
        }
    }
    // Where a device computes, the cores only drive it.
    let by_cores = configs.iter().all(|c| c.engine.devices.is_empty() && c.engine.rpc.is_empty());
    let threads = configs.iter().filter_map(|c| c.engine.threads).max().unwrap_or(1);
    let frames = by_cores.then(|| shared_frames(cores(), layers.len(), threads));
    for config in &mut configs {
        config.scheduling.max_in_flight = config.scheduling.max_in_flight.or(frames);
        config.validate()?;
    }
    Ok(configs)
}

fn place(ports: &StagePorts) -> Place {
    Place {
        link: ports.link,
        address: ports.link.to_string(),
        control: ports.control,
        health: ports.health,
        metrics: ports.metrics,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use splitmodel_control::config::{Activations, LogFormat};
    use splitmodel_gguf::tiny::{Arch, Tiny};
    use splitmodel_planner::{Device, Layout};

    use super::*;
    use crate::planning::{self, Devices};

    fn planned(dir: &Path, spec: &str) -> Planned {
        Tiny::new(Arch::Llama).write(dir.join("t.gguf")).unwrap();
        let file = dir.join("m.yaml");
        let head = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: { name: tiny }\nspec:";
        let source = dir.join("t.gguf").display().to_string();
        std::fs::write(&file, format!("{head}\n  model: {{ source: 'file://{source}' }}\n{spec}")).unwrap();
        planning::prepare(&file, None, Devices::Here).unwrap().0
    }

    fn local() -> Local {
        Local {
            model: "/models/t.gguf".into(),
            api: "127.0.0.1:8000".parse().unwrap(),
            cache: "/state/slices".into(),
            threads: Some(2),
            log: LogConfig { format: LogFormat::Json, level: "debug".into() },
            schedules: Some("/logs".into()),
            rpc: vec!["127.0.0.1:50052".into()],
            grace_s: Some(7),
            api_key_file: Some("/keys".into()),
        }
    }

    fn ports(stages: u16) -> Vec<StagePorts> {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let ports =
            |s| StagePorts { link: at(100 + s), control: at(200 + s), health: at(300 + s), metrics: at(400 + s) };
        (0..stages).map(ports).collect()
    }

    #[test]
    fn a_manifest_becomes_one_wired_configuration_per_stage() {
        let dir = tempfile::tempdir().unwrap();
        let planned = planned(dir.path(), "  stages: 3\n  contextLength: 512\n  parallel: 2\n");
        let configs = stage_configs(&planned, &local(), &ports(3)).unwrap();
        assert_eq!(configs.len(), 3);
        let wires: Vec<(Option<&str>, Option<&str>)> =
            configs.iter().map(|c| (c.link.downstream.as_deref(), c.link.return_to.as_deref())).collect();
        assert_eq!(
            wires,
            [(Some("127.0.0.1:101"), None), (Some("127.0.0.1:102"), None), (None, Some("127.0.0.1:100"))]
        );
        for (index, c) in (0_u32..).zip(&configs) {
            assert_eq!((c.stage, c.stages, c.n_layers, c.chain.as_str()), (index, 3, 8, "tiny-0"));
            assert_eq!(c.link.bind.port(), 100 + index as u16);
            assert_eq!((c.control.bind.port(), c.health.bind.port()), (200 + index as u16, 300 + index as u16));
            assert_eq!(c.model.digest.as_deref(), Some(planned.facts.digest.as_str()));
            assert!(Path::new(&c.model.source).is_absolute() && c.model.source.ends_with("/t.gguf"), "{:?}", c.model);
            assert_eq!(c.cache.dir, Path::new("/state/slices"));
            assert_eq!((c.engine.context_length, c.engine.lanes, c.engine.threads), (512, 2, Some(2)));
            assert_eq!(c.engine.rpc, ["127.0.0.1:50052"]);
            assert_eq!(c.link.activations, Activations::F32);
            assert_eq!((c.log.format, c.log.level.as_str()), (LogFormat::Json, "debug"));
            assert_eq!(c.scheduling.drain_grace_s, 7);
            assert_eq!(c.schedule_log.as_deref(), Some(Path::new(&format!("/logs/stage-{index}.schedule"))));
            assert_eq!(c.api.is_some(), index == 0);
            assert_eq!(StageConfig::from_yaml(&c.to_yaml().unwrap()).unwrap(), *c);
        }
        let api = configs[0].api.as_ref().unwrap();
        assert_eq!((api.bind, api.model.as_str()), (local().api, "tiny"));
        assert_eq!(api.api_key_file.as_deref(), Some(Path::new("/keys")));
        let layers: Vec<[u32; 2]> = configs.iter().map(|c| c.layers).collect();
        assert!(layers[0][0] == 0 && layers[2][1] == 8 && layers.windows(2).all(|w| w[0][1] == w[1][0]), "{layers:?}");
    }

    #[test]
    fn a_chain_of_one_has_no_wires() {
        let dir = tempfile::tempdir().unwrap();
        let planned = planned(dir.path(), "  stages: 1\n");
        let configs = stage_configs(&planned, &local(), &ports(1)).unwrap();
        assert_eq!((&configs[0].link.downstream, &configs[0].link.return_to), (&None, &None));
        assert_eq!(configs[0].layers, [0, 8]);
    }

    #[test]
    fn a_stage_that_does_not_fit_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let planned = planned(dir.path(), "  stages: 2\n");
        let devices = Devices::Given(vec![Device::new("big", None), Device::new("small", Some(1 << 20))]);
        let error = planning::prepare(&dir.path().join("m.yaml"), None, devices).unwrap_err().to_string();
        assert!(error.contains("small") && error.contains("missing"), "{error}");
        assert_eq!(planned.wanted.layout, Layout::Stages(2));
        assert!(planned.memory_warning(Some(1)).unwrap().contains("spec.contextLength"));
        assert_eq!(planned.memory_warning(Some(u64::MAX)), None);
        assert_eq!(planned.memory_warning(None), None);
    }

    #[test]
    fn frames_under_way_take_no_more_threads_than_there_are_cores() {
        for (cores, stages, threads, frames) in
            [(2, 3, 1, 2), (2, 3, 2, 1), (16, 3, 5, 3), (16, 3, 8, 2), (2, 1, 1, 1), (4, 3, 64, 1), (8, 0, 0, 1)]
        {
            assert_eq!(
                shared_frames(cores, stages, threads),
                frames,
                "{cores} cores, {stages} stages, {threads} threads"
            );
        }
    }

    #[test]
    fn threads_are_shared_out() {
        for (cores, stages, threads) in [(16, 3, 5), (2, 1, 1), (2, 3, 1), (1, 1, 1), (8, 0, 7), (64, 100_000, 1)] {
            assert_eq!(shared_threads(cores, stages), threads, "{cores} cores, {stages} stages");
        }
    }
}
