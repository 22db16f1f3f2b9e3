//! Where the time to the first token went: one partition of it, seen from stage 0, whose parts add up to the whole.
//!
//! Stage 0 emits a prompt as frames. Its own clock and the timings that its engine and its link put down for each frame
//! divide the time without gaps; what is left after the last frame was written is the wait for the stages downstream, which
//! their own statistics divide further.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use splitmodel_link::connection::Written;
use splitmodel_link::frame::{Frame, SessionId, StageStats};

/// Parts of the time to the first token. They sum to [`Breakdown::total`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Breakdown {
    /// Reading the body, template, tokenizing.
    pub prepare: Duration,
    /// Waiting for a lane.
    pub queue: Duration,
    /// Frames of the prompt in the queue of stage 0's engine.
    pub wait: Duration,
    /// Stage 0's computation.
    pub compute: Duration,
    /// Bringing stage 0's activations out.
    pub encode: Duration,
    /// From stage 0's engine to the socket: link queue, credit, encoding, write. Of the last frame; the others' overlap.
    pub write: Duration,
    /// Waiting for the stages downstream: for a place in the chain between frames, and for the answer to the last one.
    pub downstream: Duration,
    /// What the later stages say of the last frame, part of `downstream`.
    pub later_stages: Vec<StageStats>,
    /// Frames of the prompt.
    pub frames: usize,
    /// Bytes of the prompt's frames on the first link.
    pub bytes: u64,
}

impl Breakdown {
    /// From the request's arrival to its first token.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.parts().iter().map(|(_, d)| *d).sum()
    }

    /// Names and lengths of the parts, in order.
    #[must_use]
    pub fn parts(&self) -> [(&'static str, Duration); 7] {
        [
            ("prepare", self.prepare),
            ("queue", self.queue),
            ("wait", self.wait),
            ("compute", self.compute),
            ("encode", self.encode),
            ("write", self.write),
            ("downstream", self.downstream),
        ]
    }
}

/// A frame of a prompt.
#[derive(Clone, Copy, Debug)]
struct Part {
    seq: u64,
    emitted: Instant,
    stage0: StageStats,
    /// From the engine to the end of the write.
    write: Duration,
    bytes: u64,
}

#[derive(Debug)]
struct Session {
    received: Instant,
    submitted: Instant,
    started: Option<Instant>,
    frames: Vec<Part>,
    later: Vec<StageStats>,
}

/// Sessions whose first token is not there yet.
#[derive(Debug, Default)]
pub struct Timelines {
    sessions: HashMap<SessionId, Session>,
    /// Frames under way that carry rows of such sessions, oldest first.
    in_flight: VecDeque<(u64, Vec<SessionId>)>,
}

impl Timelines {
    /// A session waits for a lane. `received` is when its request began to arrive.
    pub fn submitted(&mut self, id: SessionId, received: Instant, submitted: Instant) {
        let session = Session { received, submitted, started: None, frames: Vec::new(), later: Vec::new() };
        self.sessions.insert(id, session);
    }

    /// It got its lane.
    pub fn started(&mut self, id: SessionId, now: Instant) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.started.get_or_insert(now);
        }
    }

    /// A frame goes to stage 0's engine.
    pub fn emitted(&mut self, frame: &Frame, now: Instant) {
        if self.sessions.is_empty() {
            return;
        }
        let mut ids = Vec::new();
        for rows in frame.rows.chunk_by(|a, b| a.session == b.session) {
            let id = rows[0].session;
            if let Some(session) = self.sessions.get_mut(&id) {
                let stage0 = StageStats::default();
                session.frames.push(Part { seq: frame.seq, emitted: now, stage0, write: Duration::ZERO, bytes: 0 });
                ids.push(id);
            }
        }
        if !ids.is_empty() {
            self.in_flight.push_back((frame.seq, ids));
        }
    }

    /// A frame was answered, with the stages' timings.
    pub fn answered(&mut self, seq: u64, stats: impl Iterator<Item = StageStats> + Clone, written: Option<Written>) {
        if self.in_flight.front().is_none_or(|(s, _)| *s != seq) {
            return;
        }
        let Some((_, ids)) = self.in_flight.pop_front() else { return };
        for id in ids {
            let Some(session) = self.sessions.get_mut(&id) else { continue };
            if let Some(part) = session.frames.iter_mut().rev().find(|p| p.seq == seq) {
                if let Some(w) = written {
                    part.write = Duration::from_micros(u64::from(w.waited_us) + u64::from(w.wrote_us));
                    part.bytes = w.bytes;
                }
                part.stage0 = stats.clone().find(|s| s.stage == 0).unwrap_or_default();
            }
            session.later.clear();
            session.later.extend(stats.clone().filter(|s| s.stage != 0));
        }
    }

    /// The chain broke: what was under way will not be answered; the time until it is sent again counts as downstream.
    pub fn lost(&mut self) {
        self.in_flight.clear();
        for session in self.sessions.values_mut() {
            session.frames.clear();
        }
    }

    /// Whether the session's first token is not there yet.
    #[must_use]
    pub fn holds(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// The session ended before its first token.
    pub fn forget(&mut self, id: SessionId) {
        self.sessions.remove(&id);
    }

    /// The first token is there: its breakdown, once.
    pub fn first_token(&mut self, id: SessionId, now: Instant) -> Option<Breakdown> {
        let session = self.sessions.remove(&id)?;
        let started = session.started.unwrap_or(session.submitted);
        let mut b = Breakdown {
            prepare: session.submitted.saturating_duration_since(session.received),
            queue: started.saturating_duration_since(session.submitted),
            frames: session.frames.len(),
            bytes: session.frames.iter().map(|f| f.bytes).sum(),
            later_stages: session.later,
            ..Breakdown::default()
        };
        let mut clock = Clock { at: started, end: now };
        for frame in &session.frames {
            let us = |n: u32| Duration::from_micros(n.into());
            let begun = frame.emitted + us(frame.stage0.wait_us);
            b.downstream += clock.to(frame.emitted);
            b.wait += clock.to(begun);
            b.compute += clock.to(begun + us(frame.stage0.compute_us));
            b.encode += clock.to(begun + us(frame.stage0.compute_us) + us(frame.stage0.encode_us));
        }
        if let Some(last) = session.frames.last() {
            b.write = clock.to(clock.at + last.write);
        }
        b.downstream += clock.to(now);
        Some(b)
    }
}

