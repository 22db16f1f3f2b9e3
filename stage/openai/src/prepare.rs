//! Checked requests to jobs: prompts are rendered, tokenized and measured, grammars checked. Runs off the async threads.

use uuid::Uuid;

use crate::answer::Job;
use crate::app::App;
use crate::backend::{GenerateRequest, Token};
use crate::error::ApiError;
use crate::http::Arrival;
use crate::observe::Operation;
use crate::template::PromptPart;
use crate::template::specials::Segment;
use crate::types::chat::ChatRequest;
use crate::types::common::Common;
use crate::types::completion::{CompletionRequest, Prompt};

/// Most bytes of a request's generation config as JSON. Every stage gets it inside a frame, whose room is limited.
const MAX_CONFIG_BYTES: usize = 1 << 20;

/// A chat's job.
pub(crate) fn chat(app: &App, request: ChatRequest, arrival: &Arrival) -> Result<Job, ApiError> {
    let parts = app.template()?.render(&request, &app.specials)?;
    let mut prompt = Vec::new();
    for part in parts {
        match part {
            PromptPart::Special(token) => prompt.push(token),
            PromptPart::Text(text) => prompt.extend(app.backend.tokenize(&text, false)?),
        }
    }
    // Templates write BOS themselves or leave it to the tokenizer; it stands there once.
    if let (true, Some(bos)) = (app.card().add_bos, &app.card().bos)
        && prompt.first() != Some(&bos.id)
    {
        prompt.insert(0, bos.id);
    }
    job(
        app,
        request.common,
        vec![prompt],
        Shape { operation: Operation::Chat, field: "messages", logprobs: request.logprobs, arrival },
    )
}

/// A completion's job, and what `echo` puts before each choice's text.
pub(crate) fn completion(
    app: &App,
    request: CompletionRequest,
    arrival: &Arrival,
) -> Result<(Job, Vec<String>), ApiError> {
    let (mut prompts, mut echoes) = (Vec::new(), Vec::new());
    for prompt in request.prompts {
        let (tokens, text) = match prompt {
            Prompt::Text(text) => (tokenize(app, &text, true, true)?, text),
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
    let shape = Shape { operation: Operation::Completion, field: "prompt", logprobs: request.logprobs, arrival };
    Ok((job(app, request.common, prompts, shape)?, echoes))
}

/// Tokens of a text whose author writes the whole prompt: control tokens may be in it if `parse_special`.
pub(crate) fn tokenize(app: &App, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<Token>, ApiError> {
    if !parse_special {
        return app.backend.tokenize(text, add_special);
    }
    let mut out = Vec::new();
    for segment in app.specials.split(text) {
        match segment {
            Segment::Special(token) => out.push(token),
            Segment::Text(text) => out.extend(app.backend.tokenize(text, false)?),
        }
    }
    if let (true, true, Some(bos)) = (add_special, app.card().add_bos, &app.card().bos)
        && out.first() != Some(&bos.id)
    {
        out.insert(0, bos.id);
    }
    Ok(out)
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
        app.backend.check_grammar(grammar).map_err(|why| {
            ApiError::invalid("response_format", format!("`response_format` cannot be enforced: {why}"))
        })?;
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
