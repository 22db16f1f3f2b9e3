//! Metrics and the operator's own probes.

use std::sync::Arc;

use axum::Router;
use axum::extract::State as Extract;
use axum::http::{StatusCode, header};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::reconcile::Context;
use crate::run::State;

/// Prometheus' text format.
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves `/metrics`, `/healthz` and `/readyz` until `stop`.
///
/// # Errors
/// Of the system.
pub async fn serve(
    listener: TcpListener,
    context: Arc<Context>,
    state: watch::Receiver<State>,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let metrics = get(|Extract(context): Extract<Arc<Context>>| async move {
        ([(header::CONTENT_TYPE, CONTENT_TYPE)], context.metrics.render())
    });
    let ready = get(move || {
        let now = *state.borrow();
        async move {
            let (code, word) = match now {
                State::NoCrd => (StatusCode::SERVICE_UNAVAILABLE, "waiting for the definition of SplitModels\n"),
                State::Standby => (StatusCode::OK, "standing by\n"),
                State::Listing => (StatusCode::OK, "listing\n"),
                State::Leading => (StatusCode::OK, "leading\n"),
            };
            (code, word)
        }
    });
    let router = Router::new()
        .route("/metrics", metrics)
        .route("/healthz", get(|| std::future::ready("alive\n")))
        .route("/readyz", ready)
        .with_state(context);
    axum::serve(listener, router)
        .with_graceful_shutdown(async move {
            let _ = stop.wait_for(|s| *s).await; // its sender lives as long as the process
        })
        .await
}
