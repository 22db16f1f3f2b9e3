//! The first tokens of deterministic answers, so that the same request again gets them without being computed.

use std::collections::HashMap;

use crate::{Namespace, Token};

/// Tokens of an answer that are kept at most.
pub const MAX_REPLAY: usize = 8;

/// What besides the prompt decides the tokens of a deterministic answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Of all that decides the tokens, as bytes.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

#[derive(Debug)]
struct Replay {
    tokens: Box<[Token]>,
    /// Larger is later.
    used: u64,
}

/// First tokens of answers by namespace, fingerprint and prompt; those used longest ago go first.
#[derive(Debug)]
pub struct Replays {
    most: usize,
    entries: HashMap<[u8; 32], Replay>,
    clock: u64,
}

impl Replays {
    /// Room for `most` answers; 0 keeps none.
    #[must_use]
    pub fn new(most: usize) -> Self {
        Self { most, entries: HashMap::new(), clock: 0 }
    }

    /// Answers kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keeps the beginning of the answer to `prompt`, at most [`MAX_REPLAY`] tokens, in place of a shorter one.
    pub fn record(&mut self, namespace: Namespace, fingerprint: Fingerprint, prompt: &[Token], answer: &[Token]) {
        let answer = &answer[..answer.len().min(MAX_REPLAY)];
        if answer.is_empty() || self.most == 0 {
            return;
        }
        self.clock += 1;
        let (key, used) = (key(namespace, fingerprint, prompt), self.clock);
        if let Some(replay) = self.entries.get_mut(&key) {
            replay.used = used;
            if replay.tokens.len() < answer.len() {
                replay.tokens = answer.into();
            }
            return;
        }
        if self.entries.len() >= self.most
            && let Some(oldest) = self.entries.iter().min_by_key(|(_, r)| r.used).map(|(key, _)| *key)
        {
            self.entries.remove(&oldest);
        }
        self.entries.insert(key, Replay { tokens: answer.into(), used });
    }

    /// The known beginning of the answer to `prompt`; empty where nothing is known. It counts as used.
    pub fn lookup(&mut self, namespace: Namespace, fingerprint: Fingerprint, prompt: &[Token]) -> &[Token] {
        self.clock += 1;
        let used = self.clock;
        let Some(replay) = self.entries.get_mut(&key(namespace, fingerprint, prompt)) else { return &[] };
        replay.used = used;
        &replay.tokens
    }
}

fn key(namespace: Namespace, fingerprint: Fingerprint, prompt: &[Token]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(namespace.bytes());
    hasher.update(&fingerprint.0);
    for token in prompt {
        hasher.update(&token.to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_request_only_and_no_more_than_eight_tokens() {
        let (some, other) = (Fingerprint::of(b"greedy"), Fingerprint::of(b"ignore_eos"));
        let (here, there) = (Namespace::default(), crate::Identity::default().namespace(Some("key"), None));
        let mut replays = Replays::new(4);
        replays.record(here, some, &[1, 2], &[7, 8]);
        assert_eq!(replays.lookup(here, some, &[1, 2]), [7, 8]);
        for (namespace, fingerprint, prompt) in
            [(there, some, &[1, 2][..]), (here, other, &[1, 2]), (here, some, &[1]), (here, some, &[1, 2, 7])]
        {
            assert!(replays.lookup(namespace, fingerprint, prompt).is_empty());
        }
        let long: Vec<Token> = (10..20).collect();
        replays.record(here, some, &[1, 2], &long);
        assert_eq!(replays.lookup(here, some, &[1, 2]), &long[..MAX_REPLAY], "a ninth token is never kept");
        replays.record(here, some, &[1, 2], &[10]);
        assert_eq!(replays.lookup(here, some, &[1, 2]).len(), MAX_REPLAY, "what is known stays known");
    }

    #[test]
    fn those_used_longest_ago_go_first() {
        let (some, here) = (Fingerprint::of(b""), Namespace::default());
        let mut replays = Replays::new(2);
        replays.record(here, some, &[1], &[5]);
        replays.record(here, some, &[2], &[5]);
        replays.lookup(here, some, &[1]);
        replays.record(here, some, &[3], &[5]);
        assert_eq!(replays.len(), 2);
        assert!(replays.lookup(here, some, &[2]).is_empty() && !replays.lookup(here, some, &[1]).is_empty());
        let mut none = Replays::new(0);
        none.record(here, some, &[1], &[5]);
        assert!(none.is_empty());
    }
}
