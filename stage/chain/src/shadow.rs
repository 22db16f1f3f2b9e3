//! A model-free shadow of the cache: which token of which session stands in which cell. Fed with a schedule, it proves
//! that at every step each lane holds exactly its session's token history.

use std::collections::HashMap;

use splitmodel_link::frame::{Lane, Position, SessionId, Token};

use crate::schedule::{LoggedRow, Op};

/// A lane held something else than its session's history.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone)]
#[error("operation {op}: lane {lane} of session {session}: {what}")]
pub struct Difference {
    /// Index of the operation in the schedule.
    pub op: usize,
    /// Lane.
    pub lane: Lane,
    /// Session.
    pub session: SessionId,
    /// What differs.
    pub what: String,
}

#[derive(Clone, Default)]
struct Cells {
    /// Nobody's, where the cells were shared from elsewhere and no row came yet.
    owner: Option<SessionId>,
    tokens: Vec<Token>,
}

/// Contents of all lanes.
#[derive(Clone, Default)]
pub struct Shadow {
    lanes: HashMap<Lane, Cells>,
    states: HashMap<u64, Cells>,
    histories: HashMap<SessionId, Vec<Token>>,
    /// Sessions whose history was given from outside and is complete.
    known: bool,
    ops: usize,
}

impl Shadow {
    /// A shadow that learns histories from the rows: a position once computed must never hold another token.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A shadow that knows each session's whole token history (prompt and answer).
    #[must_use]
    pub fn with_histories(histories: HashMap<SessionId, Vec<Token>>) -> Self {
        Self { histories, known: true, ..Self::default() }
    }

    /// Tokens that a lane holds now.
    #[must_use]
    pub fn lane(&self, lane: Lane) -> &[Token] {
        self.lanes.get(&lane).map_or(&[], |c| &c.tokens)
    }

    /// Applies one operation and checks every lane it touched.
    ///
    /// # Errors
    /// The first [`Difference`].
    pub fn apply(&mut self, op: &Op) -> Result<(), Difference> {
        let at = self.ops;
        self.ops += 1;
        match op {
            Op::Clear => self.lanes.clear(),
            Op::SaveState { lane, page } => {
                let cells = self.lanes.get(lane).cloned().unwrap_or_default();
                self.states.insert(*page, Cells { owner: None, ..cells });
            }
            Op::LoadState { page, lane } => {
                let Some(cells) = self.states.get(page).cloned() else {
                    let what = format!("got the state of page {page}, which is not kept");
                    return Err(Difference { op: at, lane: *lane, session: 0, what });
                };
                self.lanes.insert(*lane, cells);
            }
            Op::DropState { page } => {
                self.states.remove(page);
            }
            Op::SeqRm { lane, from, to } => self.remove(at, *lane, *from, *to)?,
            Op::SeqCp { from, to, end, .. } => {
                let mut cells = self.lanes.get(from).cloned().unwrap_or_default();
                cells.tokens.truncate(usize::try_from(*end).unwrap_or(usize::MAX));
                cells.owner = None;
                self.lanes.insert(*to, cells);
            }
            Op::Decode { rows, .. } => {
                for row in rows {
                    self.add(at, row)?;
                }
            }
            Op::Config { .. } | Op::Dropped { .. } => {}
        }
        Ok(())
    }

    fn remove(&mut self, op: usize, lane: Lane, from: Position, to: Position) -> Result<(), Difference> {
        let Some(cells) = self.lanes.get_mut(&lane) else { return Ok(()) };
        let from = usize::try_from(from).unwrap_or(0);
        if usize::try_from(to).is_ok_and(|to| to < cells.tokens.len()) {
            let what = format!("cells [{from}, {to}) were cut out of the middle of {}", cells.tokens.len());
            return Err(Difference { op, lane, session: cells.owner.unwrap_or_default(), what });
        }
        cells.tokens.truncate(from);
        // What is left may be taken over.
        cells.owner = None;
        Ok(())
    }

