//! Prefixes that a stage keeps: sequences beside the lanes that share cells with them, or states as bytes.

use std::time::{Duration, Instant};

use splitmodel_cache::{BlockStore, DiskCounts, Payload, StoreCounts};
use splitmodel_link::frame::{Candidate, Lane, Position, Target};

use super::Worker;
use super::activations::{RefillCounts, Refills};
use crate::runtime::Runtime;
use crate::schedule::Op;

/// What a stage kept and gave back since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCounts {
    /// Restores of which it had a candidate.
    pub hits: u64,
    /// Restores of which it had none.
    pub misses: u64,
    /// States that could not be taken, kept or set.
    pub errors: u64,
    /// Restores of cells that the lane still held: nothing was copied.
    pub in_place: u64,
    /// Cells restored.
    pub tokens: u64,
    /// Time in restoring.
    pub restoring: Duration,
    /// Time in recording.
    pub recording: Duration,
    /// Prefixes kept now.
    pub kept: usize,
    /// Bytes of exact states kept now.
    pub bytes: u64,
    /// The store of exact states.
    pub store: StoreCounts,
    /// Bytes of states on disk.
    pub disk_bytes: u64,
    /// The store on disk.
    pub disk: DiskCounts,
    /// Activations, where they are kept.
    pub refills: Option<RefillCounts>,
}

impl<R: Runtime> Worker<R> {
    /// Counts since the start.
    #[must_use]
    pub fn prefix_counts(&self) -> PrefixCounts {
        let (bytes, store) = self.states.as_ref().map(|s| (s.bytes(), s.counts())).unwrap_or_default();
        let kept = self.states.as_ref().map_or_else(|| self.residents.iter().flatten().count(), BlockStore::len);
        let (disk_bytes, disk) = self.disk.as_ref().map(|d| (d.bytes(), d.counts())).unwrap_or_default();
        let refills = self.refills.as_ref().map(Refills::counts);
        PrefixCounts { kept, bytes, store, disk_bytes, disk, refills, ..self.counts }
    }

    /// Cells of all residents, as if none were shared, and of what idle lanes still hold.
    #[must_use]
    pub fn resident_cells(&self) -> usize {
        let cells = |held: &[Option<(u64, u32)>]| held.iter().flatten().map(|(_, n)| *n as usize).sum::<usize>();
        cells(&self.idle) + if self.states.is_some() { 0 } else { cells(&self.residents) }
    }

    /// Sequence of a resident.
    fn sequence(&self, slot: u16) -> Lane {
        Lane::try_from(self.lanes.len() + usize::from(slot)).unwrap_or(Lane::MAX)
    }

    /// Whether the stage can restore a candidate.
    pub(super) fn has(&self, c: &Candidate) -> bool {
        let Some((page, length)) = self.residents.get(usize::from(c.slot)).copied().flatten() else { return false };
        let fits = if self.payload.can_be_cut() { c.length <= length } else { c.length == length };
        let on_disk = || self.disk.as_ref().is_some_and(|d| d.holds(page));
        page == c.page && fits && self.states.as_ref().is_none_or(|s| s.holds(page) || on_disk())
    }

    /// Gives the lane to the session, with the longest candidate that is here; keeps the candidates that are.
    pub(super) fn restore(&mut self, target: Target, candidates: &mut Vec<Candidate>) -> u32 {
        let begun = Instant::now();
        candidates.retain(|c| self.has(c));
        if usize::from(target.lane) >= self.lanes.len() {
            candidates.clear(); // its rows are reported
            return 0;
        }
        let here = self.resume(target.lane, candidates);
        if here.is_none() {
            self.free(target.lane);
        }
        self.occupy(target.lane, target.session);
        let found = here.or_else(|| self.load_longest(target.lane, candidates));
        let (restored, rows) = (found.map_or(0, |c| c.length), self.rows_of(found.as_ref()));
        if let Some(Some(state)) = self.lanes.get_mut(usize::from(target.lane)) {
            state.next = Position::try_from(restored).unwrap_or(Position::MAX);
            state.begins = found.map(|c| (c.page, c.length));
            (state.rows, state.restoring) = (rows, Some(begun.elapsed()));
        }
        let count = if restored > 0 { &mut self.counts.hits } else { &mut self.counts.misses };
        *count += 1;
        self.counts.tokens += u64::from(restored);
        self.counts.restoring += begun.elapsed();
        restored
    }

