//! What the HTTP API sees of the chain.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use splitmodel_cache::{Fingerprint, Identity};
use splitmodel_chain::scheduler::{AdmissionError, Request};
use splitmodel_engine::Tokenizer;
use splitmodel_openai::{
    ApiError, Backend, GenerateRequest, Generation, GrammarSpec, ModelCard, Readiness, SpecialToken, SubmitError, Token,
};
use splitmodel_sampling::GrammarFactory;

use crate::coordinator::{Client, Coordinator, Refused};
use crate::load::Vocabulary;
use crate::metrics::Metrics;
use crate::telemetry::Telemetry;

/// Seconds a client should wait before it tries again when no lane is free.
const RETRY_AFTER: u32 = 2;

/// See the module.
pub struct ChainBackend {
    card: ModelCard,
    tokenizer: Arc<Tokenizer>,
    pieces: Pieces,
    grammars: GrammarFactory,
    coordinator: Arc<Coordinator>,
    identity: Identity,
    metrics: Arc<Metrics>,
    telemetry: Telemetry,
}

/// The bytes of every token, special ones as they are written.
struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Pieces {
    fn new(tokenizer: &Tokenizer) -> Self {
        let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(tokenizer.n_vocab()));
        for id in 0..i32::try_from(tokenizer.n_vocab()).unwrap_or(i32::MAX) {
            tokenizer.append_bytes(id, true, &mut bytes);
            ends.push(bytes.len());
        }
        Self { bytes, ends }
    }

    fn get(&self, token: Token) -> &[u8] {
        let Some((at, end)) = usize::try_from(token).ok().and_then(|i| self.ends.get(i).map(|e| (i, *e))) else {
            return &[];
        };
        let start = at.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[start..end]
    }
}

/// What the API shows of the model besides its vocabulary.
#[derive(Clone, Debug)]
pub struct Presentation {
    /// Name of the model.
    pub id: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// Tokens of one session.
    pub n_ctx: u32,
    /// Chat template of the model.
    pub chat_template: Option<String>,
    /// What its prefixes depend on.
    pub identity: Identity,
}

impl ChainBackend {
    /// A backend over a chain.
    pub fn new(
        presentation: Presentation,
        Vocabulary { tokenizer, grammars }: Vocabulary,
        coordinator: Arc<Coordinator>,
        (metrics, telemetry): (Arc<Metrics>, Telemetry),
    ) -> Self {
        let pieces = Pieces::new(&tokenizer);
        let special = |id: Option<Token>| {
            id.map(|id| SpecialToken { text: String::from_utf8_lossy(pieces.get(id)).into_owned(), id })
        };
        let created = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let card = ModelCard {
            id: presentation.id,
            aliases: presentation.aliases,
            created,
            n_ctx: presentation.n_ctx,
            n_vocab: u32::try_from(tokenizer.n_vocab()).unwrap_or(u32::MAX),
            chat_template: presentation.chat_template,
            bos: special(tokenizer.bos()),
            eos: special(tokenizer.eos()),
            add_bos: tokenizer.add_bos(),
            eog: tokenizer.eog().to_vec(),
            special_tokens: tokenizer
                .special_tokens()
                .iter()
                .filter(|t| t.control)
                .map(|t| SpecialToken { text: t.text.clone(), id: t.id })
                .collect(),
            media: false,
        };
        let identity = presentation.identity;
        Self { card, tokenizer, pieces, grammars, coordinator, identity, metrics, telemetry }
    }
}

impl Backend for ChainBackend {
    fn card(&self) -> &ModelCard {
        &self.card
    }

    fn tokenize(&self, text: &str, add_special: bool) -> Result<Vec<Token>, ApiError> {
        self.tokenizer.tokenize(text, add_special, false).map_err(|e| ApiError::invalid("content", e.to_string()))
    }

    fn token_bytes(&self, token: Token) -> &[u8] {
        self.pieces.get(token)
    }

    fn check_grammar(&self, spec: &GrammarSpec) -> Result<(), String> {
        self.grammars.check(spec).map_err(|e| e.to_string())
    }

    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        let config = serde_json::to_vec(&request.config)
            .map_err(|e| SubmitError::Rejected(ApiError::internal(format!("the generation config: {e}"))))?;
        let id = Arc::new(OnceLock::new());
        let (coordinator, at_end) = (self.coordinator.clone(), id.clone());
        let (sender, generation) = Generation::channel(request.max_tokens, move || {
            if let Some(id) = at_end.get() {
                coordinator.cancel(*id);
            }
        });
        let mut trace = self.telemetry.request(&request);
        let begun = Instant::now();
        let namespace = self.identity.namespace(request.cache_key.as_deref(), request.tenant.as_deref());
        let replayable = if request.logprobs { None } else { request.config.deterministic() };
        let fingerprint = replayable.map(|bytes| Fingerprint::of(&bytes));
        if let Some(trace) = trace.as_mut().filter(|_| self.telemetry.details()) {
            trace.identified(1 + u64::from(fingerprint.is_some()), begun.elapsed());
        }
        let client = Client { sender, received: request.received, trace };
        let request_id = request.request_id;
        let request = Request {
            prompt: request.prompt,
            config,
            max_tokens: request.max_tokens as usize,
            eog: request.config.eog,
            logprobs: request.logprobs,
            trace: None,
            namespace,
            alone: false,
            fingerprint,
        };
        match self.coordinator.submit(request, client) {
            Ok(session) => {
                tracing::debug!(session, %request_id, "admitted");
                // Nobody else sets it.
                let _ = id.set(session);
                Ok(generation)
            }
            Err(Refused::Admission(AdmissionError::QueueFull(_))) => {
                Err(SubmitError::Busy { retry_after: RETRY_AFTER })
            }
            Err(Refused::Draining) => {
                let reason = Refused::Draining.to_string();
                Err(SubmitError::Unavailable { reason, retry_after: RETRY_AFTER })
            }
            Err(refused @ Refused::Admission(_)) => {
                let field = match refused {
                    Refused::Admission(AdmissionError::ConfigTooLarge { .. }) => "response_format",
                    _ => "prompt",
                };
                Err(SubmitError::Rejected(ApiError::invalid(field, refused.to_string())))
            }
        }
    }

    fn readiness(&self) -> Readiness {
        if *self.coordinator.ready().borrow() {
            Readiness::Ready
        } else {
            Readiness::NotReady("no token has crossed the whole chain; see the stages' control services".to_owned())
        }
    }

    fn metrics(&self) -> String {
        self.metrics.render()
    }
}
