//! A file server that can be told to misbehave. It counts what it sends.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONTENT_RANGE, ETAG, HOST, LAST_MODIFIED, LOCATION, RANGE, RETRY_AFTER,
};
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use tokio::runtime::Runtime;

/// What the server does instead of answering a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Sends so many bytes of the body, then ends the connection.
    Cut(usize),
    /// Sends so many bytes of the body, then nothing, and keeps the connection.
    Stall(usize),
    /// Answers with a status and a header.
    Status(u16, Option<(HeaderName, &'static str)>),
    /// Redirects.
    To(String),
    /// Nothing at all.
    None,
}

/// A file.
#[derive(Clone)]
pub struct Served {
    pub bytes: Bytes,
    pub etag: Option<&'static str>,
    pub modified: Option<&'static str>,
    /// Whether parts are sent.
    pub ranges: bool,
    /// Where it really is.
    pub elsewhere: Option<String>,
}

impl Served {
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: bytes.into(), etag: Some("\"one\""), modified: None, ranges: true, elsewhere: None }
    }
}

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub range: Range<u64>,
    pub authorization: Option<String>,
    pub host: String,
    /// Bytes of the body that were handed to the connection so far.
    pub sent: Arc<AtomicU64>,
}

#[derive(Default)]
pub struct Shared {
    pub files: Mutex<HashMap<String, Served>>,
    pub seen: Mutex<Vec<Seen>>,
    /// What happens to the next requests.
    pub faults: Mutex<VecDeque<Fault>>,
    /// Bytes a second of each answer; 0: all at once.
    pub pace: AtomicU64,
}

impl Shared {
    pub fn put(&self, path: &str, file: Served) {
        self.files.lock().unwrap().insert(path.to_owned(), file);
    }

    pub fn change(&self, path: &str, change: impl FnOnce(&mut Served)) {
        change(self.files.lock().unwrap().get_mut(path).unwrap());
    }

    pub fn fault(&self, faults: impl IntoIterator<Item = Fault>) {
        self.faults.lock().unwrap().extend(faults);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn forget(&self) {
        self.seen.lock().unwrap().clear();
    }

    /// Bytes that were sent for the requests seen since the last [`Shared::forget`].
    pub fn sent(&self) -> u64 {
        self.seen.lock().unwrap().iter().map(|s| s.sent.load(Relaxed)).sum()
    }
}

/// The server, on loopback, until it is dropped.
pub struct Server {
    pub shared: Arc<Shared>,
    pub address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Server {
    /// Starts it; from asynchronous code, too.
    pub fn start() -> Self {
        let started = std::thread::spawn(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
            let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
            (runtime, listener)
        });
        let (runtime, listener) = started.join().unwrap();
        let (shared, address) = (Arc::<Shared>::default(), listener.local_addr().unwrap());
        let router = axum::Router::new().fallback(answer).with_state(shared.clone());
        runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { shared, address, runtime: Some(runtime) }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn runtime(&self) -> &Runtime {
        self.runtime.as_ref().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Connections that stall on purpose are not waited for.
        self.runtime.take().unwrap().shutdown_background();
    }
}

fn range_of(headers: &HeaderMap) -> Option<Range<u64>> {
    let (first, last) = headers.get(RANGE)?.to_str().ok()?.strip_prefix("bytes=")?.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
}

async fn answer(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).map(|v| v.to_str().unwrap().to_owned());
    let range = range_of(headers);
    assert_eq!(text(ACCEPT_ENCODING).as_deref(), Some("identity"), "compressed bytes have no ranges");
    let path = request.uri().path().to_owned();
    let sent = Arc::<AtomicU64>::default();
    shared.seen.lock().unwrap().push(Seen {
        path: path.clone(),
        range: range.clone().unwrap_or(0..0),
        authorization: text(AUTHORIZATION),
        // A proxy is asked with the whole address.
        host: request.uri().authority().map(ToString::to_string).or(text(HOST)).unwrap_or_default(),
        sent: sent.clone(),
    });
    let fault = shared.faults.lock().unwrap().pop_front().unwrap_or(Fault::None);
    let (cut, stalls) = match fault {
        Fault::Status(status, header) => {
            let status = StatusCode::from_u16(status).unwrap();
            return header.map_or_else(|| status.into_response(), |h| (status, [h]).into_response());
        }
        Fault::To(to) => return (StatusCode::FOUND, [(LOCATION, to)]).into_response(),
        Fault::Cut(n) => (n, false),
        Fault::Stall(n) => (n, true),
        Fault::None => (usize::MAX, false),
    };
    let Some(file) = shared.files.lock().unwrap().get(&path).cloned() else {
        return (StatusCode::NOT_FOUND, [("x-error-message", "Entry not found")]).into_response();
    };
    if let Some(to) = file.elsewhere {
        return (StatusCode::TEMPORARY_REDIRECT, [(LOCATION, to)]).into_response();
    }
    let len = file.bytes.len() as u64;
    let range = range.filter(|_| file.ranges);
    let part = range.clone().unwrap_or(0..len);
    let part = part.start..part.end.min(len);
    if part.is_empty() {
        let range = [(CONTENT_RANGE, format!("bytes */{len}"))];
        return (StatusCode::RANGE_NOT_SATISFIABLE, range).into_response();
    }
    let bytes = file.bytes.slice(part.start as usize..part.end as usize);
    let mut response = body((shared, sent), bytes, cut, stalls).into_response();
    if range.is_some() {
        *response.status_mut() = StatusCode::PARTIAL_CONTENT;
        let value = format!("bytes {}-{}/{len}", part.start, part.end - 1);
        response.headers_mut().insert(CONTENT_RANGE, value.parse().unwrap());
    }
    for (name, value) in [(ETAG, file.etag), (LAST_MODIFIED, file.modified)] {
        if let Some(value) = value {
            response.headers_mut().insert(name, value.parse().unwrap());
        }
    }
    response
}

/// A body in pieces: at the server's pace, and up to where it is cut or stalls.
fn body((shared, sent): (Arc<Shared>, Arc<AtomicU64>), bytes: Bytes, cut: usize, stalls: bool) -> Body {
    const TICK: Duration = Duration::from_millis(50);
    let pieces = futures::stream::unfold((0, bytes), move |(done, mut left)| {
        let (shared, sent) = (shared.clone(), sent.clone());
        async move {
            if left.is_empty() {
                return None;
            }
            if done >= cut {
                if stalls {
                    std::future::pending::<()>().await;
                }
                // What was sent arrives before the connection breaks.
                tokio::time::sleep(TICK).await;
                return Some((Err(std::io::Error::other("cut")), (done, Bytes::new())));
            }
            let pace = shared.pace.load(Relaxed);
            let most = if pace == 0 {
                64 << 10
            } else {
                tokio::time::sleep(TICK).await;
                (pace as usize / 20).max(1)
            };
            let piece = left.split_to(left.len().min(most).min(cut - done));
            sent.fetch_add(piece.len() as u64, Relaxed);
            Some((Ok(piece.clone()), (done + piece.len(), left)))
        }
    });
    Body::from_stream(pieces)
}

/// `Retry-After` of a refusal.
pub fn retry_after(status: u16, value: &'static str) -> Fault {
    Fault::Status(status, Some((RETRY_AFTER, value)))
}
