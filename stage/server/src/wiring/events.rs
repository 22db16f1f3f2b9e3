//! What the events of a connection mean for a formation.

use splitmodel_link::frame::Frame;
use splitmodel_link::setup::RefusalCode;
use splitmodel_link::{ClosedReason, Connection, Event, Inbound, LinkError, Message, Permit, Sender};

/// What an event means for a connection on which nothing but errors may come: `Some` ends the formation. Whoever sent
/// something else is told so.
pub(super) fn ended(event: Option<Event>, peer: &str, sender: &Sender) -> Option<String> {
    match event {
        Some(Event::Message(Inbound { message: Message::Error(report), .. })) => {
            tracing::warn!(stage = report.stage, class = ?report.class, message = report.message, "{peer} reports");
            None // its connection ends next, or it lives on
        }
        Some(Event::Message(Inbound { message, .. })) => {
            let what = kind(&message);
            sender.protocol_error(format!("{what} came on a connection that carries none in this direction"));
            Some(format!("{peer} sent what it must not: {what}"))
        }
        Some(Event::Closed(ClosedReason::Goodbye)) => Some(format!("{peer} is shutting down")),
        Some(Event::Closed(reason)) => Some(format!("{peer}: {reason}")),
        None => Some(format!("{peer}: the connection ended")),
    }
}

fn kind(message: &Message) -> &'static str {
    match message {
        Message::Frame(_) => "a frame",
        Message::Predictions(_) => "predictions",
        Message::Credit(_) => "credit",
        Message::Ping(_) | Message::Pong(_) => "a ping",
        Message::Error(_) => "an error",
        Message::Goodbye => "a goodbye",
    }
}

/// Waits until the upstream connection ends, and keeps the frames that come.
pub(super) async fn lost(up: &mut Connection, early: &mut Vec<(Frame, Permit)>) -> String {
    loop {
        match up.receiver.next().await {
            Some(Event::Message(Inbound { message: Message::Frame(frame), permit })) => early.push((frame, permit)),
            other => {
                if let Some(why) = ended(other, "the upstream stage", &up.sender) {
                    return why;
                }
            }
        }
    }
}

/// Whether another attempt in this formation is pointless: a peer that answered and refused.
pub(super) fn is_final(error: &LinkError) -> bool {
    matches!(error, LinkError::Refused(r) | LinkError::Refusing(r) if r.code != RefusalCode::Busy)
}