    fn add(&mut self, op: usize, row: &LoggedRow) -> Result<(), Difference> {
        let &LoggedRow(session, _, lane, position, token, _) = row;
        let cells = self.lanes.entry(lane).or_default();
        let fail = |what: String| Err(Difference { op, lane, session, what });
        if let Some(owner) = cells.owner.filter(|o| *o != session && !cells.tokens.is_empty()) {
            let what = format!("still holds {} cells of session {owner}", cells.tokens.len());
            return fail(what);
        }
        let history = self.histories.entry(session).or_default();
        // Cells taken over must be what the session would have computed.
        let taken = if cells.owner == Some(session) { cells.tokens.len() } else { 0 };
        let rows = cells.tokens[taken..].iter().copied().chain([token]);
        if usize::try_from(position) != Ok(cells.tokens.len()) {
            return fail(format!("position {position} was computed on top of {} cells", cells.tokens.len()));
        }
        for (at, token) in (taken..).zip(rows) {
            match history.get(at) {
                Some(&t) if t == token => {}
                Some(&t) => return fail(format!("position {at} holds token {token}, its history says {t}")),
                None if self.known => return fail(format!("position {at} is past its history of {}", history.len())),
                None => history.push(token),
            }
        }
        cells.owner = Some(session);
        cells.tokens.push(token);
        Ok(())
    }
}

/// Checks a whole schedule.
///
/// # Errors
/// The first [`Difference`].
pub fn check(ops: &[Op], histories: Option<HashMap<SessionId, Vec<Token>>>) -> Result<(), Difference> {
    let mut shadow = histories.map_or_else(Shadow::new, Shadow::with_histories);
    ops.iter().try_for_each(|op| shadow.apply(op))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(rows: &[(SessionId, Lane, Position, Token)]) -> Op {
        let rows = rows.iter().map(|&(s, l, p, t)| LoggedRow(s, 0, l, p, t, false)).collect();
        Op::Decode { seq: 0, rows, logits: Vec::new() }
    }

    #[test]
    fn sees_what_it_must_see() {
        let good = [
            Op::Clear,
            decode(&[(1, 0, 0, 5), (1, 0, 1, 6), (2, 1, 0, 9)]),
            Op::SeqRm { lane: 0, from: 1, to: -1 },
            decode(&[(1, 0, 1, 6)]),
            Op::SeqRm { lane: 0, from: -1, to: -1 },
            decode(&[(3, 0, 0, 1)]),
        ];
        assert_eq!(check(&good, None), Ok(()));
        let other_token = [decode(&[(1, 0, 0, 5)]), Op::SeqRm { lane: 0, from: 0, to: -1 }, decode(&[(1, 0, 0, 6)])];
        assert!(check(&other_token, None).unwrap_err().what.contains("its history says 5"));
        let gap = [decode(&[(1, 0, 0, 5)]), decode(&[(1, 0, 2, 5)])];
        assert!(check(&gap, None).unwrap_err().what.contains("on top of 1 cells"));
        let foreign = [decode(&[(1, 0, 0, 5)]), decode(&[(2, 0, 1, 5)])];
        assert!(check(&foreign, None).unwrap_err().what.contains("of session 1"));
        let middle = [decode(&[(1, 0, 0, 5), (1, 0, 1, 5)]), Op::SeqRm { lane: 0, from: 0, to: 1 }];
        assert!(check(&middle, None).is_err());
        let shared = |second: Token| {
            let cp = |from, to| Op::SeqCp { from, to, begin: 0, end: 1 };
            let gone = Op::SeqRm { lane: 0, from: -1, to: -1 };
            let known = HashMap::from([(1, vec![5, 6]), (2, vec![second, 8])]);
            check(
                &[decode(&[(1, 0, 0, 5), (1, 0, 1, 6)]), cp(0, 9), gone, cp(9, 0), decode(&[(2, 0, 1, 8)])],
                Some(known),
            )
        };
        assert_eq!(shared(5), Ok(()));
        assert!(shared(4).unwrap_err().what.contains("position 0 holds token 5, its history says 4"));
        let kept = |second: Token| {
            let gone = Op::SeqRm { lane: 0, from: -1, to: -1 };
            let (save, load) = (Op::SaveState { lane: 0, page: 4 }, Op::LoadState { page: 4, lane: 3 });
            let ops = [decode(&[(1, 0, 0, 5)]), save, decode(&[(1, 0, 1, 6)]), gone, load, decode(&[(2, 3, 1, 8)])];
            check(&ops, Some(HashMap::from([(1, vec![5, 6]), (2, vec![second, 8])])))
        };
        assert_eq!(kept(5), Ok(()));
        assert!(kept(4).unwrap_err().what.contains("position 0 holds token 5, its history says 4"));
        let lost = [Op::DropState { page: 4 }, Op::LoadState { page: 4, lane: 3 }];
        assert!(check(&lost, None).unwrap_err().what.contains("not kept"));
        let known = HashMap::from([(1, vec![5])]);
        assert!(check(&[decode(&[(1, 0, 0, 5), (1, 0, 1, 5)])], Some(known)).unwrap_err().what.contains("past"));
    }
}
