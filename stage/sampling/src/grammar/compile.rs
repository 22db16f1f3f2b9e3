//! Compiling, within bounds of size, stack and time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use llguidance::Matcher;
use llguidance::api::{ParserLimits, TopLevelGrammar};
use serde_json::{Map, Value, json};

use super::{Inner, bounds, words};
use crate::{GrammarSpec, SamplingError};

/// At most one blank or a line break with indentation between JSON tokens: without a bound a small model may emit
/// white space until its budget ends.
const WHITESPACE: &str = r"( |\r?\n[ \t]{0,20})";
/// The compiler goes one call deeper with each property, each `$ref` and each level. Only what is used becomes memory.
const STACK: usize = 256 << 20;
/// What no grammar within the bounds needs, even on a slow and busy machine. A compiler that is not done is left alone.
const LONGEST: Duration = Duration::from_secs(10);
/// Compilers left alone before no more are started.
const MAX_STUCK: usize = 2;

/// Limits of the engine beyond [`bounds`].
pub(super) fn limit(limits: &mut ParserLimits) {
    limits.verbose_errors = false;
    // Each state takes about 2 KiB, and a character of a bounded string may take a state.
    limits.max_lexer_states = 50_000;
    limits.max_grammar_size = 200_000;
    limits.initial_lexer_fuel = 500_000;
}

/// Compiles `spec` on a thread of its own.
pub(super) fn compile(inner: &Arc<Inner>, spec: &GrammarSpec) -> Result<Matcher, SamplingError> {
    let source = source(spec)?;
    if inner.stuck.load(Relaxed) >= MAX_STUCK {
        return Err(refused(spec, "other grammars keep the compiler busy; try again later".to_owned()));
    }
    let (tx, rx) = mpsc::sync_channel(1);
    let left = Arc::new(AtomicBool::new(false));
    let (of_thread, shared) = (left.clone(), inner.clone());
    let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK).spawn(move || {
        // The receiver waits, or has left.
        let _ = tx.send(build(&shared, source));
        if of_thread.swap(true, Relaxed) {
            shared.stuck.fetch_sub(1, Relaxed);
        }
    });
    thread.map_err(|e| refused(spec, format!("no thread for it can be started: {e}")))?;
    match rx.recv_timeout(LONGEST) {
        Ok(built) => built.map_err(|reason| refused(spec, words::clean(&reason))),
        Err(RecvTimeoutError::Disconnected) => Err(refused(spec, words::clean(""))),
        Err(RecvTimeoutError::Timeout) => {
            inner.stuck.fetch_add(1, Relaxed);
            if left.swap(true, Relaxed) {
                // It was done at the last moment, and did not count itself out.
                inner.stuck.fetch_sub(1, Relaxed);
            }
            Err(refused(spec, words::clean("too complex")))
        }
    }
}

/// What the engine compiles.
fn source(spec: &GrammarSpec) -> Result<TopLevelGrammar, SamplingError> {
    match spec {
        GrammarSpec::JsonSchema(Value::Object(schema)) => {
            bounds::check(schema).map_err(|why| refused(spec, why))?;
            Ok(json_schema(schema.clone()))
        }
        GrammarSpec::JsonSchema(_) => Err(refused(spec, "it must be an object".to_owned())),
        GrammarSpec::JsonObject => Ok(json_schema(Map::from_iter([("type".to_owned(), "object".into())]))),
        GrammarSpec::Regex(regex) => Ok(TopLevelGrammar::from_regex(regex)),
        GrammarSpec::Lark(lark) => Ok(TopLevelGrammar::from_lark(lark.clone())),
    }
}

/// Compiler options are ours: a caller's own could switch enforcement off.
fn json_schema(mut schema: Map<String, Value>) -> TopLevelGrammar {
    schema.insert("x-guidance".into(), json!({"whitespace_pattern": WHITESPACE}));
    TopLevelGrammar::from_json_schema(Value::Object(schema))
}

/// A matcher at its beginning, whose first mask is known to be there.
fn build(inner: &Inner, source: TopLevelGrammar) -> Result<Matcher, String> {
    let parser = inner.parsers.create_parser(source).map_err(|e| e.to_string())?;
    let matcher = Matcher::new(Ok(parser));
    if let Some(reason) = matcher.get_error() {
        return Err(reason);
    }
    // The first mask shows what compiling alone does not: a language without any text. The copy shares what it finds out.
    matcher.clone().compute_mask_or_eos().map_err(|e| e.to_string())?;
    Ok(matcher)
}

fn refused(spec: &GrammarSpec, reason: String) -> SamplingError {
    let kind = match spec {
        GrammarSpec::JsonSchema(_) => "JSON schema",
        GrammarSpec::JsonObject => "JSON object grammar",
        GrammarSpec::Regex(_) => "regular expression",
        GrammarSpec::Lark(_) => "Lark grammar",
    };
    SamplingError::InvalidGrammar { kind, reason }
}