    /// The longest candidate, where an idle lane still begins with it: what comes after is removed.
    fn resume(&mut self, lane: Lane, candidates: &[Candidate]) -> Option<Candidate> {
        let (page, length) = self.idle.get(usize::from(lane)).copied().flatten()?;
        let most = candidates.iter().map(|c| c.length).max()?;
        let here = *candidates.iter().find(|c| c.length == most && c.page == page && most <= length)?;
        if !self.remove(lane, Position::try_from(most).unwrap_or(Position::MAX)) {
            return None;
        }
        self.idle[usize::from(lane)] = None;
        self.counts.in_place += 1;
        Some(here)
    }

    /// Fills an empty lane with the longest candidate that can be; those that cannot are no candidates any more.
    fn load_longest(&mut self, lane: Lane, candidates: &mut Vec<Candidate>) -> Option<Candidate> {
        while let Some(best) = candidates.iter().max_by_key(|c| c.length).copied() {
            if self.load(&best, lane) {
                return Some(best);
            }
            candidates.retain(|c| c.page != best.page);
        }
        None
    }

    /// Fills an empty lane with what is kept. `false`: it could not be, and is forgotten.
    pub(super) fn load(&mut self, from: &Candidate, lane: Lane) -> bool {
        let Some(states) = &mut self.states else {
            self.share(self.sequence(from.slot), lane, from.length);
            return true;
        };
        let set = if let Some(state) = states.get(from.page) {
            self.runtime.set_state(lane, &state)
        } else {
            let mut state = Vec::new();
            if !self.disk.as_mut().is_some_and(|d| d.get(from.page, &mut state)) {
                self.counts.errors += 1;
                self.evict(from.slot);
                return false;
            }
            let set = self.runtime.set_state(lane, &state);
            // The next time it is in memory; where it does not fit, it stays where it is.
            let _ = states.insert(from.page, state);
            set
        };
        if let Err(error) = set {
            tracing::warn!(page = from.page, length = from.length, %error, "a kept state is given up");
            self.counts.errors += 1;
            self.evict(from.slot);
            self.remove(lane, -1);
            return false;
        }
        let page = from.page;
        self.log(|| Op::LoadState { page, lane });
        // A copy has whatever the lane held when it was taken.
        if self.payload.can_be_cut() {
            self.remove(lane, Position::try_from(from.length).unwrap_or(Position::MAX));
        }
        true
    }

    /// Keeps the session's first cells, or its state where caches cannot be cut and it has exactly as many; else nothing stands
    /// in the slot afterwards.
    pub(super) fn record(&mut self, target: Target, resident: Candidate) {
        if usize::from(resident.slot) >= self.residents.len() {
            return; // a restore will find nothing
        }
        let begun = Instant::now();
        self.evict(resident.slot);
        let cells = self.slot(target.lane).filter(|l| l.session == target.session).map_or(0, |l| i64::from(l.cells()));
        let length = i64::from(resident.length);
        let kept = match self.payload {
            Payload::Resident if cells >= length => {
                self.share(target.lane, self.sequence(resident.slot), resident.length);
                true
            }
            Payload::Copied => cells >= length && self.save(target.lane, &resident),
            Payload::Exact => cells == length && self.save(target.lane, &resident),
            Payload::Resident => false,
        };
        if kept {
            let page = (resident.page, resident.length);
            self.residents[usize::from(resident.slot)] = Some(page);
            if let Some(Some(state)) = self.lanes.get_mut(usize::from(target.lane)) {
                state.begins = Some(page);
            }
            self.record_rows(target.lane, &resident);
        } else if let Some(refills) = &mut self.refills {
            refills.store.skip();
        }
        self.counts.recording += begun.elapsed();
    }

    /// Keeps the state of a lane. `false`: that failed, which costs later requests time and this one nothing.
    fn save(&mut self, lane: Lane, &Candidate { page, length, slot }: &Candidate) -> bool {
        let Some(states) = &mut self.states else { return false };
        let mut state = states.buffer();
        let taken = self.runtime.state(lane, &mut state).map_err(|e| e.to_string());
        let copy = self.disk.as_ref().map(|_| state.clone());
        match taken.and_then(|()| states.insert(page, state).map_err(|e| e.to_string())) {
            Ok(()) => {
                self.disk.iter_mut().zip(copy).for_each(|(disk, copy)| disk.insert((slot, page, length), copy));
                self.log(|| Op::SaveState { lane, page });
                true
            }
            Err(error) => {
                tracing::warn!(page, error, "a state is not kept");
                self.counts.errors += 1;
                false
            }
        }
    }

    pub(super) fn evict(&mut self, slot: u16) {
        let Some((page, _)) = self.residents.get_mut(usize::from(slot)).and_then(Option::take) else { return };
        self.refills.iter_mut().for_each(|r| _ = r.store.remove(page));
        if let Some(states) = &mut self.states {
            states.remove(page);
            self.disk.iter_mut().for_each(|d| d.remove(page));
            self.log(|| Op::DropState { page });
        } else {
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
