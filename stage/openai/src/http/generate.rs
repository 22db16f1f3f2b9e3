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
use crate::prepare;
use crate::types::chat::ChatRequest;
use crate::types::completion::CompletionRequest;

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
    let body = body::read(request, app.config.body_limit).await?;
    let prepared = off_thread(&app, move |app| {
        let body = body.json()?;
        let request = ChatRequest::read(&body, app.card())?;
        let (stream, include_usage) = (request.common.stream, request.common.include_usage);
        let job = prepare::chat(app, request, &arrival)?;
        Ok(Prepared { job, shape: Shape::Chat, stream, include_usage })
    });
    answer(app.clone(), prepared.await?).await
}

/// `POST /v1/completions`.
pub(crate) async fn completion(
    State(app): State<Arc<App>>,
    Extension(arrival): Extension<Arrival>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = body::read(request, app.config.body_limit).await?;
    let prepared = off_thread(&app, move |app| {
        let body = body.json()?;
        let request = CompletionRequest::read(&body, app.card())?;
        let (stream, include_usage) = (request.common.stream, request.common.include_usage);
        let (job, echoes) = prepare::completion(app, request, &arrival)?;
        Ok(Prepared { job, shape: Shape::Completion { echoes }, stream, include_usage })
    });
    answer(app.clone(), prepared.await?).await
}

/// Runs work that takes a while on long inputs where it holds up nobody.
pub(crate) async fn off_thread<T: Send + 'static>(
    app: &Arc<App>,
    work: impl FnOnce(&App) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let app = app.clone();
    let span = tracing::Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(|| work(&app)))
        .await
        .map_err(|_| ApiError::internal("The request could not be prepared. Try again."))?
}

async fn answer(app: Arc<App>, prepared: Prepared) -> Result<Response, ApiError> {
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
    let keep_alive = KeepAlive::new().interval(app.config.keep_alive).text("keep-alive");
    let sse = Sse::new(events(answer, reply, first)).keep_alive(keep_alive);
    let no_buffering = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    Ok(([no_buffering], sse).into_response())
}

/// Where a stream is.
struct Live {
    answer: Answer,
    reply: Reply,
    first: Option<Step>,
    ended: bool,
}

fn events(answer: Answer, reply: Reply, first: Option<Step>) -> impl Stream<Item = Result<Event, Infallible>> {
    let live = Live { answer, reply, first, ended: false };
    let batches = stream::unfold(live, |mut live| async move {
        if live.ended {
            return None;
        }
        let step = match live.first.take() {
            Some(step) => Some(step),
            None => live.answer.next().await,
        };
        let chunks = match step {
            Some(step) => live.reply.chunks(step),
            None => {
                live.ended = true;
                live.reply.usage_chunk(live.answer.usage()).map(|usage| usage.into_iter().collect())
            }
        };
        let mut events: Vec<Event> = match chunks {
            Ok(chunks) => chunks.into_iter().map(|json| Event::default().data(json)).collect(),
            Err(error) => {
                live.ended = true;
                vec![error_event(&error)]
            }
        };
        if live.ended {
            events.push(Event::default().data("[DONE]"));
        }
        Some((stream::iter(events.into_iter().map(Ok)), live))
    });
    batches.flatten()
}

/// The error body as an event; OpenAI's clients raise on it.
fn error_event(error: &ApiError) -> Event {
    let json = serde_json::to_string(&error.body()).unwrap_or_default();
    Event::default().data(json)
}
