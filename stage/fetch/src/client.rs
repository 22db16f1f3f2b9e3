//! One client for all files of a model: connections, credentials, redirects, retries.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderMap, HeaderValue, LOCATION, RANGE, RETRY_AFTER};
use reqwest::{Response, StatusCode, Url, redirect};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::{FetchError, HttpError, Options, Patience, credentials};

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(10);
/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 10;
/// Most of the server's words that errors repeat.
const MAX_WORDS: usize = 200;

pub(crate) struct Client {
    http: reqwest::Client,
    /// `None` after the end.
    runtime: Option<Runtime>,
    /// What is sent to `home` and to nobody else.
    authorization: Option<HeaderValue>,
    home: Url,
    pub(crate) patience: Patience,
    alive: Arc<dyn Fn() + Send + Sync>,
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits for nothing, so that it may happen anywhere.
            runtime.shutdown_background();
        }
    }
}

impl Client {
    /// A client for the files beside `home`.
    pub(crate) fn new(home: &Url, options: &Options) -> Result<Self, FetchError> {
        let setup = |e: &dyn std::error::Error| FetchError::Setup(deepest(e));
        // A second call finds it installed: fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let authorization = options.credentials.as_deref().map(credentials::read).transpose()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("fetch")
            .enable_all()
            .build()
            .map_err(|e| setup(&e))?;
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT)
            // Followed here: where credentials go, and where the file was found, is decided at each hop.
            .redirect(redirect::Policy::none())
            .user_agent(concat!("splitmodel/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| setup(&e))?;
        Ok(Self {
            http,
            runtime: Some(runtime),
            authorization,
            home: home.clone(),
            patience: options.patience.clone(),
            alive: options.alive.clone(),
        })
    }

    pub(crate) fn runtime(&self) -> Result<&Runtime, HttpError> {
        self.runtime.as_ref().ok_or_else(|| HttpError::Connection("the client has ended".to_owned()))
    }

    /// Bytes came in.
    pub(crate) fn beat(&self) {
        (self.alive)();
    }

    /// Asks for `range` at `url` and follows redirects. Gives the answer, whatever its status, the place it came from, and
    /// whether credentials were sent there.
    pub(crate) async fn send(&self, url: &Url, range: &Range<u64>) -> Result<(Response, Url, bool), HttpError> {
        let mut url = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let last = range.end.saturating_sub(1);
            let mut request = self
                .http
                .get(url.clone())
                .header(RANGE, format!("bytes={}-{last}", range.start))
                // A compressed answer has other offsets.
                .header(ACCEPT_ENCODING, "identity");
            let own = url.origin() == self.home.origin();
            if let Some(authorization) = self.authorization.as_ref().filter(|_| own) {
                request = request.header(AUTHORIZATION, authorization.clone());
            }
            let stall = self.patience.stall;
            let response = timeout(stall, request.send()).await.map_err(|_| HttpError::Stalled(stall))?;
            let response = response.map_err(failed)?;
            let status = response.status();
            let Some(to) = response.headers().get(LOCATION).filter(|_| status.is_redirection()) else {
                return Ok((response, url, own && self.authorization.is_some()));
            };
            let next = to.to_str().ok().and_then(|to| url.join(to).ok());
            let Some(next) = next.filter(|n| matches!(n.scheme(), "http" | "https")) else {
                return Err(HttpError::Redirect("to what is no address"));
            };
            if url.scheme() == "https" && next.scheme() == "http" {
                return Err(HttpError::Redirect("from https to http, where nothing vouches for the bytes"));
            }
            url = next;
        }
        Err(HttpError::Redirect("more than 10 times"))
    }
}

/// The innermost cause; reqwest's own words repeat the address, with its query.
fn deepest(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

/// What a failed request or body means.
pub(crate) fn failed(error: reqwest::Error) -> HttpError {
    let error = error.without_url();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(e) = cause {
        if let Some(rustls::Error::InvalidCertificate(why)) = e.downcast_ref() {
            return HttpError::Certificate(why.to_string());
        }
        // An `io::Error` hides what it wraps from `source`.
        let wrapped = e.downcast_ref::<std::io::Error>().and_then(|e| e.get_ref());
        cause = wrapped.map(|w| w as &(dyn std::error::Error + 'static)).or_else(|| e.source());
    }
    let what = if error.is_connect() { "it cannot be connected to" } else { "the connection broke" };
    HttpError::Connection(format!("{what}: {}", deepest(&error)))
}

/// The server's words: what the hub puts into a header of its own.
fn words(headers: &HeaderMap) -> String {
    let words = headers.get("x-error-message").and_then(|v| v.to_str().ok()).unwrap_or_default();
    let words: String = words.chars().filter(|c| !c.is_control()).take(MAX_WORDS).collect();
    if words.is_empty() { words } else { format!(" ({words})") }
}

/// Seconds, or a date.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = text.parse() {
        return Some(Duration::from_secs(seconds));
    }
    httpdate::parse_http_date(text).ok()?.duration_since(SystemTime::now()).ok()
}

/// What an answer that is not 206 means.
pub(crate) fn refusal(response: &Response, credentials: bool) -> HttpError {
    let (status, words) = (response.status(), words(response.headers()));
    let code = status.as_u16();
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            HttpError::Denied { status: code, credentials, words }
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => HttpError::Missing { status: code, words },
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_EARLY | StatusCode::TOO_MANY_REQUESTS => {
            HttpError::Busy { status: code, retry_after: retry_after(response.headers()) }
        }
        s if s.is_server_error() => HttpError::Busy { status: code, retry_after: retry_after(response.headers()) },
        s if s.is_success() => HttpError::NoRanges(code),
        _ => HttpError::Refused { status: code, words },
    }
}

/// Tries in a row without a byte.
pub(crate) struct Tries<'a> {
    patience: &'a Patience,
    done: u32,
}

impl<'a> Tries<'a> {
    pub(crate) const fn new(patience: &'a Patience) -> Self {
        Self { patience, done: 0 }
    }

    /// Bytes came: the next failure is a first one.
    pub(crate) fn progress(&mut self) {
        self.done = 0;
    }

    /// Waits after a failed try, or gives up.
    pub(crate) async fn wait(&mut self, error: HttpError) -> Result<(), HttpError> {
        if !error.passes() {
            return Err(error);
        }
        self.done += 1;
        if self.done >= self.patience.tries {
            return Err(HttpError::GaveUp { tries: self.done, last: Box::new(error) });
        }
        let doubled = self.patience.first_pause.saturating_mul(1 << (self.done - 1).min(16));
        let pause = doubled.min(self.patience.longest_pause);
        // Stages that were cut off together do not come back together.
        let nanos = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.subsec_nanos());
        let spread = pause.mul_f64(0.75 + f64::from(nanos % 1024) / 2048.0);
        let asked = match &error {
            HttpError::Busy { retry_after, .. } => *retry_after,
            _ => None,
        };
        let pause = asked.map_or(spread, |asked| asked.max(spread).min(self.patience.longest_asked));
        tracing::warn!(try = self.done, ?pause, "the download is tried again: {error}");
        tokio::time::sleep(pause).await;
        Ok(())
    }
}
