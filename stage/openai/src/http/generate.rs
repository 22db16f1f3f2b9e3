//! `/v1/chat/completions` and `/v1/completions`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Extension;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use tokio::time::timeout;

use crate::answer::{Answer, Job, Step};
use crate::app::App;
use crate::error::ApiError;
use crate::http::body;
use crate::http::layers::Arrival;
use crate::http::reply::{Reply, Shape};
use crate::prepare::{self, off_thread};
use crate::serve::HalfClosed;
use crate::types::chat::ChatRequest;
use crate::types::completion::CompletionRequest;

/// The comment of a silent stream.
const KEEP_ALIVE: &str = "keep-alive";

struct Prepared {
    job: Job,
    shape: Shape,
    stream: bool,
    include_usage: bool,
}

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    request: Request,
) -> Result<Response, ApiError> {
    let half_closed = request.extensions().get().cloned();
    let body = body::read(request, &app).await?;
    let prepared = off_thread(&app, &app.preparing, move |app, asker| {
        let body = body.json()?;
        let request = ChatRequest::read(&body, app.card())?;
        let (stream, include_usage) = (request.common.stream, request.common.include_usage);
        let job = prepare::chat(app, request, &arrival, asker)?;
        Ok(Prepared { job, shape: Shape::Chat, stream, include_usage })
    });
    let prepared = prepared.await?;
    answer(app, prepared, half_closed).await
}

/// `POST /v1/completions`.
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    request: Request,
) -> Result<Response, ApiError> {
    let half_closed = request.extensions().get().cloned();
    let body = body::read(request, &app).await?;
    let prepared = off_thread(&app, &app.preparing, move |app, asker| {
        let body = body.json()?;
        let request = CompletionRequest::read(&body, app.card())?;
        let (stream, include_usage) = (request.common.stream, request.common.include_usage);
        let (job, echoes) = prepare::completion(app, request, &arrival, asker)?;
        Ok(Prepared { job, shape: Shape::Completion { echoes }, stream, include_usage })
    });
    let prepared = prepared.await?;
    answer(app, prepared, half_closed).await
}

async fn answer(app: Arc<App>, prepared: Prepared, half_closed: Option<HalfClosed>) -> Result<Response, ApiError> {
    let Prepared { job, shape, stream, include_usage } = prepared;
    let mut reply = Reply::new(app.clone(), shape, job.requests.len(), job.logprobs, include_usage);
    let mut answer = Answer::submit(app.clone(), job)?;
    if !stream {
        let mut steps = Vec::new();
        while let Some(step) = answer.next().await {
            match step {
                Step::Failed(error) => return Err(error),
                step => steps.push(step),
            }
        }
        let json = reply.whole(steps, answer.usage())?;
        return Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response());
    }
    // What fails before the first lane is had fails as plain HTTP; a long queue is waited out with comments.
    let first = match timeout(app.config.keep_alive, answer.next()).await {
        Ok(Some(Step::Failed(error))) => return Err(error),
        Ok(first) => first,
        Err(_) => None,
    };
    let keep_alive = KeepAlive::new().interval(app.config.keep_alive).text(KEEP_ALIVE);
    let live = Live { answer, reply, first, half_closed, ended: false };
    let sse = Sse::new(events(live)).keep_alive(keep_alive);
    let no_buffering = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(([no_buffering], sse).into_response())
}

/// Where a stream is.
struct Live {
    answer: Answer,
    reply: Reply,
    first: Option<Step>,
    /// Tells that the client sends no more, until it was asked whether it is there.
    half_closed: Option<HalfClosed>,
    ended: bool,
}

enum Next {
    Step(Option<Step>),
    /// A comment shows whether the client is there: its socket resets the connection if not.
    Ask,
}

impl Live {
    async fn next(&mut self) -> Next {
        if let Some(step) = self.first.take() {
            return Next::Step(Some(step));
        }
        let Some(half_closed) = &mut self.half_closed else { return Next::Step(self.answer.next().await) };
        tokio::select! {
            biased;
            step = self.answer.next() => Next::Step(step),
            () = half_closed.wait() => {
                self.half_closed = None;
                Next::Ask
            }
        }
    }
}

fn events(live: Live) -> impl Stream<Item = Result<Event, Infallible>> {
    let batches = stream::unfold(live, |mut live| async move {
        if live.ended {
            return None;
        }
        let chunks = match live.next().await {
            Next::Ask => return Some((stream::iter(vec![Ok(Event::default().comment(KEEP_ALIVE))]), live)),
            Next::Step(Some(step)) => live.reply.chunks(step),
            Next::Step(None) => {
                live.ended = true;
                live.reply.usage_chunk(live.answer.usage()).map(|usage| usage.into_iter().collect())
            }
        };
        let mut events: Vec<_> = match chunks {
            Ok(chunks) => chunks.into_iter().map(|json| Ok(Event::default().data(json))).collect(),
            Err(error) => {
                live.ended = true;
                vec![Ok(error_event(&error))]
            }
        };
        if live.ended {
            events.push(Ok(Event::default().data("[DONE]")));
        }
        Some((stream::iter(events), live))
    });
    batches.flatten()
}

/// The error body as an event; OpenAI's clients raise on it.
fn error_event(error: &ApiError) -> Event {
    let json = serde_json::to_string(&error.body()).unwrap_or_default();
    Event::default().data(json)
}
