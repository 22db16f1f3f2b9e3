//! Activations at the end of stage 0: kept with prefixes, and given instead of computed where another stage has lost a prefix that
//! this one still has.

use std::sync::Arc;
use std::time::Instant;

use splitmodel_cache::{ActivationCounts, ActivationStore};
use splitmodel_link::frame::{Activations, Candidate, Frame, Lane, Position, Row, Target};

use super::Worker;
use super::lanes::LaneState;
use crate::runtime::Runtime;

/// What stage 0 kept of activations and gave back since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RefillCounts {
    /// Bytes of activations: those kept, and those of sessions under way.
    pub bytes: u64,
    /// The store.
    pub store: ActivationCounts,
    /// Sessions whose lost prefix stage 0 still had, with its activations.
    pub served: u64,
    /// Those of which it had not both; they were computed.
    pub missed: u64,
    /// Rows that were not computed.
    pub tokens: u64,
}

/// The store and what came of it.
pub(super) struct Refills {
    pub(super) store: ActivationStore,
    served: u64,
    missed: u64,
    tokens: u64,
}

impl Refills {
    pub(super) fn new(max_bytes: u64) -> Self {
        Self { store: ActivationStore::new(max_bytes), served: 0, missed: 0, tokens: 0 }
    }

    pub(super) fn counts(&self) -> RefillCounts {
        let &Self { served, missed, tokens, ref store } = self;
        RefillCounts { bytes: store.bytes(), store: store.counts(), served, missed, tokens }
    }
}

/// Activations of a lane's rows, from position 0 on: floats, row-major.
#[derive(Debug, Default)]
pub(super) struct LaneRows {
    /// The first ones, which are kept, or were.
    shared: Arc<[f32]>,
    /// So many floats of `shared`.
    taken: usize,
    /// Those behind them.
    own: Vec<f32>,
}

impl LaneRows {
    fn begin(shared: Arc<[f32]>, taken: usize) -> Self {
        Self { taken: taken.min(shared.len()), shared, own: Vec::new() }
    }

    fn floats(&self) -> usize {
        self.taken + self.own.len()
    }

    /// Its share of the bytes: of those that the store keeps, too, a part is counted twice.
    fn bytes(&self) -> u64 {
        // Where the store has given them up, those who still hold them pay for them together.
        let shared = size_of_val::<[f32]>(&self.shared) / Arc::strong_count(&self.shared);
        (shared + self.own.capacity() * size_of::<f32>()) as u64
    }

    pub(super) fn truncate(&mut self, floats: usize) {
        self.own.truncate(floats.saturating_sub(self.taken));
        self.taken = self.taken.min(floats);
    }

    fn push(&mut self, row: &[f32]) {
        let (have, need) = (self.own.capacity(), self.own.len() + row.len());
        if need > have {
            // By an eighth, not to twice as much as is used.
            self.own.reserve_exact(row.len() + have / 8);
        }
        self.own.extend_from_slice(row);
    }

    /// The first `floats` of them to be shared, if they are known.
    fn share(&mut self, floats: usize) -> Option<Arc<[f32]>> {
        if floats > self.floats() {
            return None;
        }
        let Some(more) = floats.checked_sub(self.taken) else { return Some(self.shared[..floats].into()) };
        if more > 0 || floats != self.shared.len() {
            let all = self.shared[..self.taken].iter().chain(&self.own[..more]).copied();
            (self.shared, self.taken) = (all.collect(), floats);
            self.own = self.own[more..].to_vec();
        }
        Some(self.shared.clone())
    }
}

/// Rows of a frame that are not computed, and their activations.
#[derive(Default)]
pub(super) struct Given {
    /// Index in the frame of each.
    pub(super) index: Vec<usize>,
    pub(super) rows: Vec<f32>,
}

impl Given {
    pub(super) fn clear(&mut self) {
        self.index.clear();
        self.rows.clear();
    }
}

impl LaneState {
    /// Cells in the runtime: while a refill lasts, more than rows have come.
    pub(super) fn cells(&self) -> Position {
        self.next.max(self.refilled)
    }

    /// Activations that a row at `position` gets from what is kept.
    fn given(&self, position: Position, width: usize) -> Option<&[f32]> {
        let rows = self.rows.as_ref().filter(|_| position < self.refilled)?;
        let at = usize::try_from(position).ok()?.saturating_mul(width);
        rows.shared.get(at..at.saturating_add(width))
    }
}

impl<R: Runtime> Worker<R> {
    /// With room for activations of prefixes, at most `max_bytes`. On stage 0 of several only: elsewhere nothing is done.
    #[must_use]
    pub fn with_activations(mut self, max_bytes: u64) -> Self {
        if self.place.stage == 0 && self.place.stages > 1 && max_bytes > 0 {
            self.refills = Some(Refills::new(max_bytes));
        }
        self
    }

    /// Begins a session again at position 0, with the cells of the longest candidate whose activations are kept, too: its rows
    /// get these as far as they go. Without any the lane is empty, and the rows are computed.
    pub(super) fn refill(&mut self, target: Target, mut candidates: Vec<Candidate>) {
        if usize::from(target.lane) >= self.lanes.len() {
            return; // its rows are reported
        }
        let begun = Instant::now();
        self.take(target.lane, target.session);
        let width = self.runtime.width();
        candidates.retain(|c| self.has(c));
        candidates.sort_by_key(|c| std::cmp::Reverse(c.length));
        for candidate in candidates {
            let floats = candidate.length as usize * width;
            let Some(rows) = self.refills.as_mut().and_then(|r| r.store.get(candidate.page, floats)) else { continue };
            if !self.load(&candidate, target.lane) {
                continue;
            }
            if let Some(Some(state)) = self.lanes.get_mut(usize::from(target.lane)) {
                state.refilled = Position::try_from(candidate.length).unwrap_or(Position::MAX);
                state.rows = Some(LaneRows::begin(rows, floats));
                state.restoring = Some(begun.elapsed());
            }
            self.refills.iter_mut().for_each(|r| r.served += 1);
            return;
        }
        self.refills.iter_mut().for_each(|r| r.missed += 1);
    }

