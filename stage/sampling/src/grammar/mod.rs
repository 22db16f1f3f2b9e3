//! Grammars over the model's vocabulary, by llguidance.

mod bounds;
mod cache;
mod compile;
mod words;

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

use llguidance::{Matcher, ParserFactory};
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use crate::{GrammarSpec, SamplingError, Token};
use cache::{Cache, Compiled};

/// Longest piece a grammar can use; longer ones are never chosen while a grammar is on.
const MAX_PIECE: usize = 1000;
/// Bounds of toktrie's packed nodes.
const MAX_VOCAB: usize = 1 << 22;
const MAX_BYTES: usize = (1 << 22) - 1;
struct Inner {
    parsers: ParserFactory,
    eog: Vec<Token>,
    cache: Mutex<Cache>,
    /// Compilers that nobody waits for any more.
    stuck: AtomicUsize,
}

/// Compiles grammars for one vocabulary, and keeps those it compiled last. Cheap to clone; shared between threads.
///
/// What a specification may have is bounded so that compiling takes about 100 ms at most on a core of today. A copy of one
/// that is kept takes a fraction of a millisecond.
#[derive(Clone)]
pub struct GrammarFactory(Arc<Inner>);

impl std::fmt::Debug for GrammarFactory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarFactory").field("eog", &self.0.eog).finish_non_exhaustive()
    }
}

impl GrammarFactory {
    /// `pieces[id]` holds the bytes that token `id` adds to the text. Control tokens must have an empty piece: a grammar
    /// then never allows them as text. `eog` are the tokens that end a generation; their pieces are ignored.
    ///
    /// # Errors
    /// [`SamplingError::InvalidVocabulary`] when there are no or too many tokens, or an end token is outside.
    pub fn new(mut pieces: Vec<Vec<u8>>, eog: &[Token]) -> Result<Self, SamplingError> {
        let bad = |reason: String| Err(SamplingError::InvalidVocabulary(reason));
        if pieces.is_empty() || pieces.len() > MAX_VOCAB {
            return bad(format!("it has {} tokens; 1 to {MAX_VOCAB} are accepted", pieces.len()));
        }
        let mut ends = Vec::with_capacity(eog.len());
        for &token in eog {
            match usize::try_from(token).ok().filter(|t| *t < pieces.len()) {
                Some(id) => {
                    // The marker byte keeps an end token's piece from being taken for text.
                    pieces[id] = [&[TokTrie::SPECIAL_TOKEN_MARKER][..], format!("<end-{id}>").as_bytes()].concat();
                    ends.push(id as u32);
                }
                None => return bad(format!("end token {token} is outside its {} tokens", pieces.len())),
            }
        }
        if ends.is_empty() {
            return bad("it names no end token, so no grammar could end".into());
        }
        for piece in pieces.iter_mut().filter(|p| p.len() > MAX_PIECE) {
            piece.clear();
        }
        let bytes: usize = pieces.iter().map(Vec::len).sum();
        if bytes > MAX_BYTES {
            return bad(format!("its pieces have {bytes} bytes; at most {MAX_BYTES} are accepted"));
        }
        let info = TokRxInfo::new(pieces.len() as u32, ends[0]);
        let trie = TokTrie::from(&info, &pieces).with_eos_tokens(&ends);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut parsers =
            ParserFactory::new_simple(&env).map_err(|e| SamplingError::InvalidVocabulary(e.to_string()))?;
        parsers.quiet();
        compile::limit(parsers.limits_mut());
        let cache = Mutex::new(Cache::default());
        Ok(Self(Arc::new(Inner { parsers, eog: eog.to_vec(), cache, stuck: AtomicUsize::new(0) })))
    }

    /// Says whether `spec` can be enforced, before any token is made, and keeps what it compiled: a sampler made with this
    /// factory soon after does not compile again.
    ///
    /// # Errors
    /// [`SamplingError::InvalidGrammar`] with the reason: broken, unsatisfiable, too large, or using a feature that
    /// cannot be enforced.
    pub fn check(&self, spec: &GrammarSpec) -> Result<(), SamplingError> {
        self.compiled(spec).map(drop)
    }

    /// Whether a sampler for `spec` would find it compiled.
    #[must_use]
    pub fn is_compiled(&self, spec: &GrammarSpec) -> bool {
        let key = cache::key(spec).0;
        self.cache().get(&key).is_some()
    }

    pub(crate) fn eog(&self) -> &[Token] {
        &self.0.eog
    }

    fn matcher(&self, spec: &GrammarSpec) -> Result<Matcher, SamplingError> {
        let compiled = self.compiled(spec)?;
        let kept = compiled.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(kept.deep_clone())
    }

