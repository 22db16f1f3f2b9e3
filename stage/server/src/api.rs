//! Stage 0's HTTP server.

use std::sync::Arc;

use splitmodel_control::{StageConfig, config};
use splitmodel_openai::{ApiConfig, router};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::backend::{ChainBackend, Presentation};
use crate::coordinator::Coordinator;
use crate::load::{Packages, Vocabulary};
use crate::metrics::Metrics;
use crate::serve::ServeError;

/// The chain as the API sees it.
#[must_use]
pub fn backend(
    config: &StageConfig,
    packages: &Packages,
    vocabulary: Vocabulary,
    coordinator: Arc<Coordinator>,
    metrics: Arc<Metrics>,
) -> ChainBackend {
    let api = config.api.as_ref();
    let presentation = Presentation {
        id: api.map_or_else(|| config.chain.clone(), |a| a.model.clone()),
        aliases: api.map(|a| a.aliases.clone()).unwrap_or_default(),
        n_ctx: config.engine.context_length,
        chat_template: packages.chat_template.clone(),
    };
    ChainBackend::new(presentation, vocabulary.tokenizer, vocabulary.grammars, coordinator, metrics)
}

/// Serves the API on `http` until `stop`.
///
/// # Errors
/// [`ServeError`] when keys cannot be read or the model's template cannot be used.
pub fn start(
    config: &StageConfig,
    backend: ChainBackend,
    http: TcpListener,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let Some(api) = &config.api else { return Ok(()) };
    let options = ApiConfig { api_keys: keys(api)?, cors: !api.cors.is_empty(), ..ApiConfig::default() };
    let router = router(Arc::new(backend), options).map_err(|e| ServeError::Api(e.to_string()))?;
    tokio::spawn(async move {
        let serving = axum::serve(http, router).with_graceful_shutdown(stop.cancelled_owned());
        if let Err(error) = serving.await {
            tracing::error!(%error, "the API ended");
        }
    });
    Ok(())
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
