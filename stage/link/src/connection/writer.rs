//! The writing task.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::conditioning::Wire;
use super::reader::LINGER;
use super::watched::WatchedWrite;
use super::{ClosedReason, End, Parting, Shared};
use crate::codec::{Message, MessageWriter, wire_len};
use crate::error::LinkError;

/// Most messages on the imagined wire at a time.
const MAX_ON_WIRE: usize = 256;

/// What is to be written, in order.
struct Outbox {
    shared: Arc<Shared>,
    queue: mpsc::Receiver<Message>,
    /// Some sender is left.
    queue_open: bool,
    /// Taken from the queue, waits for a credit.
    held: Option<Message>,
    wire: Wire,
    on_wire: VecDeque<(Instant, Message)>,
}

impl Outbox {
    /// Waits for the next message that may be written. Cancel-safe.
    async fn next(&mut self) -> Message {
        loop {
            while self.on_wire.len() < MAX_ON_WIRE
                && let Some(message) = self.ready()
            {
                let size = || wire_len(&message, self.shared.dtype, &self.shared.outbound).unwrap_or(0);
                let facts = || (Instant::now(), size());
                match self.wire.release(&self.shared.options.conditioning, facts) {
                    None if self.on_wire.is_empty() => return message,
                    release => self.on_wire.push_back((release.unwrap_or_else(Instant::now), message)),
                }
            }
            let release = self.on_wire.front().map(|(at, _)| *at);
            let room = self.on_wire.len() < MAX_ON_WIRE;
            tokio::select! {
                biased;
                () = at(release), if release.is_some() => {
                    if let Some((_, message)) = self.on_wire.pop_front() {
                        return message;
                    }
                }
                () = self.shared.wake.notified() => {}
                message = self.queue.recv(), if room && self.held.is_none() && self.queue_open => {
                    self.queue_open = message.is_some();
                    self.held = message;
                }
            }
        }
    }

    /// A message that needs nothing more than the wire.
    fn ready(&mut self) -> Option<Message> {
        if let Some(owed) = self.shared.ledger.owed() {
            return Some(owed);
        }
        if self.held.is_none() {
            self.held = self.queue.try_recv().ok();
        }
        let costs = self.held.as_ref()?.costs_credit();
        if costs && !self.shared.ledger.spend() { None } else { self.held.take() }
    }
}

async fn at(instant: Option<Instant>) {
    if let Some(instant) = instant {
        sleep_until(instant).await;
    }
}

pub(super) async fn run<W: AsyncWrite + Unpin>(w: W, shared: Arc<Shared>, queue: mpsc::Receiver<Message>) {
    let deadline = shared.options.peer_deadline;
    let mut w = WatchedWrite::new(w, deadline);
    let mut writer = MessageWriter::default();
    let mut outbox = Outbox {
        shared: Arc::clone(&shared),
        queue,
        queue_open: true,
        held: None,
        wire: Wire::default(),
        on_wire: VecDeque::new(),
    };
    let ended = shared.ended();
    tokio::pin!(ended);
    let end = loop {
        let message = tokio::select! {
            biased;
            end = &mut ended => break end,
            message = outbox.next() => message,
        };
        let write = writer.write(&mut w, &message, shared.dtype);
        tokio::pin!(write);
        let (written, end) = tokio::select! {
            biased;
            written = &mut write => (written, None),
            end = &mut ended => match end.parting {
                Parting::Cut => return,
                // Half a message would make the last words unreadable.
                _ => (timeout(deadline, write).await.unwrap_or_else(|_| Err(stuck())), Some(end)),
            }
        };
        match (written, end) {
            (Ok(bytes), None) => {
                shared.counters.sent.fetch_add(1, Ordering::Relaxed);
                shared.counters.sent_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            (Ok(_), Some(end)) => break end,
            (Err(_), Some(_)) => return,
            (Err(e), None) => return failed(&shared, e, ended).await,
        }
        if message == Message::Goodbye {
            shared.finish(ClosedReason::Local, Parting::Said);
        }
    };
    drop(outbox);
    let last = async {
        if let Parting::Say(message) = &end.parting {
            writer.write(&mut w, message, shared.dtype).await?;
        }
        w.shutdown().await.map_err(|e| LinkError::io("ending a connection", e))
    };
    if !matches!(end.parting, Parting::Cut) {
        // Whether the last words arrive is up to the peer.
        let _ = timeout(deadline, last).await;
    }
}

fn stuck() -> LinkError {
    LinkError::io("writing a message", io::ErrorKind::TimedOut.into())
}

/// A write failed. The reader may know better why: it still sees what the peer said before it left.
async fn failed(shared: &Shared, e: LinkError, ended: impl Future<Output = End>) {
    let reason = match e {
        LinkError::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut => ClosedReason::Timeout,
        LinkError::Io { source, .. } => ClosedReason::PeerLost(Arc::new(source)),
        e => ClosedReason::PeerLost(Arc::new(io::Error::other(e))),
    };
    let wait = if matches!(reason, ClosedReason::Timeout) { Duration::ZERO } else { LINGER };
    if timeout(wait, ended).await.is_err() {
        shared.finish(reason, Parting::Cut);
    }
}
