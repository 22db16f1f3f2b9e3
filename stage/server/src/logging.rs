//! Logs on standard error, as text or JSON.

use splitmodel_control::config::{LogConfig, LogFormat};
use tracing_subscriber::EnvFilter;

/// Starts logging; the environment variable `SPLITMODEL_LOG` overrides the level.
pub fn init(config: &LogConfig) {
    let filter = std::env::var("SPLITMODEL_LOG").unwrap_or_else(|_| config.level.clone());
    let (filter, bad) = match EnvFilter::try_new(&filter) {
        Ok(f) => (f, None),
        Err(e) => (EnvFilter::new("info"), Some(e)),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let result = match config.format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if let Err(error) = result {
        tracing::debug!(error, "logging was started before"); // by a test
    }
    if let Some(error) = bad {
        tracing::warn!(%error, "log.level cannot be read, using info");
    }
}
