//! The `serve` command: brings a stage up, keeps it, and takes it down in order.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use splitmodel_cache::Settings;
use splitmodel_chain::scheduler::{Limits, Request};
use splitmodel_control::health::{self, HealthHub, Probe};
use splitmodel_control::{ControlService, Phase, StageConfig, StageStatus, StatusHub};
use splitmodel_gguf::cache::Alive;
use splitmodel_link::TlsStore;
use splitmodel_link::connection::Conditioning;
use splitmodel_link::setup::InstanceId;
use splitmodel_sampling::GenerationConfig;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::api::{self, Api, Starting};
use crate::control::Handler;
use crate::coordinator::{Coordinator, Deadlines};
use crate::engine::{self, EngineJobs, EngineQueue};
use crate::fatal;
use crate::heartbeat;
use crate::kept;
use crate::load::{self, LoadError, Packages, Vocabulary};
use crate::logging;
use crate::meter::EngineStats;
use crate::metrics::{self, Metrics};
use crate::telemetry::{Flush, Telemetry, TelemetryError};
use crate::wiring::{self, Identity, Parts, Wiring, WiringError};

/// An idle chain is probed this often.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
/// Attempts of a session whose rows are dropped.
const MAX_ATTEMPTS: u32 = 4;
/// Longest wait for answers under way, once everything else has ended.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// Why a stage ends with an error.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] splitmodel_control::ConfigError),
    /// An address is taken or not there.
    #[error("{field}: {address} cannot be listened on: {source}; choose another address or end what uses it")]
    Bind {
        /// Field of the configuration.
        field: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// Model, packages or engine.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Links.
    #[error(transparent)]
    Wiring(#[from] WiringError),
    /// Traces.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// API keys.
    #[error("api.api_key_file: {}: {source}", path.display())]
    Keys {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The API cannot start with this model or configuration.
    #[error("the API cannot start: {0}")]
    Api(String),
    /// The system.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The engine thread ended.
    #[error("the engine thread ended while it was loading; the lines before say why")]
    Engine,
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> ServeError {
    move |source| ServeError::System { what, source }
}

impl ServeError {
    /// The exit code of the process: whether another start may go better.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        let permanent = match self {
            Self::Config(_) | Self::Keys { .. } | Self::Api(_) | Self::Telemetry(_) => true,
            Self::Load(e) => e.is_permanent(),
            Self::Wiring(e) => matches!(e, WiringError::Address(_)),
            Self::Bind { .. } | Self::System { .. } | Self::Engine => false,
        };
        if permanent { fatal::PERMANENT } else { fatal::TRANSIENT }
    }
}

/// Runs a stage until it is told to end.
///
/// # Errors
/// [`ServeError`].
pub fn main(config: &Path, exit_with_parent: bool) -> Result<(), ServeError> {
    let config = StageConfig::load(config)?;
    logging::init(&config.log);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(system("the async runtime cannot start"))?;
    let (queue, jobs) = engine::queue();
    let inside = runtime.enter();
    let (stage, flush) = Stage::new(config, queue)?;
    drop(inside);
    let result = runtime.block_on(async {
        let result = stage.run(jobs, exit_with_parent).await;
        if let Some(flush) = flush {
            flush.finish().await;
        }
        result
    });
    // What still runs is bound to peers that do not answer.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

struct Stage {
    config: StageConfig,
    instance: InstanceId,
    status: StatusHub,
    conditioning: Arc<Conditioning>,
    tls: Option<TlsStore>,
    queue: EngineQueue,
    stats: Arc<EngineStats>,
    telemetry: Telemetry,
    metrics: Arc<Metrics>,
    /// Told to end: drains.
    drain: watch::Sender<Option<Duration>>,
    /// Ends everything.
    stop: CancellationToken,
    /// The servers, which finish what they were asked before the process ends.
    servers: TaskTracker,
}

/// What the engine thread says once the slice is loaded.
struct Loaded {
    n_ctx: u32,
    lanes: u32,
    /// Whether prefixes are kept as files.
    keeps_files: bool,
}

/// Resolves when it has said so.
type Loading = oneshot::Receiver<Result<Loaded, LoadError>>;

impl Stage {
    fn new(config: StageConfig, queue: EngineQueue) -> Result<(Self, Option<Flush>), ServeError> {
        let instance = InstanceId::now().map_err(system("an instance id"))?;
        let tls = wiring::certificates(&config)?;
        let status = StatusHub::new(StageStatus {
            chain: config.chain.clone(),
            stage: config.stage,
            stages: config.stages,
            first_layer: config.layers[0],
            end_layer: config.layers[1],
            n_layers: config.n_layers,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            instance: instance.to_string(),
            activations: config.link.activations.name().to_owned(),
            ..StageStatus::default()
        });
        status.set_phase(Phase::Planned);
        let (telemetry, flush) = Telemetry::start(&config, &instance.to_string())?;
        let stats = Arc::<EngineStats>::default();
        stats.heartbeat.set_loading(config.scheduling.progress_deadline_s);
        let metrics = Arc::new(Metrics::new(config.stage, stats.clone(), telemetry.counts()));
        let stage = Self {
            config,
            instance,
            status,
            conditioning: Arc::default(),
            tls,
            queue,
            stats,
            telemetry,
            metrics,
            drain: watch::Sender::new(None),
            stop: CancellationToken::new(),
            servers: TaskTracker::new(),
        };
        Ok((stage, flush))
    }

    async fn run(self, jobs: EngineJobs, exit_with_parent: bool) -> Result<(), ServeError> {
        let grace = Duration::from_secs(self.config.scheduling.drain_grace_s.into());
        signals(&self.drain, grace).map_err(system("signals cannot be watched"))?;
        if exit_with_parent {
            watch_parent(self.drain.clone()).map_err(system("standard input cannot be watched"))?;
        }
        let control = bind("control.bind", self.config.control.bind).await?;
        let health_listener = bind("health.bind", self.config.health.bind).await?;
        let http = match &self.config.api {
            Some(api) => {
                let listener = bind("api.bind", api.bind).await?;
                let known = Starting { status: self.status.clone(), metrics: self.metrics.clone() };
                let (api, server) = Api::start(api, known, listener, self.stop.clone())?;
                self.servers.spawn(server);
                Some(api)
            }
            None => None,
        };
        if let Some(config) = &self.config.metrics {
            let listener = bind("metrics.bind", config.bind).await?;
            let (metrics, stop) = (self.metrics.clone(), self.stop.clone());
            self.servers.spawn(async move {
                if let Err(error) = metrics::serve(listener, metrics, stop).await {
                    tracing::error!(%error, "the metrics service ended");
                }
            });
        }
        let handler = Arc::new(Handler::new(self.drain.clone(), grace, self.conditioning.clone()));
        let service = ControlService::new(self.status.clone(), handler.clone());
        let (tls, stop) = (self.tls.clone(), self.stop.clone());
        self.servers.spawn(async move {
            if let Err(error) = splitmodel_control::serve(control, service, tls, stop.cancelled_owned()).await {
                tracing::error!(%error, "the control service ended");
            }
        });
        let (health_hub, health_service) = HealthHub::new().await;
        tokio::spawn(show_life(self.stats.clone(), health_hub.clone()));
        let stop = self.stop.clone();
        self.servers.spawn(async move {
            if let Err(error) = health::serve(health_listener, health_service, stop.cancelled_owned()).await {
                tracing::error!(%error, "the health service ended");
            }
        });
        let mut told = self.drain.subscribe();
        let (stop, status, servers) = (self.stop.clone(), self.status.clone(), self.servers.clone());
        let result = tokio::select! {
            result = self.serve(jobs, http, handler, health_hub) => result,
            _ = load_cancelled(&mut told, &status) => Ok(()),
        };
        if let Err(error) = &result {
            status.set_error(&error.to_string(), true);
        }
        stop.cancel();
        servers.close();
        let _ = tokio::time::timeout(LAST_ANSWERS, servers.wait()).await; // clients that do not read are left
        result
    }

    async fn serve(
        self,
        jobs: EngineJobs,
        http: Option<Api>,
        handler: Arc<Handler>,
        health_hub: HealthHub,
    ) -> Result<(), ServeError> {
        let (config, status, stats) = (self.config.clone(), self.status.clone(), self.stats.clone());
        let (packages, vocabulary) = tokio::task::spawn_blocking(move || {
            let alive: Alive = Arc::new(move || stats.heartbeat.beat());
            let packages = load::fetch(&config, &status, &alive)?;
            let vocabulary = load::vocabulary(&packages)?;
            Ok::<_, LoadError>((packages, vocabulary))
        })
        .await
        .map_err(|_| ServeError::Engine)??;
        let packages = Arc::new(packages);
        let grammars = vocabulary.as_ref().map(|v| v.grammars.clone());
        let (loaded, thread) = self.start_engine(jobs, packages.clone(), grammars)?;
        let loaded = loaded.await.map_err(|_| ServeError::Engine)??;
        self.status.set_phase(Phase::Loaded);
        let metrics = self.metrics.clone();
        metrics.set_model(loaded.n_ctx, u64::from(packages.n_embd) * 4);
        let coordinator =
            self.config.is_first().then(|| self.coordinator(&vocabulary, load::prefixes(&self.config, &packages)));
        if let Some(coordinator) = coordinator.as_ref().filter(|_| loaded.keeps_files) {
            let (coordinator, config) = (coordinator.clone(), self.config.clone());
            kept::remember(&coordinator, &config);
            self.servers.spawn(kept::follow(coordinator, config, self.stop.clone()));
        }
        if let (Some(coordinator), Some(vocabulary), Some(http)) = (&coordinator, vocabulary, http) {
            metrics.set_coordinator(coordinator.clone());
            handler.set_coordinator(coordinator.clone());
            let measured = (metrics.clone(), self.telemetry.clone());
            let backend = api::backend(&self.config, &packages, vocabulary, coordinator.clone(), measured);
            http.open(backend)?;
        }
        let identity = Identity {
            instance: self.instance,
            model: packages.digest.clone(),
            n_embd: packages.n_embd,
            n_ctx: loaded.n_ctx,
            lanes: loaded.lanes,
            llama_cpp: splitmodel_engine::llama_version(),
        };
        let parts = Parts {
            queue: self.queue.clone(),
            status: self.status.clone(),
            metrics,
            conditioning: self.conditioning.clone(),
            tls: self.tls.clone(),
            shutdown: self.stop.clone(),
        };
        let wiring = Arc::new(Wiring::new(&self.config, identity, parts));
        let ready = coordinator.as_ref().map_or_else(|| wiring.linked(), |c| c.ready());
        tokio::spawn(show_ready(ready.clone(), health_hub, self.status.clone(), coordinator.is_some()));
        tokio::spawn(tick(coordinator.clone(), self.status.clone(), self.stats.clone()));
        let mut links = tokio::spawn(wiring.run(coordinator.clone()));
        let mut told = self.drain.subscribe();
        tokio::select! {
            ended = &mut links => return ended.map_err(|_| ServeError::Engine)?.map_err(ServeError::from),
            _ = told.wait_for(Option::is_some) => {}
        }
        tracing::info!(grace = ?told.borrow().unwrap_or_default(), "draining");
        self.status.set_phase(Phase::Draining);
        drain(coordinator.as_deref(), ready, told).await;
        self.stop.cancel();
        let _ = tokio::time::timeout(Duration::from_secs(2), links).await; // peers that take no goodbye are left
        self.queue.shutdown();
        let joined = tokio::task::spawn_blocking(move || thread.join());
        let _ = tokio::time::timeout(Duration::from_secs(5), joined).await; // a hung device must not keep the process
        Ok(())
    }

    /// The engine thread: loads the slice, says so, and works.
    fn start_engine(
        &self,
        jobs: EngineJobs,
        packages: Arc<Packages>,
        grammars: Option<splitmodel_sampling::GrammarFactory>,
    ) -> Result<(Loading, JoinHandle<()>), ServeError> {
        let (tx, rx) = oneshot::channel();
        let (config, status, stats) = (self.config.clone(), self.status.clone(), self.stats.clone());
        let telemetry = self.telemetry.clone();
        let thread = std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
            match load::worker(&config, &packages, grammars, &status, (&stats.heartbeat, &telemetry)) {
                Ok(worker) => {
                    let slice = worker.runtime();
                    let (n_ctx, lanes, keeps_files) = (slice.cells(), slice.lanes(), worker.keeps_files());
                    let loaded = Loaded { n_ctx, lanes, keeps_files };
                    if tx.send(Ok(loaded)).is_ok() {
                        engine::run(worker, &jobs, &stats);
                    }
                }
                Err(error) => {
                    let _ = tx.send(Err(error)); // the receiver waits, or the process ends
                }
            }
        });
        Ok((rx, thread.map_err(system("the engine thread cannot start"))?))
    }

    fn coordinator(&self, vocabulary: &Option<Vocabulary>, cache: Settings) -> Arc<Coordinator> {
        let (c, s) = (&self.config, &self.config.scheduling);
        let rows = c.engine.n_ubatch as usize;
        // Ids of later instances are larger, by 65,536 for each millisecond here: no earlier one counts that far.
        let first_page = u64::try_from(self.instance.0 >> 64).unwrap_or(u64::MAX);
        let limits = Limits {
            lanes: u16::try_from(c.engine.lanes).unwrap_or(u16::MAX),
            context: c.engine.context_length as usize,
            max_in_flight: c.max_in_flight() as usize,
            max_rows: rows,
            prefill_chunk: (c.prefill_chunk() as usize).min(rows),
            prefill_chunk_shared: (c.prefill_chunk_shared() as usize).min(rows),
            max_queue: s.max_queue as usize,
            max_attempts: MAX_ATTEMPTS,
            cells: c.engine.cells() as usize,
            cache: Settings { first_page, ..cache },
        };
        let deadlines = Deadlines {
            admission: Duration::from_secs(s.admission_deadline_s.into()),
            recovery: Duration::from_secs(s.recovery_deadline_s.into()),
            step: heartbeat::STEP,
            probe: PROBE_INTERVAL,
        };
        let tokenizer = vocabulary.as_ref().map(|v| v.tokenizer.clone());
        let first = tokenizer.and_then(|t| t.bos().or(t.eos())).unwrap_or(0);
        Coordinator::new(limits, deadlines, self.queue.clone(), probe_request(first), self.telemetry.measures())
    }
}

