//! An established connection: one task reads, one writes, and a ledger of credits lies between them.
//!
//! Nothing polls: tasks wait for bytes, for messages, or for a deadline.

mod conditioning;
mod ledger;
mod reader;
mod watched;
mod writer;
mod written;

pub use conditioning::{Conditioning, ConditioningError, MAX_DELAY_US};
pub use written::Written;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use crate::codec::{ActivationDtype, CodecError, Limits, Message, wire_len};
use crate::frame::Report;
use crate::setup::Agreed;
use ledger::Ledger;
use written::WriteLog;

/// What a stage sets for its connections.
#[derive(Clone, Debug)]
pub struct Options {
    /// A peer from which nothing came for so long is dead; a third of it without anything received sends a ping. Also the
    /// longest a write may stand still.
    pub peer_deadline: Duration,
    /// Messages that wait for credits or the wire before senders wait.
    pub send_queue: usize,
    /// Injected wire properties, shared.
    pub conditioning: Arc<Conditioning>,
}

impl Default for Options {
    fn default() -> Self {
        Self { peer_deadline: Duration::from_secs(10), send_queue: 8, conditioning: Arc::default() }
    }
}

/// Why a connection ended.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClosedReason {
    /// The peer said goodbye.
    #[error("the peer ended the connection in order")]
    Goodbye,
    /// The peer ended the connection after this error.
    #[error("the peer ended the connection: stage {}, {:?}: {}", .0.stage, .0.class, .0.message)]
    Refused(Report),
    /// The transport failed or ended.
    #[error("the peer is lost: {0}")]
    PeerLost(Arc<io::Error>),
    /// Nothing came from the peer, or nothing could be written to it, for the peer deadline.
    #[error("the peer is silent or takes nothing: its deadline passed")]
    Timeout,
    /// The peer broke the protocol; it was told so.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// This side ended it.
    #[error("the connection was ended on this side")]
    Local,
}

/// A message was not sent.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SendError {
    /// The connection ended.
    #[error("not sent: {0}")]
    Closed(ClosedReason),
    /// The message cannot be sent to this peer; the connection lives on.
    #[error("not sent: {0}")]
    Invalid(#[from] CodecError),
}

/// The last thing said to a peer.
#[derive(Clone, Debug)]
enum Parting {
    /// Nothing; the transport is dropped at once.
    Cut,
    /// This message, after the one being written.
    Say(Message),
    /// It was written already.
    Said,
}

#[derive(Clone, Debug)]
struct End {
    reason: ClosedReason,
    parting: Parting,
}

/// Counters of a connection.
#[derive(Debug, Default)]
struct Counters {
    sent: AtomicU64,
    received: AtomicU64,
    sent_bytes: AtomicU64,
    received_bytes: AtomicU64,
    write_ns: AtomicU64,
    queue_ns: AtomicU64,
    credit_ns: AtomicU64,
}

/// What a connection carried so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Messages written, of every kind.
    pub sent: u64,
    /// Messages received, of every kind.
    pub received: u64,
    /// Bytes of messages written, before TLS.
    pub sent_bytes: u64,
    /// Bytes of messages received, after TLS.
    pub received_bytes: u64,
    /// Time the writer spent on encoding messages and on handing their bytes to the transport.
    pub write: Duration,
    /// Time frames and predictions waited from being sent to being written; injected delay counts.
    pub wait: Duration,
    /// Of that, the time they stood first in the queue without a credit.
    pub credit_wait: Duration,
}

/// A message in the queue of its connection.
#[derive(Debug)]
struct Queued {
    message: Message,
    /// When it was sent.
    since: Instant,
}

impl Queued {
    fn new(message: Message) -> Self {
        Self { message, since: Instant::now() }
    }
}