/// Walks through the time once, so that nothing counts twice.
struct Clock {
    at: Instant,
    end: Instant,
}

impl Clock {
    /// Time from where the clock stands to `next`, zero if it is past.
    fn to(&mut self, next: Instant) -> Duration {
        let next = next.clamp(self.at, self.end.max(self.at));
        next - std::mem::replace(&mut self.at, next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use splitmodel_link::frame::Row;

    const MS: Duration = Duration::from_millis(1);

    fn frame(seq: u64, session: SessionId) -> Frame {
        Frame { seq, rows: vec![Row { session, ..Row::default() }; 3], ..Frame::default() }
    }

    fn stats(stage: u16, wait: u32, compute: u32, encode: u32) -> StageStats {
        StageStats {
            version: 1,
            stage,
            wait_us: wait * 1000,
            compute_us: compute * 1000,
            encode_us: encode * 1000,
            ..StageStats::default()
        }
    }

    /// Waited and wrote for `ms` each.
    fn written(ms: u32, bytes: u64) -> Written {
        Written { seq: 0, waited_us: ms * 1000, credit_us: 0, wrote_us: ms * 1000, bytes }
    }

    #[test]
    fn a_pipelined_prompt_is_divided_without_gap_or_overlap() {
        let t = Instant::now();
        let mut lines = Timelines::default();
        lines.submitted(7, t, t + 2 * MS);
        lines.started(7, t + 5 * MS);
        // Two frames at once: the second waits until the first is computed.
        lines.emitted(&frame(1, 7), t + 5 * MS);
        lines.emitted(&frame(2, 7), t + 5 * MS);
        let written = Some(written(1, 100));
        lines.answered(1, [stats(0, 1, 10, 1), stats(1, 0, 9, 0)].into_iter(), written);
        // The third had to wait for a place in the chain.
        lines.emitted(&frame(3, 7), t + 40 * MS);
        lines.answered(2, [stats(0, 12, 10, 1), stats(1, 0, 9, 0)].into_iter(), written);
        lines.answered(3, [stats(0, 0, 10, 1), stats(1, 4, 9, 0)].into_iter(), written);
        let b = lines.first_token(7, t + 70 * MS).unwrap();
        assert_eq!(b.total(), 70 * MS);
        assert_eq!((b.prepare, b.queue), (2 * MS, 3 * MS));
        assert_eq!((b.wait, b.compute, b.encode, b.write), (MS, 30 * MS, 3 * MS, 2 * MS));
        // 28 to 40 between the second and the third frame, 53 to 70 after the third.
        assert_eq!(b.downstream, 29 * MS);
        assert_eq!(b.later_stages, vec![stats(1, 4, 9, 0)]);
        assert_eq!((b.frames, b.bytes), (3, 300));
        assert!(lines.first_token(7, t).is_none(), "once");
    }

    #[test]
    fn a_broken_chain_counts_as_waiting_downstream() {
        let t = Instant::now();
        let mut lines = Timelines::default();
        lines.submitted(1, t, t);
        lines.started(1, t);
        lines.emitted(&frame(9, 1), t);
        lines.lost();
        lines.emitted(&frame(1, 1), t + 500 * MS);
        lines.answered(1, [stats(0, 0, 20, 0)].into_iter(), None);
        let b = lines.first_token(1, t + 550 * MS).unwrap();
        assert_eq!((b.downstream, b.compute, b.total()), (530 * MS, 20 * MS, 550 * MS));
    }

    proptest! {
        #[test]
        fn the_parts_always_sum_to_the_whole(
            frames in prop::collection::vec((0_u32..50, 0_u32..90, 0_u32..90, 0_u32..9, 0_u32..20), 0..12),
            (prepare, queue, end) in (0_u32..40, 0_u32..40, 0_u32..2000),
        ) {
            let t = Instant::now();
            let mut lines = Timelines::default();
            let submitted = t + prepare * MS;
            let started = submitted + queue * MS;
            lines.submitted(1, t, submitted);
            lines.started(1, started);
            let mut at = started;
            for (seq, (gap, wait, compute, encode, write)) in (1..).zip(frames) {
                at += gap * MS;
                lines.emitted(&frame(seq, 1), at);
                lines.answered(seq, [stats(0, wait, compute, encode)].into_iter(), Some(written(write, 1)));
            }
            let first = at.max(started) + end * MS;
            prop_assert_eq!(lines.first_token(1, first).unwrap().total(), first - t);
        }
    }
}
