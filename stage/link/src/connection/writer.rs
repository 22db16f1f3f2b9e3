//! The writing task.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

use super::conditioning::Wire;
use super::reader::LINGER;
use super::watched::WatchedWrite;
use super::written::{Written, micros};
use super::{ClosedReason, End, Parting, Queued, Shared};
use crate::codec::{Message, MessageWriter, wire_len};
use crate::error::LinkError;

/// Most messages on the imagined wire at a time.
const MAX_ON_WIRE: usize = 256;

/// A message that may be written.
struct Outgoing {
    message: Message,
    /// When it was sent.
    since: Instant,
    /// How long it stood first in the queue without a credit.
    credit: Duration,
}

/// What is to be written, in order.
struct Outbox {
    shared: Arc<Shared>,
    queue: mpsc::Receiver<Queued>,
    /// Some sender is left.
    queue_open: bool,
    /// Taken from the queue, waits for a credit.
    held: Option<Queued>,
    /// Since when.
    dry: Option<Instant>,
    wire: Wire,
    on_wire: VecDeque<(Instant, Outgoing)>,
}

impl Outbox {
    /// Waits for the next message that may be written. Cancel-safe.
    async fn next(&mut self) -> Outgoing {
        loop {
            while self.on_wire.len() < MAX_ON_WIRE
                && let Some(out) = self.ready()
            {
                let size = || wire_len(&out.message, self.shared.dtype, &self.shared.outbound).unwrap_or(0);
                let facts = || (Instant::now(), size());
                match self.wire.release(&self.shared.options.conditioning, facts) {
                    None if self.on_wire.is_empty() => return out,
                    release => self.on_wire.push_back((release.unwrap_or_else(Instant::now), out)),
                }
            }
            let release = self.on_wire.front().map(|(at, _)| *at);
            let room = self.on_wire.len() < MAX_ON_WIRE;
            tokio::select! {
                biased;
                () = at(release), if release.is_some() => {
                    if let Some((_, out)) = self.on_wire.pop_front() {
                        return out;
                    }
                }
                () = self.shared.wake.notified() => {}
                queued = self.queue.recv(), if room && self.held.is_none() && self.queue_open => {
                    self.queue_open = queued.is_some();
                    self.held = queued;
                }
            }
        }
    }

    /// A message that needs nothing more than the wire.
    fn ready(&mut self) -> Option<Outgoing> {
        if let Some(message) = self.shared.ledger.owed() {
            return Some(Outgoing { message, since: Instant::now(), credit: Duration::ZERO });
        }
        if self.held.is_none() {
            self.held = self.queue.try_recv().ok();
        }
        let costs = self.held.as_ref()?.message.costs_credit();
        if costs && !self.shared.ledger.spend() {
            self.dry.get_or_insert_with(Instant::now);
            return None;
        }
        let credit = self.dry.take().map_or(Duration::ZERO, |dry| dry.elapsed());
        let Queued { message, since } = self.held.take()?;
        Some(Outgoing { message, since, credit })
    }
}

async fn at(instant: Option<Instant>) {
    if let Some(instant) = instant {
        sleep_until(instant).await;
    }
}

pub(super) async fn run<W: AsyncWrite + Unpin>(w: W, shared: Arc<Shared>, queue: mpsc::Receiver<Queued>) {
    let deadline = shared.options.peer_deadline;
    let mut w = WatchedWrite::new(w, deadline);
    let mut writer = MessageWriter::default();
    let mut outbox = Outbox {
        shared: Arc::clone(&shared),
        queue,
        queue_open: true,
        held: None,
        dry: None,
        wire: Wire::default(),
        on_wire: VecDeque::new(),
    };
    let ended = shared.ended();
    tokio::pin!(ended);
    let end = loop {
        let out = tokio::select! {
            biased;
            end = &mut ended => break end,
            out = outbox.next() => out,
        };
        let begun = Instant::now();
        let write = writer.write(&mut w, &out.message, shared.dtype);
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
        if let Ok(bytes) = &written {
            note(&shared, &out, begun, *bytes);
        }
        match (written, end) {
            (Ok(_), None) => {}
            (Ok(_), Some(end)) => break end,
            (Err(_), Some(_)) => return,
            (Err(e), None) => return failed(&shared, e, ended).await,
        }
        if out.message == Message::Goodbye {
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

/// Counts a written message; a frame or predictions get their note.
fn note(shared: &Shared, out: &Outgoing, begun: Instant, bytes: u64) {
    let wrote = begun.elapsed();
    let c = &shared.counters;
    let count = |n: &AtomicU64, add: u64| n.fetch_add(add, Ordering::Relaxed);
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    count(&c.sent, 1);
    count(&c.sent_bytes, bytes);
    count(&c.write_ns, nanos(wrote));
    let seq = match &out.message {
        Message::Frame(frame) => frame.seq,
        Message::Predictions(predictions) => predictions.seq,
        _ => return,
    };
    let waited = begun.saturating_duration_since(out.since);
    count(&c.queue_ns, nanos(waited));
    count(&c.credit_ns, nanos(out.credit));
    let [waited_us, credit_us, wrote_us] = [waited, out.credit, wrote].map(micros);
    shared.written.note(&Written { seq, waited_us, credit_us, wrote_us, bytes });
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
