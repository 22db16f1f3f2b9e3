//! Schedule replay: the operations of a log through one slice (the unsplit model, as a rule), compared bit for bit.

use std::collections::HashMap;

use splitmodel_link::frame::{Lane, Position, SessionId, Token};
use splitmodel_sampling::{GenerationConfig, GrammarFactory, SessionSampler};

use crate::runtime::{Batch, Runtime, RuntimeError};
use crate::schedule::{LoggedLogits, LoggedRow, Op};
use crate::worker::digest;

/// A row whose replay differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Mismatch {
    /// Index of the operation.
    pub op: usize,
    /// Session.
    pub session: SessionId,
    /// Position of the row.
    pub position: Position,
    /// What differs.
    pub what: String,
}

/// Result of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replayed {
    /// Batches computed.
    pub batches: usize,
    /// Rows computed.
    pub rows: usize,
    /// Logits compared.
    pub compared: usize,
    /// Tokens sampled again.
    pub sampled: usize,
    /// Rows that differ; empty means bit-identical.
    pub mismatches: Vec<Mismatch>,
    /// Whether rows were dropped in the run: from then on stages may have had different cells.
    pub dropped: bool,
}

/// Why a replay could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The slice failed.
    #[error("operation {op}: {source}")]
    Runtime {
        /// Index of the operation.
        op: usize,
        /// What happened.
        source: RuntimeError,
    },
    /// The log asks for something impossible.
    #[error("operation {op}: {what}")]
    Log {
        /// Index of the operation.
        op: usize,
        /// What is wrong.
        what: String,
    },
}

struct Replay<'a, R: Runtime> {
    runtime: &'a mut R,
    grammars: Option<&'a GrammarFactory>,
    samplers: HashMap<Lane, (SessionId, SessionSampler)>,
    states: HashMap<u64, Vec<u8>>,
    result: Replayed,
}

/// Runs `ops` through `runtime` and compares every logged row of logits and every sampled token.
///
/// # Errors
/// [`ReplayError`] where the log cannot be run at all; differences are in the result.
pub fn replay<R: Runtime>(
    ops: &[Op],
    runtime: &mut R,
    grammars: Option<&GrammarFactory>,
) -> Result<Replayed, ReplayError> {
    let mut replay =
        Replay { runtime, grammars, samplers: HashMap::new(), states: HashMap::new(), result: Replayed::default() };
    for (i, op) in ops.iter().enumerate() {
        replay.apply(i, op)?;
    }
    Ok(replay.result)
}

