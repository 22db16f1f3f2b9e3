//! Tokens of texts that came before: a system prompt or an earlier message is not tokenized again with every request.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use quick_cache::Weighter;
use quick_cache::unsync::Cache;

use crate::backend::Token;

/// Bytes of tokens and names that are kept.
const MAX_BYTES: u64 = 8 << 20;
/// Shorter texts are tokenized in less time than it takes to tell.
const MIN_TEXT: usize = 256;

/// Name of a text: the hash of what it says and of who says it.
type Name = blake3::Hash;

#[derive(Debug, Clone)]
struct Bytes;

impl Weighter<Name, Arc<[Token]>> for Bytes {
    fn weight(&self, name: &Name, tokens: &Arc<[Token]>) -> u64 {
        (size_of_val(name) + size_of_val(&tokens[..])) as u64
    }
}

/// Whose texts these are: how long a request takes tells nobody what others have sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scope(Name);

impl Scope {
    /// Of requests with this `prompt_cache_key` and this tenant.
    pub(crate) fn of(cache_key: Option<&str>, tenant: Option<&str>) -> Self {
        let mut hasher = blake3::Hasher::new();
        for field in [cache_key, tenant] {
            // No pair of fields looks like another one.
            let length = field.map_or(u64::MAX, |f| f.len() as u64);
            hasher.update(&length.to_le_bytes()).update(field.unwrap_or_default().as_bytes());
        }
        Self(hasher.finalize())
    }

    fn name(self, text: &str) -> Name {
        blake3::keyed_hash(self.0.as_bytes(), text.as_bytes())
    }
}

/// Tokens by text, those used least go first.
#[derive(Debug)]
pub(crate) struct Memo(Mutex<Cache<Name, Arc<[Token]>, Bytes>>);

impl Default for Memo {
    fn default() -> Self {
        // An estimate: a message of a few hundred tokens.
        Self(Mutex::new(Cache::with_weighter(MAX_BYTES as usize / 2048, MAX_BYTES, Bytes)))
    }
}

impl Memo {
    /// Adds the tokens of `text` to `out`, which `tokenize` gives where they are not known.
    ///
    /// # Errors
    /// Those of `tokenize`; nothing is kept then.
    pub(crate) fn tokens<E>(
        &self,
        scope: Scope,
        text: &str,
        out: &mut Vec<Token>,
        tokenize: impl FnOnce() -> Result<Vec<Token>, E>,
    ) -> Result<(), E> {
        if text.len() < MIN_TEXT {
            out.extend(tokenize()?);
            return Ok(());
        }
        let name = scope.name(text);
        let known = self.lock().get(&name).cloned();
        let tokens = match known {
            Some(tokens) => tokens,
            None => {
                let tokens: Arc<[Token]> = tokenize()?.into();
                self.lock().insert(name, tokens.clone());
                tokens
            }
        };
        out.extend_from_slice(&tokens);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Cache<Name, Arc<[Token]>, Bytes>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tokens, and whether the text was tokenized.
    fn ask(memo: &Memo, scope: Scope, text: &str) -> (Vec<Token>, bool) {
        let (mut out, mut tokenized) = (vec![-1], false);
        let tokens = || {
            tokenized = true;
            Ok::<_, ()>(text.bytes().map(Token::from).collect())
        };
        memo.tokens(scope, text, &mut out, tokens).unwrap();
        (out.split_off(1), tokenized)
    }

    #[test]
    fn a_long_text_is_tokenized_once() {
        let (memo, text) = (Memo::default(), "a".repeat(MIN_TEXT));
        let mine = Scope::of(None, None);
        let first = ask(&memo, mine, &text);
        assert_eq!((first.0.len(), first.1), (MIN_TEXT, true));
        assert_eq!(ask(&memo, mine, &text), (first.0, false));
        assert!(ask(&memo, mine, &"b".repeat(MIN_TEXT)).1);
        assert!(ask(&memo, mine, &text[1..]).1 && ask(&memo, mine, &text[1..]).1, "too short to be worth it");
    }

    #[test]
    fn nobody_finds_what_others_have_sent() {
        let (memo, text) = (Memo::default(), "a".repeat(MIN_TEXT));
        let scopes = [(None, None), (Some("k"), None), (None, Some("k")), (Some(""), None), (Some("k"), Some("k"))];
        for (cache_key, tenant) in scopes {
            assert!(ask(&memo, Scope::of(cache_key, tenant), &text).1, "{cache_key:?} {tenant:?}");
            assert!(!ask(&memo, Scope::of(cache_key, tenant), &text).1);
        }
    }

    #[test]
    fn memory_is_limited_and_failures_are_not_kept() {
        let memo = Memo::default();
        let mine = Scope::of(None, None);
        for i in 0..200 {
            ask(&memo, mine, &format!("{i:05} {}", "a".repeat(20_000)));
        }
        let cache = memo.lock();
        assert!(cache.weight() <= MAX_BYTES && cache.len() > 50, "{} bytes, {} texts", cache.weight(), cache.len());
        drop(cache);
        let text = "c".repeat(MIN_TEXT);
        assert_eq!(memo.tokens(mine, &text, &mut Vec::new(), || Err("no")), Err("no"));
        assert!(ask(&memo, mine, &text).1);
    }
}
