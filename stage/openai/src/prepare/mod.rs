//! Checked requests to jobs: prompts are rendered, tokenized and measured, grammars checked. Runs off the async threads.

mod memo;
mod off_thread;
mod tokens;

use splitmodel_sampling::GrammarSpec;
use uuid::Uuid;

pub(crate) use memo::Memo;
pub(crate) use off_thread::{Asker, off_thread};
pub(crate) use tokens::Tokens;

use crate::answer::Job;
use crate::app::App;
use crate::backend::{GenerateRequest, Token};
use crate::error::ApiError;
use crate::http::Arrival;
use crate::observe::Operation;
use crate::template::PromptPart;
use crate::types::chat::ChatRequest;
use crate::types::common::Common;
use crate::types::completion::{CompletionRequest, Prompt};

/// Most bytes of a request's generation config as JSON. Every stage gets it inside a frame, whose room is limited.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// A chat's job.
pub(crate) fn chat(app: &App, request: ChatRequest, arrival: &Arrival, asker: &Asker) -> Result<Job, ApiError> {
    let field = "messages";
    let parts = app.template()?.render(&request, &app.specials)?;
    let mut prompt = Tokens::prompt(app, asker, field, &request.common);
    let text = |part: &PromptPart| if let PromptPart::Text(text) = part { text.len() } else { 0 };
    prompt.bytes_fit(parts.iter().map(text).sum())?;
    for part in &parts {
        match part {
            PromptPart::Special(token) => prompt.special(*token),
            PromptPart::Text(text) => prompt.text(text)?,
        }
    }
    // Templates write BOS themselves or leave it to the tokenizer; it stands there once.
    let prompt = prompt.finish(true);
    let shape = Shape { operation: Operation::Chat, field, logprobs: request.logprobs, arrival };
    job(app, request.common, vec![prompt], shape)
}

/// A completion's job, and what `echo` puts before each choice's text.
pub(crate) fn completion(
    app: &App,
    request: CompletionRequest,
    arrival: &Arrival,
    asker: &Asker,
) -> Result<(Job, Vec<String>), ApiError> {
    let field = "prompt";
    let (mut prompts, mut echoes) = (Vec::new(), Vec::new());
    for prompt in request.prompts {
        let (tokens, text) = match prompt {
            Prompt::Text(text) => {
                let mut tokens = Tokens::prompt(app, asker, field, &request.common);
                tokens.with_specials(&text)?;
                (tokens.finish(true), text)
            }
            Prompt::Tokens(tokens) => {
                let text = if request.echo { detokenize(app, &tokens) } else { String::new() };
                (tokens, text)
            }
        };
        if request.echo {
            echoes.extend((0..request.common.n).map(|_| text.clone()));
        }
        prompts.push(tokens);
    }
    let shape = Shape { operation: Operation::Completion, field, logprobs: request.logprobs, arrival };
    Ok((job(app, request.common, prompts, shape)?, echoes))
}

/// The text of tokens, control tokens as they are written.
pub(crate) fn detokenize(app: &App, tokens: &[Token]) -> String {
    let bytes: Vec<u8> = tokens.iter().flat_map(|t| app.backend.token_bytes(*t)).copied().collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

struct Shape<'a> {
    operation: Operation,
    /// Where the prompt came from, for errors.
    field: &'static str,
    logprobs: bool,
    arrival: &'a Arrival,
}

fn job(app: &App, common: Common, prompts: Vec<Vec<Token>>, shape: Shape<'_>) -> Result<Job, ApiError> {
    let n_ctx = app.card().n_ctx;
    let bytes = serde_json::to_vec(&common.config).map_or(0, |json| json.len());
    if bytes > MAX_CONFIG_BYTES {
        let message = format!(
            "`response_format` and `logit_bias` take {bytes} bytes together; at most {MAX_CONFIG_BYTES} are accepted."
        );
        return Err(ApiError::invalid("response_format", message));
    }
    if let Some(grammar) = &common.config.grammar {
        let field = match grammar {
            GrammarSpec::JsonSchema(_) => "response_format.json_schema.schema",
            _ => "response_format",
        };
        let refused = |why| ApiError::invalid(field, format!("`{field}` cannot be enforced: {why}"));
        app.backend.check_grammar(grammar).map_err(refused)?;
    }
    let mut requests = Vec::new();
    for prompt in prompts {
        if prompt.is_empty() {
            let message = format!("`{}` has no tokens; this model needs at least one.", shape.field);
            return Err(ApiError::invalid(shape.field, message));
        }
        if prompt.len() >= n_ctx as usize {
            return Err(ApiError::context_length(shape.field, prompt.len(), n_ctx));
        }
        // `max_tokens` is a limit, not a wish: a full context ends with `length` as well.
        let room = n_ctx - prompt.len() as u32;
        let max_tokens = common.max_tokens.map_or(room, |m| u32::try_from(m).unwrap_or(u32::MAX).min(room));
        for _ in 0..common.n {
            let index = requests.len() as u32;
            let mut config = common.config.clone();
            config.prompt_tokens = prompt.len() as u32;
            config.seed = common.seed.map_or_else(random, |seed| seed.wrapping_add(u64::from(index)));
            requests.push(GenerateRequest {
                prompt: prompt.clone(),
                config,
                logprobs: shape.logprobs,
                max_tokens,
                request_id: shape.arrival.id.clone(),
                index,
                cache_key: common.cache_key.clone(),
                tenant: common.tenant.clone(),
                received: shape.arrival.received,
                trace: shape.arrival.trace,
                operation: shape.operation.name(),
            });
        }
    }
    Ok(Job {
        operation: shape.operation,
        received: shape.arrival.received,
        requests,
        per_prompt: common.n as usize,
        stop: common.stop,
        logprobs: shape.logprobs,
    })
}

fn random() -> u64 {
    let (high, low) = Uuid::new_v4().as_u64_pair();
    // Each half has fixed bits of its own; together none is.
    high ^ low.rotate_left(32)
}
