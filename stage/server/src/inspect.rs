//! The `inspect` command: reads a model's header, whatever its source, and hands over what planning needs in 4096 bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use splitmodel_fetch::{FetchError, Options};
use splitmodel_gguf::compact::CompactError;

use crate::fatal;

/// Why a model cannot be inspected.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// The way to the model, or the model.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// Its facts do not fit.
    #[error(transparent)]
    Compact(#[from] CompactError),
    /// The output.
    #[error("--output: {}: {source}", path.display())]
    Output {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

impl InspectError {
    /// The exit code of the process.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        let permanent = match self {
            Self::Fetch(e) => e.is_permanent(),
            Self::Compact(_) => true,
            Self::Output { .. } => false,
        };
        if permanent { fatal::PERMANENT } else { fatal::TRANSIENT }
    }
}

/// Writes the facts of the model at `source` to `output`, or what is wrong with it.
///
/// # Errors
/// [`InspectError`].
pub fn main(source: &str, credentials: Option<&Path>, output: &Path) -> Result<(), InspectError> {
    let write = |text: &str| {
        fatal::write(output, text).map_err(|source| InspectError::Output { path: output.to_owned(), source })
    };
    match facts(source, credentials) {
        Ok(text) => write(&text),
        Err(error) => {
            write(&error.to_string())?;
            Err(error)
        }
    }
}

fn facts(source: &str, credentials: Option<&Path>) -> Result<String, InspectError> {
    let options =
        Options { credentials: credentials.map(Path::to_owned), alive: Arc::new(|| {}), ..Options::default() };
    let model = splitmodel_fetch::open(source, &options)?;
    let facts = model.facts().map_err(FetchError::from)?;
    tracing::info!(model = facts.name, arch = facts.arch, layers = facts.n_layers, digest = facts.digest, "inspected");
    Ok(facts.to_compact()?)
}
