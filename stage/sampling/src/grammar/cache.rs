//! Grammars compiled last.

use std::sync::{Arc, Mutex};

use blake3::Hash;
use llguidance::Matcher;

use crate::GrammarSpec;

/// Grammars kept.
const ENTRIES: usize = 64;
/// Bytes of their specifications together; what is compiled takes about ten times as many.
const BYTES: usize = 2 << 20;

/// A grammar at its beginning, to be copied.
pub(super) type Compiled = Arc<Mutex<Matcher>>;

/// A digest of `spec`, in which the order of properties counts as it does in what is compiled, and its bytes as JSON.
pub(super) fn key(spec: &GrammarSpec) -> (Hash, usize) {
    // A tree of JSON always has a JSON form.
    let json = serde_json::to_vec(spec).unwrap_or_default();
    (blake3::hash(&json), json.len())
}

/// The least recently used go first.
#[derive(Default)]
pub(super) struct Cache {
    /// The last one was used last.
    entries: Vec<(Hash, usize, Compiled)>,
    bytes: usize,
}

impl Cache {
    pub(super) fn get(&mut self, key: &Hash) -> Option<Compiled> {
        let at = self.entries.iter().position(|e| e.0 == *key)?;
        let entry = self.entries.remove(at);
        let compiled = entry.2.clone();
        self.entries.push(entry);
        Some(compiled)
    }

    pub(super) fn put(&mut self, key: Hash, bytes: usize, compiled: Compiled) {
        if bytes > BYTES || self.get(&key).is_some() {
            return;
        }
        self.entries.push((key, bytes, compiled));
        self.bytes += bytes;
        while self.entries.len() > ENTRIES || self.bytes > BYTES {
            self.bytes -= self.entries.remove(0).1;
        }
    }
}
