//! Stage 0's HTTP server.

use std::sync::Arc;
use std::time::Duration;

use splitmodel_control::{Phase, StageConfig, StatusHub, config};
use splitmodel_openai::{ApiConfig, Door, Missing, ServeLimits, SetupError, Startup, router, serve};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::backend::{ChainBackend, Presentation};
use crate::coordinator::Coordinator;
use crate::load::{Packages, Vocabulary};
use crate::metrics::Metrics;
use crate::serve::ServeError;
use crate::telemetry::Telemetry;

/// The chain as the API sees it.
#[must_use]
pub fn backend(
    config: &StageConfig,
    packages: &Packages,
    vocabulary: Vocabulary,
    coordinator: Arc<Coordinator>,
    measured: (Arc<Metrics>, Telemetry),
) -> ChainBackend {
    let api = config.api.as_ref();
    let presentation = Presentation {
        id: api.map_or_else(|| config.chain.clone(), |a| a.model.clone()),
        aliases: api.map(|a| a.aliases.clone()).unwrap_or_default(),
        n_ctx: config.engine.context_length,
        chat_template: packages.chat_template.clone(),
    };
    ChainBackend::new(presentation, vocabulary, coordinator, measured)
}

/// Stage 0's HTTP server: it answers from the start, and with the model once that is loaded.
pub struct Api {
    door: Door,
    options: ApiConfig,
}

impl Api {
    /// The API and the server to run, on `http` until `stop`.
    ///
    /// # Errors
    /// [`ServeError::Keys`]; [`ServeError::Api`] for an origin that is none.
    pub fn start(
        api: &config::ApiConfig,
        startup: Starting,
        http: TcpListener,
        stop: CancellationToken,
    ) -> Result<(Self, impl Future<Output = ()> + Send + 'static), ServeError> {
        let options = ApiConfig {
            api_keys: keys(api)?,
            cors: api.cors.clone(),
            keep_alive: Duration::from_millis(api.keep_alive_ms.into()),
            ..ApiConfig::default()
        };
        let limits = ServeLimits {
            header_timeout: Duration::from_millis(api.header_timeout_ms.into()),
            max_connections: api.max_connections as usize,
        };
        let wrong = |e: SetupError| ServeError::Api(e.to_string());
        let door = Door::new(Arc::new(startup), &options.cors).map_err(wrong)?;
        let server = serve(http, door.clone(), limits, stop.cancelled_owned());
        Ok((Self { door, options }, server))
    }

    /// Lets requests through to `backend`.
    ///
    /// # Errors
    /// [`ServeError::Api`] when the model's vocabulary cannot be used.
    pub fn open(self, backend: ChainBackend) -> Result<(), ServeError> {
        let router = router(Arc::new(backend), self.options).map_err(|e| ServeError::Api(e.to_string()))?;
        self.door.open(router);
        Ok(())
    }
}

/// What is known before the model is loaded.
pub struct Starting {
    /// Of this stage.
    pub status: StatusHub,
    /// Of this stage.
    pub metrics: Arc<Metrics>,
}

impl Startup for Starting {
    fn missing(&self) -> Missing {
        let status = self.status.snapshot();
        let phase = status.phase();
        let (done, total) = (status.fetched_bytes, status.total_bytes);
        let reason = match phase {
            Phase::Fetching if total > 0 => {
                format!("stage 0 fetches its part of the model, {} of {} MB", done / 1_000_000, total / 1_000_000)
            }
            Phase::Fetching => "stage 0 fetches its part of the model".to_owned(),
            Phase::Loading => "stage 0 loads its part of the model".to_owned(),
            Phase::Draining => "the server is shutting down".to_owned(),
            Phase::Failed => "stage 0 cannot be started; see its log".to_owned(),
            _ => "stage 0 is starting".to_owned(),
        };
        let progress = (phase == Phase::Fetching && total > 0).then(|| done as f32 / total as f32);
        let phase = phase.as_str_name().trim_start_matches("PHASE_").to_ascii_lowercase();
        Missing { phase, progress, reason }
    }

    fn metrics(&self) -> String {
        self.metrics.render()
    }
}

/// Keys of the configuration and of its file.
fn keys(api: &config::ApiConfig) -> Result<Vec<String>, ServeError> {
    let mut keys: Vec<String> = api.api_keys.iter().map(|k| k.expose().to_owned()).collect();
    if let Some(path) = &api.api_key_file {
        let wrong = |source| ServeError::Keys { path: path.clone(), source };
        let text = std::fs::read_to_string(path).map_err(wrong)?;
        let before = keys.len();
        let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
        keys.extend(lines.map(str::to_owned));
        if keys.len() == before {
            // Without a key the API would be open, which nobody means who names a file of keys.
            return Err(wrong(std::io::Error::other("no key is in it; write one per line, or leave the file out")));
        }
    }
    Ok(keys)
}
