//! Resident prefixes of a stage: sequences beside the lanes that share cells with them.

use splitmodel_link::frame::{Candidate, Lane, Position, Target};

use super::Worker;
use crate::runtime::Runtime;
use crate::schedule::Op;

impl<R: Runtime> Worker<R> {
    /// Cells of all residents, as if none were shared.
    #[must_use]
    pub fn resident_cells(&self) -> usize {
        self.residents.iter().flatten().map(|(_, length)| *length as usize).sum()
    }

    /// Sequence of a resident.
    fn sequence(&self, slot: u16) -> Lane {
        Lane::try_from(self.lanes.len() + usize::from(slot)).unwrap_or(Lane::MAX)
    }

    /// Gives the lane to the session, with the cells of the longest candidate that is here; keeps the candidates that are.
    pub(super) fn restore(&mut self, target: Target, candidates: &mut Vec<Candidate>) -> u32 {
        let residents = &self.residents;
        let here = |c: &Candidate| {
            let resident = residents.get(usize::from(c.slot)).copied().flatten();
            resident.is_some_and(|(page, length)| page == c.page && c.length <= length)
        };
        candidates.retain(here);
        if usize::from(target.lane) >= self.lanes.len() {
            candidates.clear(); // its rows are reported
            return 0;
        }
        self.take(target.lane, target.session);
        let Some(best) = candidates.iter().max_by_key(|c| c.length).copied() else { return 0 };
        self.share(self.sequence(best.slot), target.lane, best.length);
        if let Some(Some(state)) = self.lanes.get_mut(usize::from(target.lane)) {
            state.next = Position::try_from(best.length).unwrap_or(Position::MAX);
        }
        best.length
    }

    /// Keeps the session's first cells; where it has too few, nothing stands in the slot afterwards.
    pub(super) fn record(&mut self, target: Target, resident: Candidate) {
        if usize::from(resident.slot) >= self.residents.len() {
            return; // a restore will find nothing
        }
        self.evict(resident.slot);
        let state = self.slot(target.lane).filter(|l| l.session == target.session);
        if state.is_some_and(|l| i64::from(l.next) >= i64::from(resident.length)) {
            self.share(target.lane, self.sequence(resident.slot), resident.length);
            self.residents[usize::from(resident.slot)] = Some((resident.page, resident.length));
        }
    }

    pub(super) fn evict(&mut self, slot: u16) {
        if self.residents.get_mut(usize::from(slot)).and_then(Option::take).is_some() {
            self.remove(self.sequence(slot), -1);
        }
    }

    /// Makes `to`, which is empty, share the first `length` cells of `from`.
    fn share(&mut self, from: Lane, to: Lane, length: u32) {
        let end = Position::try_from(length).unwrap_or(Position::MAX);
        self.runtime.seq_cp(from, to, 0, end);
        self.log(|| Op::SeqCp { from, to, begin: 0, end });
    }
}