/// One token through the whole chain.
fn probe_request(token: i32) -> Request {
    let config = GenerationConfig { prompt_tokens: 1, temperature: 0.0, ..GenerationConfig::default() };
    // A plain struct of numbers always has a JSON form.
    let config = serde_json::to_vec(&config).unwrap_or_default();
    Request { prompt: vec![token], config, max_tokens: 1, ..Request::default() }
}

async fn bind(field: &'static str, address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| ServeError::Bind { field, address, source })
}

/// SIGTERM and SIGINT drain; a second one ends the grace.
fn signals(drain: &watch::Sender<Option<Duration>>, grace: Duration) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let drain = drain.clone();
    tokio::spawn(async move {
        let mut grace = grace;
        loop {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            drain.send_replace(Some(grace));
            grace = Duration::ZERO;
        }
    });
    Ok(())
}

/// Drains without grace when standard input ends.
fn watch_parent(drain: watch::Sender<Option<Duration>>) -> std::io::Result<()> {
    std::thread::Builder::new().name("parent".to_owned()).spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink()); // an error ends it just as well
        drain.send_replace(Some(Duration::ZERO));
    })?;
    Ok(())
}

/// Resolves when the stage is told to end before it serves: a fetch or a load has nothing to drain.
async fn load_cancelled(told: &mut watch::Receiver<Option<Duration>>, status: &StatusHub) {
    if told.wait_for(Option::is_some).await.is_err() || !loading(status) {
        std::future::pending::<()>().await;
    }
}

