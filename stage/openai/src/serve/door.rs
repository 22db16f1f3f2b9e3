//! What stands at the port: a waiting room until the model is loaded, then the API.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, middleware};
use serde_json::json;
use tower::ServiceExt;

use crate::app::SetupError;
use crate::error::{ApiError, ErrorClass};
use crate::http::{self, METRICS_TYPE};

/// Seconds after which a client should ask again while the model is loading.
const RETRY_AFTER: u32 = 5;

/// What stands between the process and its first answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Missing {
    /// The phase's name, such as `fetching`.
    pub phase: String,
    /// How much of the phase is done, 0 to 1, where that is known.
    pub progress: Option<f32>,
    /// For people.
    pub reason: String,
}

/// The process before its model is loaded.
pub trait Startup: Send + Sync + 'static {
    /// What is missing now.
    fn missing(&self) -> Missing;

    /// Metrics that exist already, in Prometheus text form without the final `# EOF`.
    fn metrics(&self) -> String;
}

struct Inner {
    waiting: Router,
    open: OnceLock<Router>,
}

/// Answers every request: 503 until it is opened, then with the router it was opened with. Clones are the same door.
#[derive(Clone)]
pub struct Door(Arc<Inner>);

impl std::fmt::Debug for Door {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Door").field("open", &self.0.open.get().is_some()).finish()
    }
}

impl Door {
    /// A closed door. `cors` as in [`crate::ApiConfig`].
    ///
    /// # Errors
    /// [`SetupError::Origin`].
    pub fn new(startup: Arc<dyn Startup>, cors: &[String]) -> Result<Self, SetupError> {
        let mut waiting = Router::new()
            .route("/health", get(http::health))
            .route("/", get(http::health))
            .route("/ready", get(ready))
            .route("/readyz", get(ready))
            .route("/metrics", get(metrics))
            .fallback(unavailable)
            .with_state(startup)
            .layer(middleware::from_fn(http::name));
        if let Some(cors) = http::cors(cors)? {
            waiting = waiting.layer(cors);
        }
        Ok(Self(Arc::new(Inner { waiting, open: OnceLock::new() })))
    }

    /// Requests go to `router` from here on; the first one stays.
    pub fn open(&self, router: Router) {
        if self.0.open.set(router).is_err() {
            tracing::error!("the API was opened twice");
        }
    }

    pub(crate) async fn answer(&self, request: Request) -> Response {
        let router = self.0.open.get().unwrap_or(&self.0.waiting).clone();
        router.oneshot(request).await.unwrap_or_else(|never| match never {})
    }
}

type Process = State<Arc<dyn Startup>>;

async fn ready(State(startup): Process) -> Response {
    let Missing { phase, progress, reason } = startup.missing();
    let body = json!({"status": "not ready", "reason": reason, "phase": phase, "progress": progress});
    (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")], Json(body)).into_response()
}

async fn metrics(State(startup): Process) -> Response {
    let text = startup.metrics();
    ([(header::CONTENT_TYPE, METRICS_TYPE)], format!("{}# EOF\n", text)).into_response()
}

async fn unavailable(State(startup): Process) -> ApiError {
    let message = format!("The model is not loaded yet: {}. Try again in {RETRY_AFTER} s.", startup.missing().reason);
    ApiError::new(ErrorClass::Unavailable, message).with_code("model_loading").with_retry_after(RETRY_AFTER)
}
