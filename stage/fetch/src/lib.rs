//! Models wherever they are: [`open`] takes a path, `file://`, `https://` or `hf://` and gives a [`splitmodel_gguf::Model`].
//!
//! Remote files are read in ranges: the header in a few large ones, tensors as streams that go on where they broke off.
//! Calls block; they must not be made from asynchronous code (a thread of `spawn_blocking` is fine).

mod address;
mod client;
mod credentials;
mod error;
mod remote;
mod stream;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use splitmodel_gguf::{Model, Source};

pub use error::{FetchError, HttpError, http_error, is_permanent};

use address::Address;
use client::Client;
use remote::Remote;

/// How often, and how patiently, a server is asked.
#[derive(Debug, Clone)]
pub struct Patience {
    /// Tries in a row that bring no byte.
    pub tries: u32,
    /// Pause after the first of them; each further one is twice as long.
    pub first_pause: Duration,
    /// Longest pause, other than one that the server asks for.
    pub longest_pause: Duration,
    /// Longest pause that a server may ask for (`Retry-After`).
    pub longest_asked: Duration,
    /// Longest silence of a connection.
    pub stall: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            tries: 8,
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(30),
            longest_asked: Duration::from_secs(300),
            stall: Duration::from_secs(30),
        }
    }
}

/// How a source is read.
#[derive(Clone)]
pub struct Options {
    /// Directory with a file `token`, or with `username` and `password`. They are sent to the source's own host only.
    pub credentials: Option<PathBuf>,
    /// Called whenever bytes have come in.
    pub alive: Arc<dyn Fn() + Send + Sync>,
    /// Bounds of retries.
    pub patience: Patience,
    /// Where `hf://` leads, `https://huggingface.co` or a mirror.
    pub hf_endpoint: String,
}

/// Where `hf://` leads unless `HF_ENDPOINT` says otherwise.
const HF_ENDPOINT: &str = "https://huggingface.co";

impl Default for Options {
    /// No credentials; `hf://` leads where the environment variable `HF_ENDPOINT` says.
    fn default() -> Self {
        let endpoint = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.trim().is_empty());
        Self {
            credentials: None,
            alive: Arc::new(|| {}),
            patience: Patience::default(),
            hf_endpoint: endpoint.unwrap_or_else(|| HF_ENDPOINT.to_owned()),
        }
    }
}

/// Opens the model at `source`: `https://host/path`, `hf://owner/repo[@revision]/path`, `file://path` or a path. Any shard of a
/// sharded model stands for all of it. Blocks.
///
/// # Errors
/// [`FetchError`].
pub fn open(source: &str, options: &Options) -> Result<Model, FetchError> {
    let url = match address::parse(source, &options.hf_endpoint)? {
        Address::Local(path) => return Ok(Model::open(path)?),
        Address::Remote(url) => url,
    };
    let client = Arc::new(Client::new(&url, options)?);
    let model = Model::open_named(url.path(), &mut |path| {
        let mut url = url.clone();
        url.set_path(path);
        Ok(Arc::new(Remote::open(client.clone(), url)?) as Arc<dyn Source>)
    })?;
    Ok(model)
}

/// Whether `source` is read over the network.
#[must_use]
pub fn is_remote(source: &str) -> bool {
    source.starts_with("https://") || source.starts_with("hf://")
}
