//! The HTTP server: HTTP/1.1 and HTTP/2 on one plain port, with bounds on what a client can hold.

mod door;
mod line;

use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

pub use door::{Door, Missing, Startup};
pub(crate) use line::HalfClosed;
use line::{HALF_CLOSE, Io, Line};

/// Pause after the system had no room for one more connection.
const NO_ROOM: Duration = Duration::from_millis(500);
/// How often a silent client of HTTP/2 is asked for a sign of life, and how long it may take.
const PING: Duration = Duration::from_secs(20);

/// What clients may hold.
#[derive(Debug, Clone, Copy)]
pub struct ServeLimits {
    /// Longest time for the head of a request; also for an idle connection until its next one.
    pub header_timeout: Duration,
    /// Connections at once; more wait to be accepted.
    pub max_connections: usize,
}

impl Default for ServeLimits {
    fn default() -> Self {
        Self { header_timeout: Duration::from_secs(30), max_connections: 4096 }
    }
}

/// Serves `door` on `listener` until `stop`, then until what was asked before is answered. Dropping it ends all at once.
pub async fn serve(listener: TcpListener, door: Door, limits: ServeLimits, stop: impl Future<Output = ()> + Send) {
    let seats = Arc::new(Semaphore::new(limits.max_connections.clamp(1, Semaphore::MAX_PERMITS)));
    let stopping = watch::Sender::new(false);
    let mut connections = JoinSet::new();
    let mut stop = pin!(stop);
    loop {
        tokio::select! {
            (stream, seat) = next(&listener, &seats) => {
                connections.spawn(connection(stream, door.clone(), limits, stopping.subscribe(), seat));
            }
            Some(_) = connections.join_next() => {}
            () = &mut stop => break,
        }
    }
    drop(listener);
    stopping.send_replace(true);
    while connections.join_next().await.is_some() {}
}

/// The next connection, once there is a seat for it.
async fn next(listener: &TcpListener, seats: &Arc<Semaphore>) -> (TcpStream, Option<OwnedSemaphorePermit>) {
    if seats.available_permits() == 0 {
        tracing::warn!("all connections that `api.max_connections` allows are in use; new ones wait");
    }
    // The semaphore is never closed.
    let seat = seats.clone().acquire_owned().await.ok();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => return (stream, seat),
            Err(e) if of_the_client(&e) => {}
            Err(error) => {
                tracing::error!(%error, "a connection could not be accepted");
                tokio::time::sleep(NO_ROOM).await;
            }
        }
    }
}

fn of_the_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

/// One connection, until it ends or its client has gone.
async fn connection(
    stream: TcpStream,
    door: Door,
    limits: ServeLimits,
    mut stopping: watch::Receiver<bool>,
    _seat: Option<OwnedSemaphorePermit>,
) {
    // Tokens are small and each should leave at once.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "the socket is gone");
        return;
    }
    let line = Line::new(stream);
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).half_close(HALF_CLOSE);
    builder.http2().timer(TokioTimer::new()).keep_alive_interval(PING).keep_alive_timeout(PING);
    let service = service_fn(|request| answer(line.clone(), door.clone(), request));
    let mut served = pin!(builder.serve_connection(TokioIo::new(Io(line.clone())), service));
    let (mut gone, mut late) = (pin!(line.gone()), pin!(line.late(limits.header_timeout)));
    let mut told = false;
    loop {
        tokio::select! {
            result = &mut served => {
                if let Err(error) = result {
                    tracing::debug!(error, "a connection ended");
                }
                return;
            }
            // Dropping it cancels what its client asked for.
            () = &mut gone => return,
            () = &mut late => return,
            _ = stopping.wait_for(|s| *s), if !told => {
                told = true;
                served.as_mut().graceful_shutdown();
            }
        }
    }
}

async fn answer(
    line: Arc<Line>,
    door: Door,
    request: Request<Incoming>,
) -> Result<axum::response::Response, Infallible> {
    line.asked();
    let version = request.version();
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(line.half_closed());
    tokio::select! {
        biased;
        response = door.answer(request) => Ok(response),
        never = line.ask(version) => match never {},
    }
}
