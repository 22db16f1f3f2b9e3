//! What all handlers share.

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use crate::backend::{Backend, ModelCard};
use crate::error::{ApiError, ErrorClass};
use crate::observe::Stats;
use crate::prepare::Memo;
use crate::template::ChatTemplate;
use crate::template::specials::Specials;

/// Settings of the API.
#[derive(Debug, Clone)]
pub struct ApiConfig {
    /// Keys of which requests must bring one; empty: none is needed.
    pub api_keys: Vec<String>,
    /// Largest request body in bytes, also after decompression.
    pub body_limit: usize,
    /// Bytes of all bodies that are being read or wait to be prepared; at least `body_limit`.
    pub body_memory: usize,
    /// Origins whose web pages may call, such as `https://app.example`; `*` for any; empty for none.
    pub cors: Vec<String>,
    /// Pause after which a silent stream gets a comment.
    pub keep_alive: Duration,
}

impl Default for ApiConfig {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            body_limit: 16 << 20,
            body_memory: 512 << 20,
            cors: Vec::new(),
            keep_alive: Duration::from_secs(10),
        }
    }
}

/// Why an API cannot be made for a model.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// The texts of the control tokens are too many or too long to be searched for.
    #[error("the control tokens of model `{model}` cannot be searched for: {source}")]
    Specials {
        /// The model's name.
        model: String,
        /// The searcher's words.
        source: aho_corasick::BuildError,
    },
    /// `cors` names something that no browser sends.
    #[error("`{0}` is no origin; write it as browsers do, such as `https://app.example`, or `*` for any")]
    Origin(String),
    /// An empty key would let everyone in.
    #[error("API key number {0} (from 0) is empty; remove it or fill it in")]
    EmptyKey(usize),
}

/// The API's state.
pub(crate) struct App {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) config: ApiConfig,
    pub(crate) stats: Arc<Stats>,
    pub(crate) specials: Specials,
    pub(crate) memo: Memo,
    /// Most bytes of text that one token stands for, at least 1.
    pub(crate) longest_token: usize,
    /// KiB left for bodies.
    pub(crate) bodies: Arc<Semaphore>,
    /// Requests that are prepared at once: rendered, tokenized, checked.
    pub(crate) preparing: Arc<Semaphore>,
    /// The same for what generates nothing.
    pub(crate) other: Arc<Semaphore>,
    /// Or why there is none, for the client.
    template: Result<ChatTemplate, String>,
    /// Hashes, so that comparing takes the same time whatever the key.
    keys: Vec<blake3::Hash>,
}

impl App {
    /// Compiles what the model brings. A template that does not compile leaves `/v1/completions` usable.
    pub(crate) fn new(backend: Arc<dyn Backend>, config: ApiConfig) -> Result<Self, SetupError> {
        if let Some(i) = config.api_keys.iter().position(String::is_empty) {
            return Err(SetupError::EmptyKey(i));
        }
        let keys = config.api_keys.iter().map(|k| blake3::hash(k.as_bytes())).collect();
        let card = backend.card();
        let specials = Specials::new(&card.special_tokens)
            .map_err(|source| SetupError::Specials { model: card.id.clone(), source })?;
        let template = match &card.chat_template {
            Some(source) => ChatTemplate::new(source, card).map_err(|e| {
                tracing::error!(error = %e, "the model's chat template does not compile; chat is refused");
                format!("The model's chat template does not compile ({e}); use /v1/completions.")
            }),
            None => Err("The model has no chat template; use /v1/completions.".to_owned()),
        };
        let tokens = 0..i32::try_from(card.n_vocab).unwrap_or(i32::MAX);
        let longest_token = tokens.map(|t| backend.token_bytes(t).len()).max().unwrap_or(0).max(1);
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        let bodies = config.body_memory.max(config.body_limit) / 1024 + 1;
        Ok(Self {
            memo: Memo::default(),
            longest_token,
            bodies: Arc::new(Semaphore::new(bodies.min(Semaphore::MAX_PERMITS))),
            preparing: Arc::new(Semaphore::new(cores)),
            // A long text to be counted must not hold up prompts.
            other: Arc::new(Semaphore::new(cores.div_ceil(2))),
            backend,
            config,
            stats: Arc::new(Stats::new()),
            specials,
            template,
            keys,
        })
    }

    /// The model's facts.
    pub(crate) fn card(&self) -> &ModelCard {
        self.backend.card()
    }

    /// The chat template.
    pub(crate) fn template(&self) -> Result<&ChatTemplate, ApiError> {
        self.template
            .as_ref()
            .map_err(|why| ApiError::new(ErrorClass::NotImplemented, why.as_str()).with_code("no_chat_template"))
    }

    /// Whether a request with this `Authorization` may go on.
    pub(crate) fn allows(&self, authorization: Option<&str>) -> bool {
        if self.keys.is_empty() {
            return true;
        }
        let Some((scheme, key)) = authorization.and_then(|a| a.trim().split_once(' ')) else { return false };
        let hash = blake3::hash(key.trim().as_bytes());
        // No early end: which key matched shows in no time.
        scheme.eq_ignore_ascii_case("bearer") && self.keys.iter().fold(false, |found, k| found | (*k == hash))
    }
}