impl<R: Runtime> Replay<'_, R> {
    fn apply(&mut self, i: usize, op: &Op) -> Result<(), ReplayError> {
        match op {
            Op::Clear => {
                self.runtime.clear();
                self.samplers.clear();
            }
            Op::SeqRm { lane, from, to } => {
                if !self.runtime.seq_rm(*lane, *from, *to) {
                    let what = format!("lane {lane}: cells [{from}, {to}) cannot be removed here, the run could");
                    return Err(ReplayError::Log { op: i, what });
                }
                if *from <= 0 {
                    self.samplers.remove(lane);
                } else if let Some((_, sampler)) = self.samplers.get_mut(lane) {
                    sampler.truncate(*from).map_err(|e| ReplayError::Log { op: i, what: e.to_string() })?;
                }
            }
            Op::SeqCp { from, to, begin, end } => self.runtime.seq_cp(*from, *to, *begin, *end),
            Op::SaveState { lane, page } => {
                let state = self.states.entry(*page).or_default();
                self.runtime.state(*lane, state).map_err(|source| ReplayError::Runtime { op: i, source })?;
            }
            Op::LoadState { page, lane } => {
                let what = || format!("the state of page {page} is not kept");
                let state = self.states.get(page).ok_or_else(|| ReplayError::Log { op: i, what: what() })?;
                self.runtime.set_state(*lane, state).map_err(|source| ReplayError::Runtime { op: i, source })?;
                self.samplers.remove(lane);
            }
            Op::DropState { page } => {
                self.states.remove(page);
            }
            Op::Config { session, lane, config } => {
                let config: GenerationConfig = serde_json::from_value(config.clone())
                    .map_err(|e| ReplayError::Log { op: i, what: format!("generation config: {e}") })?;
                let sampler = SessionSampler::new(config, self.grammars)
                    .map_err(|e| ReplayError::Log { op: i, what: e.to_string() })?;
                self.samplers.insert(*lane, (*session, sampler));
            }
            Op::Dropped { .. } => self.result.dropped = true,
            Op::Decode { rows, logits, .. } => self.decode(i, rows, logits)?,
        }
        Ok(())
    }

    fn decode(&mut self, i: usize, rows: &[LoggedRow], logged: &[LoggedLogits]) -> Result<(), ReplayError> {
        let fail = |source| ReplayError::Runtime { op: i, source };
        let tokens: Vec<Token> = rows.iter().map(|r| r.4).collect();
        let lanes: Vec<Lane> = rows.iter().map(|r| r.2).collect();
        let positions: Vec<Position> = rows.iter().map(|r| r.3).collect();
        let want: Vec<bool> = rows.iter().map(|r| r.5).collect();
        let mut input = Vec::new();
        self.runtime.embed(&tokens, &mut input).map_err(fail)?;
        self.runtime
            .decode(Batch { lanes: &lanes, positions: &positions, want: &want, input: &input })
            .map_err(fail)?;
        self.result.batches += 1;
        self.result.rows += rows.len();
        let mut logged = logged.iter().peekable();
        for (at, row) in rows.iter().enumerate() {
            let mine = logged.next_if(|l| l.row == at);
            self.sample(i, at, row, mine)?;
        }
        match logged.next() {
            Some(l) => Err(ReplayError::Log { op: i, what: format!("logits of row {} of {}", l.row, rows.len()) }),
            None => Ok(()),
        }
    }

    fn sample(
        &mut self,
        i: usize,
        at: usize,
        row: &LoggedRow,
        logged: Option<&LoggedLogits>,
    ) -> Result<(), ReplayError> {
        let &LoggedRow(session, _, lane, position, token, _) = row;
        let sampler = self.samplers.get_mut(&lane).filter(|(s, _)| *s == session).map(|(_, s)| s);
        let differs = |what: String| Mismatch { op: i, session, position, what };
        let mut found = Vec::new();
        let mut sampled = None;
        let logits = match logged {
            Some(_) => Some(self.runtime.logits(at).map_err(|source| ReplayError::Runtime { op: i, source })?),
            None => None,
        };
        if let Some(sampler) = sampler {
            let result = sampler.commit(position, token).and_then(|()| match logits {
                Some(logits) => sampler.sample(position, logits, false).map(|s| Some(s.token)),
                None => Ok(None),
            });
            sampled = result.unwrap_or(Some(-1));
        }
        if let (Some(logged), Some(logits)) = (logged, logits) {
            self.result.compared += 1;
            if logged.nan || logits.iter().any(|l| l.is_nan()) {
                found.push(differs("NaN among the logits".to_owned()));
            } else if digest(logits) != logged.digest {
                found.push(differs(difference(logits, logged.logits.as_deref())));
            }
            if let Some(sampled) = sampled {
                self.result.sampled += 1;
                if sampled != logged.token {
                    found.push(differs(format!("token {} was sampled, the replay samples {sampled}", logged.token)));
                }
            }
        }
        self.result.mismatches.append(&mut found);
        Ok(())
    }
}

fn difference(logits: &[f32], logged: Option<&[f32]>) -> String {
    let Some(logged) = logged else {
        return "the logits differ (log whole logits to see by how much)".to_owned();
    };
    // Not `f32::max`, which drops NaN.
    let worst = logits.iter().zip(logged).map(|(a, b)| (a - b).abs()).fold(0f32, |m, d| if d > m { d } else { m });
    format!("the logits differ by up to {worst:e}")
}