fn loading(status: &StatusHub) -> bool {
    matches!(status.snapshot().phase(), Phase::Planned | Phase::Fetching | Phase::Loading)
}

/// Waits until nothing is left to do, or the grace, which a second order may shorten, is over.
async fn drain(
    coordinator: Option<&Coordinator>,
    mut ready: watch::Receiver<bool>,
    mut told: watch::Receiver<Option<Duration>>,
) {
    let done = async {
        match coordinator {
            Some(coordinator) => {
                coordinator.drain();
                coordinator.idle().await;
            }
            // Streams still run through this stage: it stays until its upstream leaves.
            None => {
                let _ = ready.wait_for(|linked| !linked).await; // the sender ends with the links
            }
        }
    };
    let over = async {
        loop {
            let grace = told.borrow_and_update().unwrap_or_default();
            tokio::select! {
                () = tokio::time::sleep(grace) => return,
                Ok(()) = told.changed() => {}
            }
        }
    };
    tokio::select! {
        () = done => {}
        () = over => {
            if let Some(coordinator) = coordinator {
                coordinator.abort("the server is shutting down and the grace is over");
            }
        }
    }
}

/// Follows readiness into the health service and the phase.
async fn show_ready(mut ready: watch::Receiver<bool>, health: HealthHub, status: StatusHub, first: bool) {
    loop {
        let now = *ready.borrow_and_update();
        health.set(Probe::Readiness, now).await;
        if first && now {
            status.set_phase(Phase::Serving);
        }
        if ready.changed().await.is_err() {
            return;
        }
    }
}