/// State between reader, writer, senders and permits.
#[derive(Debug)]
struct Shared {
    stage: u16,
    dtype: ActivationDtype,
    inbound: Limits,
    outbound: Limits,
    options: Options,
    ledger: Ledger,
    /// Work for the writer that is not in its queue.
    wake: Notify,
    end: watch::Sender<Option<End>>,
    counters: Counters,
    written: WriteLog,
}

impl Shared {
    /// Ends the connection unless it has ended.
    fn finish(&self, reason: ClosedReason, parting: Parting) {
        self.end.send_if_modified(|end| {
            let first = end.is_none();
            if first {
                *end = Some(End { reason, parting });
            }
            first
        });
    }

    /// Waits for the end.
    async fn ended(&self) -> End {
        let mut end = self.end.subscribe();
        // `self` holds the sender, so the channel cannot close.
        match end.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(end)) => end.clone(),
            _ => End { reason: ClosedReason::Local, parting: Parting::Cut },
        }
    }

    fn reason(&self) -> Option<ClosedReason> {
        self.end.borrow().as_ref().map(|e| e.reason.clone())
    }
}

/// An established connection.
#[derive(Debug)]
pub struct Connection {
    /// Sends messages; can be cloned.
    pub sender: Sender,
    /// Receives messages; dropping it ends the connection.
    pub receiver: Receiver,
}

impl Connection {
    /// Starts the tasks of a connection on the current tokio runtime, over the two halves of a stream.
    pub fn start<R, W>(r: R, w: W, agreed: &Agreed, options: Options) -> Self
    where
        R: AsyncRead + Unpin + Send + 'static,
        W: AsyncWrite + Unpin + Send + 'static,
    {
        let window = agreed.ours.credits;
        let (queue, queued) = mpsc::channel(options.send_queue.max(1));
        // The reader never waits for its consumer: costed messages are bounded by credits, others by what is added.
        let (inbox, received) = mpsc::channel(window as usize + reader::FREE_MESSAGES);
        let shared = Arc::new(Shared {
            stage: agreed.ours.stage,
            dtype: agreed.dtype(),
            inbound: agreed.inbound(),
            outbound: agreed.outbound(),
            options,
            ledger: Ledger::new(window, agreed.theirs.credits),
            wake: Notify::new(),
            end: watch::Sender::new(None),
            counters: Counters::default(),
            written: WriteLog::default(),
        });
        tokio::spawn(writer::run(w, Arc::clone(&shared), queued));
        tokio::spawn(reader::run(r, Arc::clone(&shared), inbox));
        Self {
            sender: Sender { shared: Arc::clone(&shared), queue },
            receiver: Receiver { shared, messages: received, ended: false },
        }
    }

    /// The two sides.
    #[must_use]
    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }
}

/// Sends messages, in order per sender. Waits while the queue is full because the peer grants no credits or takes no bytes.
#[derive(Clone, Debug)]
pub struct Sender {
    shared: Arc<Shared>,
    queue: mpsc::Sender<Queued>,
}

impl Sender {
    /// Queues a message.
    ///
    /// # Errors
    /// [`SendError`]. A queued message is lost if the connection ends before it is written.
    pub async fn send(&self, message: Message) -> Result<(), SendError> {
        self.check(&message)?;
        self.queue.send(Queued::new(message)).await.map_err(|_| self.closed_error())
    }

    /// Queues a message from an OS thread, which waits while the queue is full.
    ///
    /// # Errors
    /// As [`Sender::send`].
    ///
    /// # Panics
    /// When it would have to wait on a thread that runs async tasks; use [`Sender::send`] there.
    pub fn send_blocking(&self, message: Message) -> Result<(), SendError> {
        self.check(&message)?;
        let message = match self.queue.try_send(Queued::new(message)) {
            Ok(()) => return Ok(()),
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(self.closed_error()),
            Err(mpsc::error::TrySendError::Full(message)) => message,
        };
        self.queue.blocking_send(message).map_err(|_| self.closed_error())
    }

