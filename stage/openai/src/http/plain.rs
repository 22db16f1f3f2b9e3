//! Routes that generate nothing.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::app::App;
use crate::backend::Readiness;
use crate::error::{ApiError, ErrorClass};
use crate::http::body;
use crate::prepare::{self, Tokens, off_thread};
use crate::types::common::check_model;
use crate::types::completion::tokens;
use crate::types::read;

/// The type of `/metrics`.
pub(crate) const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Debug, Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Tokens of one request; other servers' name for it.
    max_model_len: u32,
}

fn entry<'a>(app: &'a App, id: &'a str) -> Model<'a> {
    let card = app.card();
    Model { id, object: "model", created: card.created, owned_by: "splitmodel", max_model_len: card.n_ctx }
}

/// `GET /v1/models`: the model, then its aliases.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Response {
    let card = app.card();
    let names = std::iter::once(&card.id).chain(&card.aliases);
    let data: Vec<Model<'_>> = names.map(|id| entry(&app, id)).collect();
    Json(json!({"object": "list", "data": data})).into_response()
}

/// `GET /v1/models/{id}`.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let Path(id) = id.map_err(|e| ApiError::new(ErrorClass::InvalidRequest, e.body_text()))?;
    check_model(Some(&id), app.card())?;
    Ok(Json(entry(&app, &id)).into_response())
}

#[derive(Debug, Deserialize)]
struct Tokenize {
    model: Option<String>,
    content: Option<String>,
    prompt: Option<String>,
    add_special: Option<bool>,
    add_special_tokens: Option<bool>,
    parse_special: Option<bool>,
}

/// `POST /tokenize`: `{"content": text}` to `{"tokens": [ids]}`.
pub(crate) async fn tokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::read(request, &app).await?;
    off_thread(&app, &app.other, move |app, asker| {
        let body = body.json()?;
        let raw: Tokenize = read(&body)?;
        check_model(raw.model.as_deref(), app.card())?;
        let text = raw.content.or(raw.prompt);
        let text = text.ok_or_else(|| ApiError::invalid("content", "`content` is required."))?;
        let mut tokens = Tokens::any(app, asker);
        if raw.parse_special.unwrap_or(true) {
            tokens.with_specials(&text)?;
        } else {
            tokens.text(&text)?;
        }
        let tokens = tokens.finish(raw.add_special.or(raw.add_special_tokens).unwrap_or(false));
        Ok(Json(json!({"count": tokens.len(), "max_model_len": app.card().n_ctx, "tokens": tokens})))
    })
    .await
}

#[derive(Debug, Deserialize)]
struct Detokenize {
    model: Option<String>,
    tokens: Vec<Value>,
}

/// `POST /detokenize`: `{"tokens": [ids]}` to `{"content": text}`.
pub(crate) async fn detokenize(State(app): State<Arc<App>>, request: Request) -> Result<Json<Value>, ApiError> {
    let body = body::read(request, &app).await?;
    off_thread(&app, &app.other, move |app, _| {
        let body = body.json()?;
        let raw: Detokenize = read(&body)?;
        check_model(raw.model.as_deref(), app.card())?;
        let tokens = tokens("tokens", &raw.tokens, app.card())?;
        Ok(Json(json!({"content": prepare::detokenize(app, &tokens)})))
    })
    .await
}

/// `GET /health`: the process answers.
pub(crate) async fn health() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// `GET /ready`: the whole chain can answer.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.backend.readiness() {
        Readiness::Ready => Json(json!({"status": "ready"})).into_response(),
        Readiness::NotReady(reason) => {
            let body = Json(json!({"status": "not ready", "reason": reason}));
            (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], body).into_response()
        }
    }
}

/// `GET /metrics` in OpenMetrics text.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let text = app.stats.render(&app.backend.metrics());
    let text = text.map_err(|e| ApiError::internal(format!("The metrics cannot be written: {e}.")))?;
    Ok(([(header::CONTENT_TYPE, METRICS_TYPE)], text).into_response())
}
