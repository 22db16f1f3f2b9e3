//! A bound on strangers who dial and then say nothing.

use std::collections::VecDeque;

use tokio::task::AbortHandle;

/// Handshakes under way, each a task. When there are too many the oldest is ended: a genuine peer takes milliseconds, so
/// the oldest is a stranger's, and whoever comes next gets in however many of them hold a connection open. Dropping this
/// ends them all.
#[derive(Debug)]
pub struct Handshakes {
    limit: usize,
    running: VecDeque<AbortHandle>,
}

impl Handshakes {
    /// Room for `limit` of them, at least one.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), running: VecDeque::new() }
    }

    /// Runs a handshake on the current tokio runtime; says whether the oldest had to go for it.
    pub fn spawn(&mut self, handshake: impl Future<Output = ()> + Send + 'static) -> bool {
        self.running.retain(|h| !h.is_finished());
        let full = self.running.len() >= self.limit;
        if full && let Some(oldest) = self.running.pop_front() {
            oldest.abort();
        }
        self.running.push_back(tokio::spawn(handshake).abort_handle());
        full
    }
}

impl Drop for Handshakes {
    fn drop(&mut self) {
        self.running.iter().for_each(AbortHandle::abort);
    }
}
