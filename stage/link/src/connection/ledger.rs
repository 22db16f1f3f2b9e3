//! Credits of both directions, and what the writer owes the peer besides the queue.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::codec::Message;

/// Credits and small answers of a connection.
#[derive(Debug)]
pub(super) struct Ledger(Mutex<State>);

#[derive(Debug)]
struct State {
    /// Messages we accept at a time.
    window: u32,
    /// Of them, what the peer may still send as far as we know.
    at_peer: u32,
    /// Places that became free and were not granted yet.
    freed: u32,
    /// Messages the peer accepts at a time.
    peer_window: u32,
    /// Of them, what we may still send.
    credits: u32,
    /// Number to answer a ping with; a newer ping replaces an older one.
    pong: Option<u64>,
    ping: bool,
    pings: u64,
}

impl State {
    /// Grants are bundled, but a peer without credits, or half a window of them, is not kept waiting.
    fn grant_due(&self) -> bool {
        self.freed > 0 && (self.at_peer == 0 || self.freed >= self.window.div_ceil(2))
    }
}

impl Ledger {
    pub(super) fn new(window: u32, peer_window: u32) -> Self {
        let state = State {
            window,
            at_peer: window,
            freed: 0,
            peer_window,
            credits: peer_window,
            pong: None,
            ping: false,
            pings: 0,
        };
        Self(Mutex::new(state))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn credits(&self) -> u32 {
        self.state().credits
    }

    /// Takes a credit for a message to the peer.
    pub(super) fn spend(&self) -> bool {
        let mut s = self.state();
        match s.credits.checked_sub(1) {
            Some(left) => s.credits = left,
            None => return false,
        }
        true
    }

    /// Notes a grant of the peer; `false` when it is more than the peer announced.
    pub(super) fn granted(&self, n: u32) -> bool {
        let mut s = self.state();
        match s.credits.checked_add(n) {
            Some(sum) if sum <= s.peer_window => s.credits = sum,
            _ => return false,
        }
        true
    }

    /// Notes a costed message of the peer; `None` when it had no credit for it, else whether a grant is due.
    pub(super) fn received(&self) -> Option<bool> {
        let mut s = self.state();
        s.at_peer = s.at_peer.checked_sub(1)?;
        Some(s.grant_due())
    }

    /// Notes a place that became free; whether a grant is due.
    pub(super) fn release(&self) -> bool {
        let mut s = self.state();
        s.freed += 1;
        s.grant_due()
    }

    pub(super) fn want_pong(&self, n: u64) {
        self.state().pong = Some(n);
    }

    pub(super) fn want_ping(&self) {
        self.state().ping = true;
    }

    /// The next message owed to the peer.
    pub(super) fn owed(&self) -> Option<Message> {
        let mut s = self.state();
        if s.grant_due() {
            let n = std::mem::take(&mut s.freed);
            s.at_peer += n;
            return Some(Message::Credit(n));
        }
        if let Some(n) = s.pong.take() {
            return Some(Message::Pong(n));
        }
        if std::mem::take(&mut s.ping) {
            s.pings += 1;
            return Some(Message::Ping(s.pings));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrun_and_overgrant_are_seen() {
        let l = Ledger::new(2, 3);
        assert_eq!(l.received(), Some(false));
        assert_eq!(l.received(), Some(false));
        assert_eq!(l.received(), None);
        assert!(!l.granted(1), "all three are there");
        assert!(l.spend() && l.spend() && l.spend() && !l.spend());
        assert!(!l.granted(4) && !l.granted(u32::MAX));
        assert!(l.granted(3));
        assert_eq!(l.credits(), 3);
    }

    /// However many places a consumer holds on to, a peer that ran dry gets every place that becomes free.
    #[test]
    fn a_dry_peer_is_granted_every_place() {
        for window in 1..9 {
            let l = Ledger::new(window, 1);
            let (mut peer, mut held) = (window, 0);
            for step in 0..200 {
                while peer > 0 {
                    assert!(l.received().is_some());
                    peer -= 1;
                    held += 1;
                    if let Some(Message::Credit(n)) = l.owed() {
                        peer += n;
                    }
                    if held == window {
                        break;
                    }
                }
                assert!(held > 0, "window {window}, step {step}: nothing held and nothing to send");
                l.release();
                held -= 1;
                if let Some(Message::Credit(n)) = l.owed() {
                    peer += n;
                }
                assert!(peer + held <= window);
            }
        }
    }
}
