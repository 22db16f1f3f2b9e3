//! Lanes of a stage: who holds them, how many cells they have, and how these go.

use std::time::Duration;

use splitmodel_cache::Payload;
use splitmodel_link::frame::{Lane, Position, SessionId};
use splitmodel_sampling::SessionSampler;

use super::Worker;
use super::activations::LaneRows;
use crate::observe::{Observer, Traced};
use crate::runtime::Runtime;
use crate::schedule::Op;

/// What a lane holds.
pub(super) struct LaneState {
    pub(super) session: SessionId,
    /// Cells held: the position the next row must have.
    pub(super) next: Position,
    /// End of the rows that get kept activations; the cells up to there are in the runtime. At most `next` otherwise.
    pub(super) refilled: Position,
    /// Activations of its rows, where they are kept and all are known.
    pub(super) rows: Option<LaneRows>,
    /// First position added by the running frame, to take it back when the computation fails.
    pub(super) added: Option<Position>,
    /// Time in filling it with a kept prefix, where that was tried.
    pub(super) restoring: Option<Duration>,
    /// On the last stage, once a config came.
    pub(super) sampler: Option<SessionSampler>,
    pub(super) traced: Option<Traced>,
    /// Page of a kept prefix that the lane begins with, and how many of its cells.
    pub(super) begins: Option<(u64, u32)>,
}

impl<R: Runtime> Worker<R> {
    pub(super) fn slot(&self, lane: Lane) -> Option<&LaneState> {
        self.lanes.get(usize::from(lane)).and_then(Option::as_ref)
    }

    pub(super) fn holds(&self, lane: Lane, session: SessionId) -> bool {
        self.slot(lane).is_some_and(|l| l.session == session)
    }

    /// Empties a lane.
    pub(super) fn free(&mut self, lane: Lane) {
        let Some(slot) = self.lanes.get_mut(usize::from(lane)) else { return };
        let (gone, idle) = (slot.take(), self.idle[usize::from(lane)].take());
        if gone.is_some() || idle.is_some() {
            tell(&mut self.observer, lane, gone);
            self.remove(lane, -1);
        }
    }

    /// Ends a lane's session. What the lane begins with may stay for the next one.
    pub(super) fn leave(&mut self, lane: Lane) {
        let stays = self.payload == Payload::Copied && self.runtime.has_own_caches();
        let begins = self.slot(lane).and_then(|state| state.begins).filter(|_| stays);
        match begins {
            Some((_, length)) if self.remove(lane, Position::try_from(length).unwrap_or(Position::MAX)) => {
                let gone = self.lanes[usize::from(lane)].take();
                tell(&mut self.observer, lane, gone);
                self.idle[usize::from(lane)] = begins;
            }
            _ => self.free(lane),
        }
    }

    /// Removes cells from `from` on; whole lanes always go.
    pub(super) fn remove(&mut self, lane: Lane, from: Position) -> bool {
        let done = self.runtime.seq_rm(lane, from, -1);
        if done {
            self.log(|| Op::SeqRm { lane, from, to: -1 });
        }
        done
    }

    /// Takes the lane for a session, from whomever holds it.
    pub(super) fn take(&mut self, lane: Lane, session: SessionId) {
        self.free(lane);
        self.occupy(lane, session);
    }

    /// Gives the lane to a session, with what it holds.
    pub(super) fn occupy(&mut self, lane: Lane, session: SessionId) {
        if let Some(slot) = self.lanes.get_mut(usize::from(lane)) {
            *slot = Some(LaneState {
                session,
                next: 0,
                refilled: 0,
                rows: self.refills.is_some().then(LaneRows::default),
                added: None,
                restoring: None,
                sampler: None,
                traced: None,
                begins: None,
            });
        }
    }

    /// Brings a lane back to `position` cells, or to none where the cache cannot remove a part. Windows cannot, though it looks
    /// as if they could: what the removed cells pushed out is gone.
    pub(super) fn trim(&mut self, lane: Lane, position: Position) {
        let Some((next, cells)) = self.slot(lane).map(|l| (l.next, l.cells())) else { return };
        let position = position.clamp(0, next);
        if position >= cells {
            return;
        }
        let kept = if self.payload.can_be_cut() && self.remove(lane, position) {
            position
        } else {
            self.remove(lane, -1);
            0
        };
        if let Some(Some(state)) = self.lanes.get_mut(usize::from(lane)) {
            (state.next, state.refilled) = (kept, 0);
            state.begins = state.begins.filter(|(_, length)| i64::from(*length) <= i64::from(kept));
            let floats = usize::try_from(kept).unwrap_or(0) * self.runtime.width();
            match &mut state.rows {
                Some(rows) => rows.truncate(floats),
                None if kept == 0 => state.rows = self.refills.is_some().then(LaneRows::default),
                None => {}
            }
            if state.sampler.as_mut().is_some_and(|s| s.truncate(kept).is_err()) {
                state.sampler = None; // its rows will say so, and stage 0 sends a config again
            }
        }
    }
}

/// Tells that a lane's session has gone.
pub(super) fn tell(observer: &mut Option<Box<dyn Observer>>, lane: Lane, gone: Option<LaneState>) {
    if let (Some(observer), Some(state)) = (observer, gone)
        && let Some(traced) = state.traced
    {
        observer.stay(traced.stay(state.session, lane, state.restoring));
    }
}