    fn compiled(&self, spec: &GrammarSpec) -> Result<Compiled, SamplingError> {
        let (key, bytes) = cache::key(spec);
        if let Some(kept) = self.cache().get(&key) {
            return Ok(kept);
        }
        let compiled: Compiled = Arc::new(Mutex::new(compile::compile(&self.0, spec)?));
        self.cache().put(key, bytes, compiled.clone());
        Ok(compiled)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.0.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a grammar allows next.
pub(crate) enum Allowed {
    /// The tokens of text in `mask`, and where `end`, end tokens.
    Tokens { mask: SimpleVob, end: bool },
    /// The text is complete: an end token only.
    End,
}

/// Why a grammar has no answer.
pub(crate) enum GrammarStop {
    /// The token of this index (counted over generated tokens) is outside the grammar.
    Off(usize),
    /// The engine's words.
    Failed(String),
}

/// A session's place in its grammar; indices count generated tokens.
pub(crate) struct GrammarState {
    factory: GrammarFactory,
    spec: GrammarSpec,
    /// All end tokens, the factory's and the session's own.
    ends: Vec<Token>,
    matcher: Matcher,
    /// Tokens the matcher took; the following ones came after its end or its refusal.
    fed: usize,
    /// All generated tokens committed.
    total: usize,
    /// First token that the grammar does not allow.
    off: Option<usize>,
    failed: Option<String>,
}

impl GrammarState {
    pub(crate) fn new(factory: &GrammarFactory, spec: &GrammarSpec, ends: &[Token]) -> Result<Self, SamplingError> {
        Ok(Self {
            factory: factory.clone(),
            spec: spec.clone(),
            ends: ends.to_vec(),
            matcher: factory.matcher(spec)?,
            fed: 0,
            total: 0,
            off: None,
            failed: None,
        })
    }

    /// Takes a generated token. One that is not allowed is remembered: it may be a draft that is taken back.
    pub(crate) fn commit(&mut self, token: Token) {
        let index = self.total;
        self.total += 1;
        if self.off.is_some() || self.failed.is_some() {
            return;
        }
        let is_end = self.ends.contains(&token);
        if self.matcher.is_stopped() {
            // Nothing but further end tokens can follow the end.
            if !is_end {
                self.off = Some(index);
            }
            return;
        }
        // The matcher knows the factory's end tokens; one stands for all.
        let known = if is_end { self.factory.0.eog[0] } else { token };
        let Ok(id) = u32::try_from(known) else {
            self.off = Some(index);
            return;
        };
        match self.matcher.try_consume_tokens(&[id]) {
            Ok(1) => self.fed += 1,
            Ok(_) => self.off = Some(index),
            Err(e) => self.failed = Some(words::clean(&e.to_string())),
        }
    }

    /// Goes back to the first `kept` generated tokens, which `generated` holds.
    pub(crate) fn truncate(&mut self, kept: usize, generated: &[Token]) -> Result<(), SamplingError> {
        if kept >= self.total {
            return Ok(());
        }
        let dropped_end = generated.iter().take(self.fed).skip(kept).any(|t| self.ends.contains(t));
        self.total = kept;
        self.off = self.off.filter(|i| *i < kept);
        if self.failed.is_none() && self.fed <= kept {
            return Ok(());
        }
        // The matcher does not count every end token it takes, so a rollback over one could go too far.
        if self.failed.is_none() && !dropped_end && self.matcher.rollback(self.fed - kept).is_ok() {
            self.fed = kept;
            return Ok(());
        }
        let mut fresh = Self::new(&self.factory, &self.spec, &self.ends)?;
        generated.iter().take(kept).for_each(|t| fresh.commit(*t));
        *self = fresh;
        Ok(())
    }

    pub(crate) fn allowed(&mut self) -> Result<Allowed, GrammarStop> {
        if let Some(index) = self.off {
            return Err(GrammarStop::Off(index));
        }
        if let Some(reason) = &self.failed {
            return Err(GrammarStop::Failed(reason.clone()));
        }
        if self.matcher.is_stopped() {
            return Ok(Allowed::End);
        }
        match self.matcher.compute_mask() {
            Ok(mut mask) => {
                let end = mask.is_allowed(self.factory.0.eog[0] as u32);
                let len = mask.len();
                for token in self.ends.iter().filter(|t| (**t as usize) < len) {
                    mask.disallow_token(*token as u32);
                }
                Ok(Allowed::Tokens { mask, end })
            }
            Err(e) => {
                let reason = words::clean(&e.to_string());
                self.failed = Some(reason.clone());
                Err(GrammarStop::Failed(reason))
            }
        }
    }
}
