//! Stage 0's HTTP server.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use splitmodel_cache::Identity;
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
        identity: Identity {
            model: packages.digest.clone(),
            llama_cpp: splitmodel_engine::llama_version(),
            stages: config.stages,
            template: packages.chat_template.clone(),
            n_ctx: config.engine.cells(),
            cache_types: [config.engine.cache_type_k, config.engine.cache_type_v].map(|t| t.name().to_owned()),
            activations: config.link.activations.name().to_owned(),
        },
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

/// Longest file of keys.
const MAX_KEY_FILE: u64 = 1 << 20;

/// Keys of the configuration and of its file.
fn keys(api: &config::ApiConfig) -> Result<Vec<String>, ServeError> {
    let mut keys: Vec<String> = api.api_keys.iter().map(|k| k.expose().to_owned()).collect();
    if let Some(path) = &api.api_key_file {
        let before = keys.len();
        for file in key_files(path)? {
            let wrong = |source| ServeError::Keys { path: file.clone(), source };
            let mut text = String::new();
            let mut open = std::fs::File::open(&file).map_err(wrong)?.take(MAX_KEY_FILE + 1);
            open.read_to_string(&mut text).map_err(wrong)?;
            if text.len() as u64 > MAX_KEY_FILE {
                return Err(wrong(std::io::Error::other(format!("is longer than {MAX_KEY_FILE} bytes"))));
            }
            let lines = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'));
            keys.extend(lines.map(str::to_owned));
        }
        if keys.len() == before {
            // Without a key the API would be open, which nobody means who names a file of keys.
            let none = std::io::Error::other("no key is in it; write one per line, or leave the file out");
            return Err(ServeError::Keys { path: path.clone(), source: none });
        }
    }
    Ok(keys)
}

/// The file itself, or those of a directory. A mounted Secret shows its values as links into a directory `..data`.
fn key_files(path: &Path) -> Result<Vec<PathBuf>, ServeError> {
    let wrong = |source| ServeError::Keys { path: path.to_owned(), source };
    if !std::fs::metadata(path).map_err(wrong)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for item in std::fs::read_dir(path).map_err(wrong)? {
        let item = item.map_err(wrong)?;
        let hidden = item.file_name().as_encoded_bytes().starts_with(b"..");
        if !hidden && std::fs::metadata(item.path()).map_err(wrong)?.is_file() {
            files.push(item.path());
        }
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn read(path: &Path) -> Result<Vec<String>, ServeError> {
        let mut api = config::ApiConfig::new("127.0.0.1:1".parse().unwrap(), "m".to_owned());
        api.api_key_file = Some(path.to_owned());
        keys(&api)
    }

    #[test]
    fn keys_come_from_a_file_or_from_a_secret_as_it_is_mounted() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        assert!(read(&at("none")).is_err());
        std::fs::write(at("file"), "# ours\n a \n\nb\n").unwrap();
        assert_eq!(read(&at("file")).unwrap(), ["a", "b"]);

        let secret = at("secret");
        std::fs::create_dir_all(secret.join("..2026_1")).unwrap();
        assert!(read(&secret).unwrap_err().to_string().contains("no key"));
        std::fs::write(secret.join("..2026_1/one"), "k1").unwrap();
        std::fs::write(secret.join("..2026_1/two"), "k2\nk3\n").unwrap();
        symlink("..2026_1", secret.join("..data")).unwrap();
        symlink("..data/one", secret.join("one")).unwrap();
        symlink("..data/two", secret.join("two")).unwrap();
        std::fs::create_dir(secret.join("folder")).unwrap();
        assert_eq!(read(&secret).unwrap(), ["k1", "k2", "k3"]);

        std::fs::write(secret.join("binary"), [0xff, 0xfe]).unwrap();
        assert!(read(&secret).unwrap_err().to_string().contains("binary"));
    }
}
