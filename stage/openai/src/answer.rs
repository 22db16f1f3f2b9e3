//! One answer: the generations of its choices, merged and decoded. Streaming and plain answers both come from here.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::app::App;
use crate::backend::{EndReason, GenEvent, GenerateRequest, Generation, SubmitError};
use crate::error::{ApiError, ErrorClass};
use crate::observe::{Operation, Record};
use crate::text::{Piece, TextDecoder};
use crate::types::response::{Finish, Usage};

/// What to generate.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) operation: Operation,
    /// When the HTTP request arrived.
    pub(crate) received: Instant,
    /// One for each choice; `per_prompt` choices of one prompt follow each other.
    pub(crate) requests: Vec<GenerateRequest>,
    pub(crate) per_prompt: usize,
    pub(crate) stop: Vec<String>,
    pub(crate) logprobs: bool,
}

/// What happens to an answer.
#[derive(Debug, PartialEq)]
pub(crate) enum Step {
    /// A choice left the queue.
    Started,
    /// Text (and tokens, where log-probabilities are wanted) of a choice.
    Piece(u32, Piece),
    /// A choice ended; nothing more comes of it.
    Finish(u32, Finish),
    /// The whole answer failed; nothing follows.
    Failed(ApiError),
}

struct Choice {
    /// Gone when the choice ended; dropping it frees the lane.
    generation: Option<Generation>,
    decoder: TextDecoder,
    /// The first choice of its prompt, whose cached tokens count.
    leads: bool,
}

/// An admitted answer. Dropping it cancels what still runs.
pub(crate) struct Answer {
    app: Arc<App>,
    choices: Vec<Choice>,
    ready: VecDeque<Step>,
    record: Record,
    turn: usize,
}

impl Answer {
    /// Admits all choices of `job`, or none.
    pub(crate) fn submit(app: Arc<App>, job: Job) -> Result<Self, ApiError> {
        let prompt_tokens = job.requests.iter().step_by(job.per_prompt.max(1)).map(|r| r.prompt.len() as u64).sum();
        let mut choices = Vec::with_capacity(job.requests.len());
        for (i, request) in job.requests.into_iter().enumerate() {
            let generation = app.backend.submit(request).map_err(refused)?;
            let decoder = TextDecoder::new(&job.stop, job.logprobs);
            choices.push(Choice { generation: Some(generation), decoder, leads: i % job.per_prompt.max(1) == 0 });
        }
        let record = Record::new(app.stats.clone(), job.operation, choices.len(), prompt_tokens, job.received);
        Ok(Self { app, choices, ready: VecDeque::new(), record, turn: 0 })
    }

    /// The next step; `None` after the end. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> Option<Step> {
        poll_fn(|cx| self.poll(cx)).await
    }

    /// Tokens so far.
    pub(crate) fn usage(&self) -> Usage {
        self.record.usage()
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Step>> {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return Poll::Ready(Some(step));
            }
            let n = self.choices.len();
            let mut open = false;
            let mut event = None;
            for k in 0..n {
                let i = (self.turn + k) % n;
                let Some(generation) = &mut self.choices[i].generation else { continue };
                open = true;
                if let Poll::Ready(next) = generation.poll_next(cx) {
                    event = Some((i, next));
                    break;
                }
            }
            match event {
                Some((i, next)) => {
                    self.turn = i + 1;
                    self.take(i, next);
                }
                None if open => return Poll::Pending,
                None => return Poll::Ready(None),
            }
        }
    }

    fn take(&mut self, i: usize, event: Option<GenEvent>) {
        let index = i as u32;
        match event {
            Some(GenEvent::Started { cached_tokens }) => {
                if self.choices[i].leads {
                    self.record.cached(cached_tokens);
                }
                self.ready.push_back(Step::Started);
            }
            Some(GenEvent::Token(token)) => {
                self.record.token(i);
                // Control tokens have no text of their own in an answer.
                let hidden = self.app.specials.contains(token.token);
                let bytes = if hidden { &[] } else { self.app.backend.token_bytes(token.token) };
                let piece = self.choices[i].decoder.push(token, bytes);
                self.give(index, piece);
            }
            Some(GenEvent::Done(reason)) => {
                if let EndReason::Stop(Some(_)) = reason {
                    self.record.token(i);
                }
                let piece = self.choices[i].decoder.finish();
                if !self.give(index, piece) {
                    let finish = if reason == EndReason::Length { Finish::Length } else { Finish::Stop };
                    self.end(index, finish);
                }
            }
            Some(GenEvent::Failed(error)) => self.fail(error),
            None => self.fail(ApiError::internal("The generation ended without a reason. Try again.")),
        }
    }

    /// Queues a piece; true when a stop string ended the choice with it.
    fn give(&mut self, index: u32, piece: Piece) -> bool {
        let stopped = piece.stopped;
        if !piece.text.is_empty() || !piece.tokens.is_empty() {
            self.ready.push_back(Step::Piece(index, piece));
        }
        if stopped {
            self.end(index, Finish::Stop);
        }
        stopped
    }

    fn end(&mut self, index: u32, reason: Finish) {
        self.choices[index as usize].generation = None;
        if self.choices.iter().all(|c| c.generation.is_none()) {
            self.record.finished(reason);
        }
        self.ready.push_back(Step::Finish(index, reason));
    }

    fn fail(&mut self, error: ApiError) {
        self.choices.iter_mut().for_each(|c| c.generation = None);
        self.record.failed();
        tracing::warn!(class = error.class.label(), error = %error, "answer failed");
        self.ready.push_back(Step::Failed(error));
    }
}

fn refused(error: SubmitError) -> ApiError {
    let message = error.to_string();
    match error {
        SubmitError::Busy { retry_after } => {
            ApiError::new(ErrorClass::RateLimit, message).with_retry_after(retry_after)
        }
        SubmitError::Unavailable { retry_after, .. } => {
            ApiError::new(ErrorClass::Unavailable, message).with_retry_after(retry_after)
        }
        SubmitError::Rejected(error) => error,
    }
}
