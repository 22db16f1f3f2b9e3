//! The one error type of the API and its JSON body.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// What went wrong, in the classes that decide the HTTP status and OpenAI's `type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// 400: the caller's mistake.
    InvalidRequest,
    /// 401: no key or a wrong one.
    Authentication,
    /// 404: no such model or path.
    NotFound,
    /// 405: the path exists, the method does not.
    MethodNotAllowed,
    /// 413: the body is larger than the server takes.
    TooLarge,
    /// 415: a content type or encoding that the server does not read.
    UnsupportedMedia,
    /// 429: the queue is full; come back later.
    RateLimit,
    /// 500: a fault of the server.
    Internal,
    /// 500: the model could not compute the answer.
    Backend,
    /// 500: a device, file or connection that the answer needs failed.
    Io,
    /// 501: a feature that this server does not have.
    NotImplemented,
    /// 503: the chain cannot answer now; come back later.
    Unavailable,
    /// 503: the answer could not begin or go on in time; come back later.
    Timeout,
}

impl ErrorClass {
    /// The HTTP status of the class.
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::InvalidRequest => StatusCode::BAD_REQUEST,
            Self::Authentication => StatusCode::UNAUTHORIZED,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMedia => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::RateLimit => StatusCode::TOO_MANY_REQUESTS,
            Self::Internal | Self::Backend | Self::Io => StatusCode::INTERNAL_SERVER_ERROR,
            Self::NotImplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable | Self::Timeout => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// OpenAI's `type` of the class.
    #[must_use]
    pub fn kind(self) -> &'static str {
        match self {
            Self::InvalidRequest
            | Self::NotFound
            | Self::MethodNotAllowed
            | Self::TooLarge
            | Self::UnsupportedMedia
            | Self::NotImplemented => "invalid_request_error",
            Self::Authentication => "authentication_error",
            Self::RateLimit => "rate_limit_error",
            Self::Internal | Self::Backend | Self::Io => "server_error",
            Self::Unavailable | Self::Timeout => "service_unavailable_error",
        }
    }

    /// The word under which logs and metrics count the class.
    #[must_use]
    pub fn label(self) -> &'static str {
        self.code().unwrap_or(self.kind())
    }

    /// The `code` of errors of this class that have none of their own.
    #[must_use]
    pub fn code(self) -> Option<&'static str> {
        match self {
            Self::RateLimit => Some("rate_limit_exceeded"),
            Self::Internal => Some("internal_error"),
            Self::Backend => Some("backend_error"),
            Self::Io => Some("io_error"),
            Self::NotImplemented => Some("not_implemented"),
            Self::Unavailable => Some("unavailable"),
            Self::Timeout => Some("timeout"),
            _ => None,
        }
    }
}

/// An error as the client sees it: `{"error": {"message", "type", "param", "code"}}` with the status of its class.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Decides status and `type`.
    pub class: ErrorClass,
    /// What is wrong and what to do, for people.
    pub message: String,
    /// The field of the request that is at fault, as a path such as `messages[0].content`.
    pub param: Option<String>,
    /// A word for programs, such as `context_length_exceeded`.
    pub code: Option<&'static str>,
    /// Seconds after which a retry makes sense (429 and 503).
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// An error of `class` with nothing but a message.
    pub fn new(class: ErrorClass, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400 that names the field at fault.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(ErrorClass::InvalidRequest, message) }
    }

    /// 400 for a field whose value is of the right type but not served here.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// 400 `context_length_exceeded` with both numbers, on which clients trim.
    #[must_use]
    pub fn context_length(param: &'static str, prompt_tokens: usize, n_ctx: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {n_ctx} tokens, but the prompt has {prompt_tokens} tokens and at \
             least one more must fit for the answer. Shorten the prompt."
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// The same when a lower bound of the prompt's tokens is known, because counting on would take long.
    #[must_use]
    pub fn far_too_long(param: &'static str, at_least: usize, n_ctx: u32) -> Self {
        let message = format!(
            "This model's maximum context length is {n_ctx} tokens, but the prompt has at least {at_least} tokens. \
             Shorten the prompt."
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid(param, message) }
    }

    /// 500 with a message that tells nothing of the inside.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorClass::Internal, message)
    }

    /// The same error with a `code`.
    #[must_use]
    pub fn with_code(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The same error with a `Retry-After` in seconds.
    #[must_use]
    pub fn with_retry_after(mut self, seconds: u32) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    /// The JSON body, also sent as the data of an SSE error event.
    #[must_use]
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorObject {
                message: &self.message,
                kind: self.class.kind(),
                param: self.param.as_deref(),
                code: self.code.or(self.class.code()),
            },
        }
    }
}

/// `{"error": {...}}`.
#[derive(Debug, Serialize)]
pub struct ErrorBody<'a> {
    /// The error itself.
    pub error: ErrorObject<'a>,
}

/// OpenAI's error object; all four keys are always there.
#[derive(Debug, Serialize)]
pub struct ErrorObject<'a> {
    /// For people.
    pub message: &'a str,
    /// The class.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The field at fault or null.
    pub param: Option<&'a str>,
    /// For programs or null.
    pub code: Option<&'static str>,
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.class.status(), axum::Json(self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.class == ErrorClass::Authentication {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        // The layer that logs and counts reads it from here.
        response.extensions_mut().insert(self);
        response
    }
}
