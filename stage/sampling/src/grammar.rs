//! Grammars over the model's vocabulary, by llguidance.

use std::sync::Arc;

use llguidance::{Matcher, ParserFactory, api::TopLevelGrammar};
use serde_json::{Value, json};
use toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};

use crate::{GrammarSpec, SamplingError, Token};

/// Longest piece a grammar can use; longer ones are never chosen while a grammar is on.
const MAX_PIECE: usize = 1000;
/// Bounds of toktrie's packed nodes.
const MAX_VOCAB: usize = 1 << 22;
const MAX_BYTES: usize = (1 << 22) - 1;
/// At most one blank or a line break with indentation between JSON tokens: without a bound a small model may emit
/// white space until its budget ends.
const WHITESPACE: &str = r"( |\r?\n[ \t]{0,20})";

struct Inner {
    parsers: ParserFactory,
    eog: Vec<Token>,
}

/// Compiles grammars for one vocabulary. Cheap to clone; shared between threads.
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
        parsers.limits_mut().verbose_errors = false;
        Ok(Self(Arc::new(Inner { parsers, eog: eog.to_vec() })))
    }

    /// Says whether `spec` can be enforced, before any token is made.
    ///
    /// # Errors
    /// [`SamplingError::InvalidGrammar`] with the reason: broken, unsatisfiable, too large, or using a feature that
    /// cannot be enforced.
    pub fn check(&self, spec: &GrammarSpec) -> Result<(), SamplingError> {
        // The first mask shows what compiling alone does not: a language without any text.
        self.matcher(spec)?.compute_mask_or_eos().map(drop).map_err(|e| refused(spec, &e.to_string()))
    }

    pub(crate) fn eog(&self) -> &[Token] {
        &self.0.eog
    }

    fn matcher(&self, spec: &GrammarSpec) -> Result<Matcher, SamplingError> {
        let grammar = match spec {
            GrammarSpec::JsonSchema(schema) => TopLevelGrammar::from_json_schema(with_options(schema, spec)?),
            GrammarSpec::JsonObject => {
                TopLevelGrammar::from_json_schema(with_options(&json!({"type": "object"}), spec)?)
            }
            GrammarSpec::Regex(regex) => TopLevelGrammar::from_regex(regex),
            GrammarSpec::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        };
        let parser = self.0.parsers.create_parser(grammar).map_err(|e| refused(spec, &e.to_string()))?;
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            Some(reason) => Err(refused(spec, &reason)),
            None => Ok(matcher),
        }
    }
}

/// Compiler options are ours: a caller's own could switch enforcement off.
fn with_options(schema: &Value, spec: &GrammarSpec) -> Result<Value, SamplingError> {
    let Value::Object(map) = schema else {
        return Err(refused(spec, "it must be an object"));
    };
    let mut map = map.clone();
    map.insert("x-guidance".into(), json!({"whitespace_pattern": WHITESPACE}));
    Ok(Value::Object(map))
}

fn refused(spec: &GrammarSpec, reason: &str) -> SamplingError {
    let kind = match spec {
        GrammarSpec::JsonSchema(_) => "JSON schema",
        GrammarSpec::JsonObject => "JSON object grammar",
        GrammarSpec::Regex(_) => "regular expression",
        GrammarSpec::Lark(_) => "Lark grammar",
    };
    SamplingError::InvalidGrammar { kind, reason: first_lines(reason) }
}

/// The engine's messages may carry a backtrace or the whole grammar.
fn first_lines(reason: &str) -> String {
    let text = reason.split("<backtrace>").next().unwrap_or_default().trim();
    match text.char_indices().nth(500) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
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
            Err(e) => self.failed = Some(first_lines(&e.to_string())),
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
                let reason = first_lines(&e.to_string());
                self.failed = Some(reason.clone());
                Err(GrammarStop::Failed(reason))
            }
        }
    }
}
