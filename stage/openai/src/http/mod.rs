//! The router: one table of routes, and the layers around them.

mod body;
mod generate;
mod layers;
mod plain;
mod reply;

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderName, HeaderValue, Method, header};
use axum::middleware;
use axum::routing::{MethodRouter, get, post};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::app::{ApiConfig, App, SetupError};
use crate::backend::Backend;
use crate::error::{ApiError, ErrorClass};

pub(crate) use layers::{Arrival, name};
pub(crate) use plain::{METRICS_TYPE, health};

/// One entry of the table.
struct Route {
    path: &'static str,
    /// Answers without a key.
    open: bool,
    method: fn() -> MethodRouter<Arc<App>>,
}

/// All that is served.
const ROUTES: [Route; 11] = [
    Route { path: "/v1/chat/completions", open: false, method: || post(generate::chat) },
    Route { path: "/v1/completions", open: false, method: || post(generate::completion) },
    Route { path: "/v1/models", open: false, method: || get(plain::models) },
    Route { path: "/v1/models/{*id}", open: false, method: || get(plain::model) },
    Route { path: "/tokenize", open: false, method: || post(plain::tokenize) },
    Route { path: "/detokenize", open: false, method: || post(plain::detokenize) },
    Route { path: "/health", open: true, method: || get(plain::health) },
    Route { path: "/ready", open: true, method: || get(plain::ready) },
    Route { path: "/readyz", open: true, method: || get(plain::ready) },
    Route { path: "/metrics", open: true, method: || get(plain::metrics) },
    Route { path: "/", open: true, method: || get(plain::health) },
];

/// Response and request header that names a request in logs.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The API of `backend` as a router, to be served on any listener.
///
/// # Errors
/// The configuration or the model's vocabulary cannot be used.
pub fn router(backend: Arc<dyn Backend>, config: ApiConfig) -> Result<Router, SetupError> {
    let app = Arc::new(App::new(backend, config)?);
    let mut router = Router::new();
    for route in &ROUTES {
        router = router.route(route.path, (route.method)());
    }
    let mut router = router
        .fallback(async || ApiError::new(ErrorClass::NotFound, "There is no such path here.").with_code("unknown_url"))
        .method_not_allowed_fallback(async || {
            ApiError::new(ErrorClass::MethodNotAllowed, "This path does not answer this method.")
        })
        .layer(middleware::from_fn_with_state(app.clone(), layers::authorize))
        .layer(middleware::from_fn_with_state(app.clone(), layers::observe));
    if let Some(cors) = cors(&app.config.cors)? {
        router = router.layer(cors);
    }
    Ok(router.with_state(app))
}

/// Whether a path answers without a key.
fn is_open(path: &str) -> bool {
    ROUTES.iter().any(|r| r.open && r.path == path)
}

/// Answers that web pages of `origins` may read; `None` without any.
pub(crate) fn cors(origins: &[String]) -> Result<Option<CorsLayer>, SetupError> {
    if origins.is_empty() {
        return Ok(None);
    }
    let mut allowed = Vec::new();
    for origin in origins {
        // Browsers name scheme, host and port, and nothing after them.
        let plain = origin.split_once("://").is_some_and(|(_, host)| !host.is_empty() && !host.contains('/'));
        let value = HeaderValue::from_str(origin).ok().filter(|_| plain || origin == "*");
        allowed.push(value.ok_or_else(|| SetupError::Origin(origin.clone()))?);
    }
    let any = origins.iter().any(|o| o == "*");
    let layer = CorsLayer::new()
        .allow_origin(if any { AllowOrigin::any() } else { AllowOrigin::list(allowed) })
        .allow_methods([Method::GET, Method::POST, Method::OPTIONS])
        // `*` would not cover Authorization.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, header::RETRY_AFTER])
        .max_age(std::time::Duration::from_secs(86_400));
    Ok(Some(layer))
}
