//! Keys, request ids, spans and counts.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;
use uuid::Uuid;

use crate::app::App;
use crate::error::{ApiError, ErrorClass};
use crate::http::{REQUEST_ID, is_open};
use crate::trace::{self, TraceParent};

/// What is known of a request from its headers.
#[derive(Debug, Clone)]
pub(crate) struct Arrival {
    /// From the client or made here.
    pub(crate) id: String,
    /// When the headers were here.
    pub(crate) received: Instant,
    /// Where the client's trace goes on.
    pub(crate) trace: Option<TraceParent>,
}

/// 401 for requests without a key, before any of their body is read.
pub(crate) async fn authorize(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).and_then(|v| v.to_str().ok());
    if is_open(request.uri().path()) || app.allows(given) {
        return next.run(request).await;
    }
    let message = match given {
        Some(_) => "The API key is wrong. Send it as `Authorization: Bearer KEY`.",
        None => "An API key is needed. Send it as `Authorization: Bearer KEY`.",
    };
    ApiError::new(ErrorClass::Authentication, message).with_code("invalid_api_key").into_response()
}

/// Gives the request an id and a span, counts the response.
pub(crate) async fn observe(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let received = Instant::now();
    let id = client_id(request.headers());
    let trace = trace_parent(request.headers());
    request.extensions_mut().insert(Arrival { id: id.clone(), received, trace });
    let route = request.extensions().get::<MatchedPath>().map_or("other", MatchedPath::as_str).to_owned();
    let span = tracing::info_span!("request", id, method = %request.method(), route);
    let mut response = next.run(request).instrument(span.clone()).await;
    let error = response.extensions().get::<ApiError>().map(|e| e.class);
    let status = response.status().as_u16();
    app.stats.response(&route, status, error);
    let elapsed_ms = received.elapsed().as_millis() as u64;
    span.in_scope(|| tracing::debug!(status, error = error.map(ErrorClass::label), elapsed_ms, "response begun"));
    set_id(&mut response, &id);
    response
}

/// Gives the response the request's id, and nothing else.
pub(crate) async fn name(request: Request, next: Next) -> Response {
    let id = client_id(request.headers());
    let mut response = next.run(request).await;
    set_id(&mut response, &id);
    response
}

fn set_id(response: &mut Response, id: &str) {
    if let Ok(value) = HeaderValue::from_str(id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
}

/// A client's id is taken if it is short and plain; else one is made.
fn client_id(headers: &HeaderMap) -> String {
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    match given {
        Some(id) if (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic()) => id.to_owned(),
        _ => format!("req_{}", Uuid::new_v4().simple()),
    }
}

/// A client's trace, if it names exactly one.
fn trace_parent(headers: &HeaderMap) -> Option<TraceParent> {
    let mut all = headers.get_all(trace::HEADER).into_iter();
    let first = all.next()?.to_str().ok()?;
    all.next().is_none().then(|| TraceParent::parse(first))?
}
