//! Streams that notice when nothing moves.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::Shared;

/// Reads; asks for a ping after a third of the deadline without bytes and fails after all of it.
pub(super) struct WatchedRead<R> {
    inner: R,
    shared: Arc<Shared>,
    last: Instant,
    timer: Pin<Box<Sleep>>,
}

impl<R> WatchedRead<R> {
    pub(super) fn new(inner: R, shared: Arc<Shared>) -> Self {
        let timer = Box::pin(sleep(shared.options.peer_deadline / 3));
        Self { inner, shared, last: Instant::now(), timer }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for WatchedRead<R> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let me = &mut *self;
        if let Poll::Ready(done) = Pin::new(&mut me.inner).poll_read(cx, buf) {
            me.last = Instant::now();
            return Poll::Ready(done);
        }
        // The timer is not touched by bytes; when it rings, it is set to what the last bytes allow.
        loop {
            ready!(me.timer.as_mut().poll(cx));
            let (silent, deadline) = (me.last.elapsed(), me.shared.options.peer_deadline);
            if silent >= deadline {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            let third = (deadline / 3).max(Duration::from_millis(1));
            let mut next = me.last + third;
            if silent >= third {
                me.shared.ledger.want_ping();
                me.shared.wake.notify_one();
                next = if silent >= third * 2 { me.last + deadline } else { me.last + third * 2 };
            }
            me.timer.as_mut().reset(next);
        }
    }
}

/// Writes; fails when the peer takes no byte for the deadline.
pub(super) struct WatchedWrite<W> {
    inner: W,
    deadline: Duration,
    /// Set while a write stands still.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<W> WatchedWrite<W> {
    pub(super) fn new(inner: W, deadline: Duration) -> Self {
        Self { inner, deadline, timer: None }
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.timer = None;
            return outcome;
        }
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(self.deadline)));
        ready!(timer.as_mut().poll(cx));
        self.timer = None;
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for WatchedWrite<W> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.watch(cx, outcome)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.watch(cx, outcome)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(cx);
        self.watch(cx, outcome)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.watch(cx, outcome)
    }
}
