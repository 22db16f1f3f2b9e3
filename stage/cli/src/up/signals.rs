//! Ctrl-C and its kin.
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::error::CliError;

/// The signals that ask `up` to end. From when this exists, they no longer end the process by themselves.
#[derive(Debug)]
pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
    hangup: Signal,
}

impl Signals {
    /// Takes over the signals.
    ///
    /// # Errors
    /// [`CliError::System`].
    pub fn install() -> Result<Self, CliError> {
        let take = |kind| signal(kind).map_err(|source| CliError::System { action: "listen for signals", source });
        Ok(Self {
            interrupt: take(SignalKind::interrupt())?,
            terminate: take(SignalKind::terminate())?,
            hangup: take(SignalKind::hangup())?,
        })
    }

    /// Waits for the next one.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}
