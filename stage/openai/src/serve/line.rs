//! One connection's socket, and whether its client is still there.
//!
//! A client that closed its socket and one that only sends no more look the same: a FIN came. To tell them apart something
//! must be written, which only a closed socket answers with a reset. Before the head of a response that is an interim `100
//! Continue`, which clients skip; within a stream it is a comment.

use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::Version;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};

/// Whether a client that sends no more can be told from one that has gone.
#[cfg(target_os = "linux")]
pub(super) const HALF_CLOSE: bool = true;
#[cfg(not(target_os = "linux"))]
pub(super) const HALF_CLOSE: bool = false;

const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// Says in a request's extensions that its client sends no more.
#[derive(Clone, Debug)]
pub(crate) struct HalfClosed(watch::Receiver<bool>);

impl HalfClosed {
    /// Resolves when the client's end has come; never without one.
    pub(crate) async fn wait(&mut self) {
        if self.0.wait_for(|closed| *closed).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// A connection as its driver, its requests and hyper share it.
#[derive(Debug)]
pub(super) struct Line {
    stream: TcpStream,
    /// Bytes were written after which nothing said that no more of them wait.
    unflushed: AtomicBool,
    half_closed: watch::Sender<bool>,
    asked: watch::Sender<bool>,
    gave_up: Notify,
}

impl Line {
    pub(super) fn new(stream: TcpStream) -> Arc<Self> {
        let (half_closed, asked) = (watch::Sender::new(false), watch::Sender::new(false));
        Arc::new(Self { stream, unflushed: AtomicBool::new(false), half_closed, asked, gave_up: Notify::new() })
    }

    /// What a request's handlers are told.
    pub(super) fn half_closed(&self) -> HalfClosed {
        HalfClosed(self.half_closed.subscribe())
    }

    /// A request's head is complete.
    pub(super) fn asked(&self) {
        self.asked.send_replace(true);
    }

    /// Resolves when no request came within `limit`; never once there was one.
    pub(super) async fn late(&self, limit: Duration) {
        let mut asked = self.asked.subscribe();
        // `self` holds the sender.
        if tokio::time::timeout(limit, asked.wait_for(|a| *a)).await.is_ok() {
            std::future::pending::<()>().await;
        }
    }

    /// Resolves when the client has gone: by a reset, or because a FIN came from one that cannot be asked.
    #[cfg(target_os = "linux")]
    pub(super) async fn gone(&self) {
        use tokio::io::Interest;
        // Of all that can be waited for, PRIORITY alone comes with the end of reading and without bytes to be read.
        match self.stream.ready(Interest::PRIORITY | Interest::ERROR).await {
            Ok(ready) if ready.is_read_closed() && !ready.is_error() => {}
            _ => return,
        }
        self.half_closed.send_replace(true);
        tokio::select! {
            _ = self.stream.ready(Interest::ERROR) => {}
            () = self.gave_up.notified() => {}
        }
    }

    /// Hyper itself ends connections whose clients send no more.
    #[cfg(not(target_os = "linux"))]
    pub(super) async fn gone(&self) {
        std::future::pending().await
    }

    /// To be polled while a request of `version` has no response: asks a client that sends no more whether it is there.
    pub(super) async fn ask(&self, version: Version) -> Infallible {
        self.half_closed().wait().await;
        // The end of a connection of HTTP/2 is hyper's to see.
        if version <= Version::HTTP_11 {
            // Earlier versions know no interim response, and what waits to be written must not be cut in two.
            let can = version == Version::HTTP_11 && !self.unflushed.load(Relaxed);
            if !can || !self.stream.try_write(INTERIM).is_ok_and(|n| n == INTERIM.len()) {
                self.gave_up.notify_one();
            }
        }
        std::future::pending().await
    }
}

/// What hyper reads and writes.
pub(super) struct Io(pub(super) Arc<Line>);

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream = &self.0.stream;
        loop {
            ready!(stream.poll_read_ready(cx))?;
            match stream.try_read_buf(buf) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done.map(drop)),
            }
        }
    }
}

impl Io {
    fn write(&self, cx: &mut Context<'_>, write: impl Fn(&TcpStream) -> io::Result<usize>) -> Poll<io::Result<usize>> {
        self.0.unflushed.store(true, Relaxed);
        loop {
            ready!(self.0.stream.poll_write_ready(cx))?;
            match write(&self.0.stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.write(cx, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write(cx, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.unflushed.store(false, Relaxed);
        Poll::Ready(Ok(()))
    }

    /// The socket is closed when the connection's task ends, which is next.
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}
