//! The reading task.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncRead, BufReader};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::timeout;

use super::watched::WatchedRead;
use super::{ClosedReason, Inbound, Parting, Permit, Shared};
use crate::codec::{Message, MessageReader};
use crate::error::LinkError;
use crate::frame::{ErrorClass, Report};

/// Messages without cost (errors) that may wait for the consumer.
pub(super) const FREE_MESSAGES: usize = 64;
/// A head and a small message in one read; what is larger goes past this buffer.
const BUFFER: usize = 8 << 10;
/// How long an ended connection reads on, so that the last words reach a peer that was still writing.
pub(super) const LINGER: Duration = Duration::from_secs(1);

pub(super) async fn run<R: AsyncRead + Unpin>(r: R, shared: Arc<Shared>, inbox: mpsc::Sender<Inbound>) {
    let mut r = BufReader::with_capacity(BUFFER, WatchedRead::new(r, Arc::clone(&shared)));
    let end = tokio::select! {
        biased;
        end = shared.ended() => end,
        (reason, parting) = receive(&mut r, &shared, &inbox) => {
            shared.finish(reason, parting);
            shared.ended().await
        }
    };
    drop(inbox);
    if !matches!(end.parting, Parting::Cut) {
        // Closing a socket with unread bytes resets it, and the peer would lose what it was told.
        let _ = timeout(LINGER, tokio::io::copy_buf(&mut r, &mut tokio::io::sink())).await;
    }
}

/// What the peer is told when it broke the protocol.
pub(super) fn protocol_words(shared: &Shared, message: String) -> Parting {
    words(shared, ErrorClass::Protocol, message)
}

fn words(shared: &Shared, class: ErrorClass, message: String) -> Parting {
    Parting::Say(Message::Error(Report { stage: shared.stage, class, record: None, session: 0, message }))
}

/// Receives until something ends the connection.
async fn receive<R: AsyncRead + Unpin>(
    r: &mut R,
    shared: &Arc<Shared>,
    inbox: &mpsc::Sender<Inbound>,
) -> (ClosedReason, Parting) {
    let mut reader = MessageReader::default();
    let mut last_error = None;
    loop {
        let message = match reader.read(r, &shared.inbound).await {
            Ok(message) => message,
            Err(e) => return failed(shared, e, last_error),
        };
        shared.counters.received.fetch_add(1, Ordering::Relaxed);
        shared.counters.received_bytes.fetch_add(reader.last_bytes(), Ordering::Relaxed);
        if let Message::Error(report) = &message {
            last_error = Some(report.clone());
        }
        match take(message, shared, inbox) {
            Ok(()) => {}
            Err(Stop::Broken(what)) => {
                return (ClosedReason::Protocol(what.into()), protocol_words(shared, what.into()));
            }
            Err(Stop::Goodbye) => return (ClosedReason::Goodbye, Parting::Cut),
            Err(Stop::Unwanted) => return (ClosedReason::Local, Parting::Cut),
        }
    }
}

enum Stop {
    /// The peer broke the protocol.
    Broken(&'static str),
    Goodbye,
    /// Nobody receives any more.
    Unwanted,
}

fn take(message: Message, shared: &Arc<Shared>, inbox: &mpsc::Sender<Inbound>) -> Result<(), Stop> {
    let permit = match message {
        Message::Frame(_) | Message::Predictions(_) => {
            if shared.ledger.received().ok_or(Stop::Broken("a message without a credit"))? {
                shared.wake.notify_one();
            }
            Permit(Some(Arc::clone(shared)))
        }
        Message::Error(_) => Permit(None),
        Message::Credit(n) if !shared.ledger.granted(n) => {
            return Err(Stop::Broken("more credits than were announced"));
        }
        Message::Credit(_) => {
            shared.wake.notify_one();
            return Ok(());
        }
        Message::Ping(n) => {
            shared.ledger.want_pong(n);
            shared.wake.notify_one();
            return Ok(());
        }
        Message::Pong(_) => return Ok(()),
        Message::Goodbye => return Err(Stop::Goodbye),
    };
    inbox.try_send(Inbound { message, permit }).map_err(|e| match e {
        TrySendError::Full(_) => Stop::Broken("more errors than anyone can take"),
        TrySendError::Closed(_) => Stop::Unwanted,
    })
}

fn failed(shared: &Shared, e: LinkError, last_error: Option<Report>) -> (ClosedReason, Parting) {
    match (e, last_error) {
        (LinkError::Codec(e), _) => (ClosedReason::Protocol(e.to_string()), words(shared, e.class(), e.to_string())),
        (LinkError::Io { source, .. }, _) if source.kind() == io::ErrorKind::TimedOut => {
            (ClosedReason::Timeout, Parting::Cut)
        }
        (_, Some(report)) => (ClosedReason::Refused(report), Parting::Cut),
        (LinkError::Io { source, .. }, None) => (ClosedReason::PeerLost(Arc::new(source)), Parting::Cut),
        (e, None) => (ClosedReason::PeerLost(Arc::new(io::Error::other(e))), Parting::Cut),
    }
}
