//! `splitmodel up`: a whole chain on this machine.
mod chain;
pub mod configs;
mod liveness;
mod logs;
pub mod ports;
pub mod progress;
mod ready;
mod signals;
mod supervisor;
mod watcher;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use splitmodel_control::config::{LogConfig, LogFormat};

use crate::args::{LogFormatArg, UpArgs};
use crate::error::CliError;
use crate::planning::{self, Devices, Planned};
use crate::rundir::{self, RunDir, RunState};
use crate::ui;
use chain::{Chain, Ended};
use configs::Local;
use ports::StagePorts;
use signals::Signals;
use supervisor::{Restarts, StageProcess};

/// Name of the stage program.
const STAGE_PROGRAM: &str = "splitmodel-stage";
/// Times that other programs may snatch ports.
const PORT_TRIES: u32 = 5;

/// Runs a chain until Ctrl-C, SIGTERM or a stage that fails for good.
///
/// # Errors
/// [`CliError`].
pub async fn run(args: UpArgs) -> Result<(), CliError> {
    let mut signals = Signals::install()?;
    let api = SocketAddr::new(args.host, args.port);
    ports::check_api(api)?;
    let binary = stage_program(args.stage_binary.as_deref())?;
    let state = rundir::state_dir(args.state_dir.as_deref())?;
    // Reading a large model's header takes a while; Ctrl-C must not.
    let (file, stages) = (args.file.clone(), args.stages);
    let planning = tokio::task::spawn_blocking(move || planning::prepare(&file, stages, Devices::Here));
    let (planned, model) = tokio::select! {
        planned = planning => planned.map_err(|e| CliError::Plan(format!("planning was cut short: {e}")))??,
        () = signals.next() => return Ok(()),
    };
    ui::offer(&planned.table());
    if let Some(warning) = planned.memory_warning(planning::available_memory()) {
        ui::note(&warning);
    }
    check_keys(&args, &planned)?;
    let local = local(&args, api, &state, model)?;
    let mut run = RunDir::create(&state, &planned.wanted.name)?;
    let setup = Setup { args: &args, planned: &planned, local: &local, binary: &binary };
    for _ in 0..PORT_TRIES {
        match setup.chain(&run)?.run(&mut signals).await {
            Ok(Ended::Stopped) => return Ok(()),
            Ok(Ended::PortsTaken) => {
                ui::note("another program took a port of a stage; starting again with other ports")
            }
            Err(error) => {
                // Only the API's port is the user's choice, and only stage 0 has it.
                if matches!(error, CliError::StageFailed { stage: 0, .. }) {
                    ports::check_api(api)?;
                }
                if matches!(error, CliError::StageFailed { .. }) {
                    run.keep();
                }
                return Err(error);
            }
        }
    }
    Err(CliError::Ports(PORT_TRIES))
}

/// The keys of a cluster are in a Secret; an API that was meant to be closed must not open to a network.
fn check_keys(args: &UpArgs, planned: &Planned) -> Result<(), CliError> {
    if let Some(file) = &args.api_key_file {
        let text = std::fs::read_to_string(file).map_err(CliError::file("read", file))?;
        if text.lines().map(str::trim).any(|line| !line.is_empty() && !line.starts_with('#')) {
            return Ok(());
        }
        let message = format!("{} has no key; write one per line, or leave the flag out", file.display());
        return Err(CliError::Flag { flag: "api-key-file", message });
    }
    if planned.wanted.spec.api.key_secret.is_none() {
        return Ok(());
    }
    if !args.host.is_loopback() {
        let message =
            "is missing: spec.api.keySecret asks for keys, its Secret is in a cluster, and --host opens the API to a \
                       network; name a file with one key per line"
                .into();
        return Err(CliError::Flag { flag: "api-key-file", message });
    }
    ui::note("note: the keys of spec.api.keySecret are in a cluster; here the API asks for none (see --api-key-file)");
    Ok(())
}

fn local(args: &UpArgs, api: SocketAddr, state: &Path, model: PathBuf) -> Result<Local, CliError> {
    let schedules = match &args.schedule_log {
        Some(dir) => {
            std::fs::create_dir_all(dir).map_err(CliError::file("create", dir))?;
            Some(std::path::absolute(dir).map_err(CliError::file("find", dir))?)
        }
        None => None,
    };
    let format = match args.log_format {
        LogFormatArg::Text => LogFormat::Text,
        LogFormatArg::Json => LogFormat::Json,
    };
    let absolute = |file: &PathBuf| std::path::absolute(file).map_err(CliError::file("find", file));
    Ok(Local {
        model,
        api,
        cache: state.join("slices"),
        threads: args.threads,
        log: LogConfig { format, level: args.log_level.clone() },
        schedules,
        rpc: args.rpc.clone(),
        grace_s: args.grace,
        api_key_file: args.api_key_file.as_ref().map(absolute).transpose()?,
    })
}

/// All that stays the same when the chain is set up again with other ports.
struct Setup<'a> {
    args: &'a UpArgs,
    planned: &'a Planned,
    local: &'a Local,
    binary: &'a Path,
}

impl Setup<'_> {
    /// Finds ports and writes the configurations into `run`.
    fn chain(&self, run: &RunDir) -> Result<Chain, CliError> {
        let count = u32::try_from(self.planned.plan.stages.len()).unwrap_or(u32::MAX);
        let ports = ports::reserve(count, self.local.api)?;
        let configs = configs::stage_configs(self.planned, self.local, &ports)?;
        let mut processes = Vec::with_capacity(configs.len());
        for (config, ports) in configs.iter().zip(&ports) {
            let stage = config.stage;
            let file = run.write(&format!("stage-{stage}.yaml"), &config.to_yaml()?)?;
            processes.push(self.process(run, stage, file, *ports));
        }
        run.publish(&RunState {
            name: self.planned.wanted.name.clone(),
            pid: std::process::id(),
            url: ready::url(self.local.api),
            control: ports.iter().map(|p| p.control.to_string()).collect(),
        })?;
        let grace = self.args.grace.unwrap_or(self.planned.wanted.spec.deadlines.drain_seconds);
        Ok(Chain {
            processes,
            restarts: Restarts::new(self.args.restart_limit, Duration::from_secs(self.args.hang_deadline.into())),
            grace: Duration::from_secs(grace.into()),
            api: self.local.api,
            model: self.planned.wanted.model_name.clone(),
            keyed: self.args.api_key_file.is_some(),
            terminal: std::io::stderr().is_terminal(),
        })
    }

    fn process(&self, run: &RunDir, stage: u32, config: PathBuf, ports: StagePorts) -> StageProcess {
        let log = run.path().join(format!("stage-{stage}.log"));
        StageProcess { stage, binary: self.binary.to_owned(), config, log, ports }
    }
}

/// The stage program: as given, or beside this program, or in `PATH`.
fn stage_program(given: Option<&Path>) -> Result<PathBuf, CliError> {
    if let Some(path) = given {
        return match path.is_file() {
            true => std::path::absolute(path).map_err(CliError::file("find", path)),
            false => Err(CliError::NoStageBinary { tried: path.display().to_string() }),
        };
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_owned);
    let in_path = std::env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> =
        beside.into_iter().chain(std::env::split_paths(&in_path)).map(|dir| dir.join(STAGE_PROGRAM)).collect();
    match places.iter().find(|p| p.is_file()) {
        Some(found) => Ok(found.clone()),
        None => {
            let beside = places.first().map_or_else(String::new, |p| p.display().to_string());
            Err(CliError::NoStageBinary { tried: format!("{beside} and {STAGE_PROGRAM} in PATH") })
        }
    }
}