    /// Ends a refill that cannot go on with `row`: its activations were given up meanwhile.
    pub(super) fn check_refill(&mut self, row: &Row) {
        let width = self.runtime.width();
        if self.slot(row.lane).is_some_and(|l| row.position < l.refilled && l.given(row.position, width).is_none()) {
            self.trim(row.lane, row.position);
        }
    }

    /// Gives row `i` of a frame its activations from what is kept. `false`: it is to be computed.
    pub(super) fn give(&mut self, i: usize, row: &Row) -> bool {
        let width = self.runtime.width();
        let state = self.lanes.get(usize::from(row.lane)).and_then(Option::as_ref);
        let Some(known) = state.and_then(|s| s.given(row.position, width)) else { return false };
        self.given.index.push(i);
        self.given.rows.extend_from_slice(known);
        self.refills.iter_mut().for_each(|r| r.tokens += 1);
        true
    }

    /// What a lane that begins with a restored prefix knows of its rows.
    pub(super) fn rows_of(&mut self, restored: Option<&Candidate>) -> Option<LaneRows> {
        let width = self.runtime.width();
        let refills = self.refills.as_mut()?;
        let Some(candidate) = restored else { return Some(LaneRows::default()) };
        let floats = candidate.length as usize * width;
        refills.store.get(candidate.page, floats).map(|rows| LaneRows::begin(rows, floats))
    }

    /// Notes the activations of the rows that were just computed. A lane with a gap before them knows nothing any more.
    pub(super) fn note_rows(&mut self) {
        if self.refills.is_none() {
            return;
        }
        let width = self.runtime.width();
        let mut computed = self.runtime.activations().chunks_exact(width.max(1));
        for (lane, position) in self.batch.lanes.iter().zip(&self.batch.positions) {
            let computed = computed.next();
            let Some(Some(state)) = self.lanes.get_mut(usize::from(*lane)) else { continue };
            let Some(rows) = &mut state.rows else { continue };
            let before = usize::try_from(*position).unwrap_or(usize::MAX).saturating_mul(width);
            match computed {
                Some(row) if rows.floats() == before => rows.push(row),
                _ => state.rows = None,
            }
        }
    }

    /// Puts the activations of the computed and the given rows into the frame; dropped rows get zeros.
    pub(super) fn collect(&mut self, frame: &mut Frame) {
        let width = self.runtime.width();
        let mut data = if frame.activations.data.capacity() == 0 {
            std::mem::take(&mut self.spare)
        } else {
            std::mem::take(&mut frame.activations.data)
        };
        data.clear();
        if !self.batch.index.is_empty() && self.batch.index.len() == frame.rows.len() {
            data.extend_from_slice(self.runtime.activations());
        } else {
            data.resize(frame.rows.len() * width, 0.0);
            // After a frame without any the runtime still shows those of an earlier one.
            let computed = (self.batch.index.as_slice(), self.runtime.activations());
            for (index, rows) in [computed, (&self.given.index, &self.given.rows)] {
                for (&i, row) in index.iter().zip(rows.chunks_exact(width.max(1))) {
                    data[i * width..(i + 1) * width].copy_from_slice(row);
                }
            }
        }
        frame.activations = Activations { width: u32::try_from(width).unwrap_or(u32::MAX), data };
    }

    /// Keeps the activations of a prefix that was recorded, where they are known.
    pub(super) fn record_rows(&mut self, lane: Lane, &Candidate { page, length, .. }: &Candidate) {
        if self.refills.is_none() {
            return;
        }
        let floats = length as usize * self.runtime.width();
        let state = self.lanes.get_mut(usize::from(lane)).and_then(Option::as_mut);
        let known = state.and_then(|s| s.rows.as_mut()).and_then(|rows| rows.share(floats));
        self.weigh_rows(); // what is shared is counted where it is kept
        let Some(refills) = &mut self.refills else { return };
        match known {
            Some(rows) => {
                refills.store.insert(page, rows);
            }
            None => refills.store.skip(),
        }
    }

    /// Counts what the lanes hold to the store's limit. Where they exceed it by themselves, the lane with most forgets its rows.
    pub(super) fn weigh_rows(&mut self) {
        let Some(refills) = &mut self.refills else { return };
        let bytes = |state: &LaneState| state.rows.as_ref().map_or(0, LaneRows::bytes);
        while !refills.store.hold(self.lanes.iter().flatten().map(bytes).sum()) {
            let Some(most) = self.lanes.iter_mut().flatten().max_by_key(|s| bytes(s)) else { return };
            most.rows = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_behind_a_part_of_a_prefix_are_the_lanes_own() {
        let page: Arc<[f32]> = (0..200u16).map(f32::from).collect();
        let mut rows = LaneRows::begin(page.clone(), 120);
        for _ in 0..80 {
            rows.push(&[-1.0]);
        }
        let shared = rows.share(200).unwrap();
        assert_eq!((&shared[..120], &shared[120..]), (&page[..120], &[-1.0; 80][..]));
        assert_eq!(rows.share(200).unwrap(), shared, "nothing came since");
        assert_eq!(rows.share(150).unwrap()[..], shared[..150]);
        assert!(rows.share(201).is_none());
    }
}