    fn check(&self, message: &Message) -> Result<(), SendError> {
        wire_len(message, self.shared.dtype, &self.shared.outbound)?;
        match self.shared.reason() {
            Some(reason) => Err(SendError::Closed(reason)),
            None => Ok(()),
        }
    }

    fn closed_error(&self) -> SendError {
        SendError::Closed(self.shared.reason().unwrap_or(ClosedReason::Local))
    }

    /// Ends the connection in order: what is queued is written, then a goodbye. Returns when that is done or the connection
    /// ended otherwise; a caller in a hurry drops this and calls [`Sender::close`].
    pub async fn goodbye(&self) {
        if self.queue.send(Queued::new(Message::Goodbye)).await.is_ok() {
            self.closed().await;
        }
    }

    /// Ends the connection after telling the peer why; what is queued is lost.
    pub fn fail(&self, report: Report) {
        self.shared.finish(ClosedReason::Local, Parting::Say(Message::Error(report)));
    }

    /// Ends the connection because of what the peer sent, after telling it so.
    pub fn protocol_error(&self, what: impl Into<String>) {
        let what = what.into();
        self.shared.finish(ClosedReason::Protocol(what.clone()), reader::protocol_words(&self.shared, what));
    }

    /// Ends the connection at once, without a word.
    pub fn close(&self) {
        self.shared.finish(ClosedReason::Local, Parting::Cut);
    }

    /// Waits for the end of the connection.
    pub async fn closed(&self) -> ClosedReason {
        self.shared.ended().await.reason
    }

    /// Credits left: costed messages the peer would take now.
    #[must_use]
    pub fn credits(&self) -> u32 {
        self.shared.ledger.credits()
    }

    /// What the connection carried so far.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        let c = &self.shared.counters;
        let get = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let time = |n: &AtomicU64| Duration::from_nanos(get(n));
        Traffic {
            sent: get(&c.sent),
            received: get(&c.received),
            sent_bytes: get(&c.sent_bytes),
            received_bytes: get(&c.received_bytes),
            write: time(&c.write_ns),
            wait: time(&c.queue_ns),
            credit_wait: time(&c.credit_ns),
        }
    }

    /// How the frame, or the predictions, of number `seq` got onto the wire. `None` before they are written and once 64
    /// newer ones took their place. Neither waits nor allocates.
    #[must_use]
    pub fn written(&self, seq: u64) -> Option<Written> {
        self.shared.written.get(seq)
    }
}

/// Something a connection tells its owner.
#[derive(Debug)]
pub enum Event {
    /// A frame, predictions, or an error of the peer.
    Message(Inbound),
    /// The connection ended. Comes once, after every message.
    Closed(ClosedReason),
}

/// A received message.
#[derive(Debug)]
pub struct Inbound {
    /// A frame, predictions, or an error.
    pub message: Message,
    /// To be dropped when the message has left the queue it went to.
    pub permit: Permit,
}

/// Stands for a place in the receiver's queue; dropping it lets the peer send one message more.
#[derive(Debug)]
pub struct Permit(Option<Arc<Shared>>);

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(shared) = self.0.take()
            && shared.ledger.release()
        {
            shared.wake.notify_one();
        }
    }
}

/// Receives messages. Dropping it ends the connection.
#[derive(Debug)]
pub struct Receiver {
    shared: Arc<Shared>,
    messages: mpsc::Receiver<Inbound>,
    ended: bool,
}

impl Receiver {
    /// The next message; after the last one, once, the reason of the end; then `None`.
    pub async fn next(&mut self) -> Option<Event> {
        if self.ended {
            return None;
        }
        match self.messages.recv().await {
            Some(inbound) => Some(Event::Message(inbound)),
            None => {
                self.ended = true;
                Some(Event::Closed(self.shared.ended().await.reason))
            }
        }
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.shared.finish(ClosedReason::Local, Parting::Cut);
    }
}