/// Brings the engine's signs of life into the health service.
async fn show_life(stats: Arc<EngineStats>, health: HealthHub) {
    let mut interval = tokio::time::interval(Duration::from_secs(1));
    loop {
        interval.tick().await;
        health.set(Probe::Liveness, stats.heartbeat.alive()).await;
    }
}

/// Looks at deadlines and brings figures into the status once a second.
async fn tick(coordinator: Option<Arc<Coordinator>>, status: StatusHub, stats: Arc<EngineStats>) {
    use std::sync::atomic::Ordering::Relaxed;
    let mut interval = tokio::time::interval(Duration::from_secs(1));
    loop {
        interval.tick().await;
        let figures = coordinator.as_ref().map(|c| {
            c.tick();
            c.counts()
        });
        let lanes = u32::try_from(stats.lanes.load(Relaxed)).unwrap_or(u32::MAX);
        let (rows, wanted) = (stats.rows.load(Relaxed), stats.wanted.load(Relaxed));
        status.update(|s| {
            s.lanes_used = lanes;
            if let Some((now, tokens)) = figures {
                s.lanes_used = u32::try_from(now.running).unwrap_or(u32::MAX);
                s.queued = u32::try_from(now.queued).unwrap_or(u32::MAX);
                (s.prompt_tokens, s.generated_tokens) = (tokens.prompt, tokens.generated);
            } else {
                (s.prompt_tokens, s.generated_tokens) = (rows.saturating_sub(wanted), wanted);
            }
        });
    }
}
