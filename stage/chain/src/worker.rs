//! The worker of a stage: applies a frame to the stage's slice, row by row and section by section, and makes the frame
//! for the next stage or, on the last stage, the predictions. The same code runs on every stage of every chain.

mod activations;
mod lanes;
mod predict;
mod prefixes;

use std::time::Instant;

use splitmodel_cache::{BlockStore, DiskStore, Payload, Settings};
use splitmodel_link::frame::{
    ErrorClass, Frame, Lane, Position, Predictions, Report, Row, Section, SessionId, StageStats, Target, row_flags,
};
use splitmodel_sampling::{GenerationConfig, GrammarFactory, SessionSampler};
use zerocopy::IntoBytes;

use crate::observe::{Observer, TraceContext, Traced};
use crate::runtime::{Batch, Runtime, RuntimeError};
use crate::schedule::{LoggedLogits, LoggedRow, Op, Sink};
pub use activations::RefillCounts;
use activations::{Given, Refills};
use lanes::{LaneState, tell};
pub use prefixes::PrefixCounts;

/// Where a stage stands in its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index from 0.
    pub stage: u16,
    /// Stages of the chain.
    pub stages: u16,
}

/// What became of a frame.
#[derive(Debug)]
pub enum Outcome {
    /// For the next stage.
    Forward(Frame),
    /// From the last stage, for stage 0.
    Reply(Predictions),
}

/// One stage's worker over its slice.
pub struct Worker<R: Runtime> {
    runtime: R,
    place: Place,
    lanes: Vec<Option<LaneState>>,
    /// What lanes without a session still hold: page and cells of a kept prefix.
    idle: Vec<Option<(u64, u32)>>,
    /// Page and length of each prefix kept. Sequences of residents come after the lanes'.
    residents: Vec<Option<(u64, u32)>>,
    payload: Payload,
    /// States as bytes, where those are kept instead of cells.
    states: Option<BlockStore>,
    /// The same as files.
    disk: Option<DiskStore>,
    /// Activations of prefixes, where they are kept.
    refills: Option<Refills>,
    counts: PrefixCounts,
    grammars: Option<GrammarFactory>,
    sink: Option<Box<dyn Sink>>,
    observer: Option<Box<dyn Observer>>,
    batch: Scratch,
    given: Given,
    spare: Vec<f32>,
}

/// Buffers of one batch, kept between frames.
#[derive(Default)]
struct Scratch {
    /// Index in the frame of each computed row.
    index: Vec<usize>,
    lanes: Vec<Lane>,
    positions: Vec<Position>,
    want: Vec<bool>,
    tokens: Vec<i32>,
    input: Vec<f32>,
}

impl Scratch {
    fn clear(&mut self) {
        self.index.clear();
        self.lanes.clear();
        self.positions.clear();
        self.want.clear();
        self.tokens.clear();
        self.input.clear();
    }
}

impl<R: Runtime> Worker<R> {
    /// A worker with `lanes` lanes, all free. `grammars` is needed on the last stage only; without it a session that asks
    /// for a grammar is refused.
    pub fn new(runtime: R, place: Place, lanes: usize, grammars: Option<GrammarFactory>) -> Self {
        let (lanes, idle) = (std::iter::repeat_with(|| None).take(lanes).collect(), vec![None; lanes]);
        let (batch, given, spare) = (Scratch::default(), Given::default(), Vec::new());
        Self {
            runtime,
            place,
            lanes,
            idle,
            residents: Vec::new(),
            payload: Payload::default(),
            states: None,
            disk: None,
            refills: None,
            counts: PrefixCounts::default(),
            grammars,
            sink: None,
            observer: None,
            batch,
            given,
            spare,
        }
    }

    /// With room for prefixes: residents, for which the runtime has as many sequences after the lanes', or states as bytes, of
    /// at most `max_bytes` together.
    #[must_use]
    pub fn with_cache(mut self, cache: &Settings, max_bytes: u64) -> Self {
        self.residents = vec![None; cache.max_entries.into()];
        self.payload = cache.payload;
        self.states = match cache.payload {
            Payload::Resident => None,
            Payload::Copied => Some(BlockStore::whole(max_bytes)),
            Payload::Exact => Some(BlockStore::new(max_bytes)),
        };
        self
    }

    /// With states as files, too, and those that are there: of each slot the one made last.
    #[must_use]
    pub fn with_disk(mut self, mut disk: DiskStore) -> Self {
        for (slot, page, length) in disk.list() {
            match self.residents.get_mut(usize::from(slot)) {
                Some(place) => {
                    let before = place.replace((page, length));
                    before.iter().for_each(|(page, _)| disk.remove(*page));
                }
                None => disk.remove(page),
            }
        }
        self.disk = Some(disk);
        self
    }

    /// Whether states are kept as files, too.
    #[must_use]
    pub const fn keeps_files(&self) -> bool {
        self.disk.is_some()
    }

    /// Tells `observer` of traced sessions from here on.
    pub fn set_observer(&mut self, observer: Option<Box<dyn Observer>>) {
        self.observer = observer;
    }

    /// Logs every operation from here on.
    pub fn set_sink(&mut self, sink: Option<Box<dyn Sink>>) {
        self.sink = sink;
    }

    /// The slice.
    pub fn runtime(&self) -> &R {
        &self.runtime
    }

    /// Lanes in use.
    #[must_use]
    pub fn lanes_in_use(&self) -> usize {
        self.lanes.iter().flatten().count()
    }

    /// Cells of each lane in use: (lane, session, cells).
    pub fn lanes(&self) -> impl Iterator<Item = (Lane, SessionId, Position)> + '_ {
        self.lanes.iter().zip(0..).filter_map(|(l, i)| l.as_ref().map(|l| (i, l.session, l.cells())))
    }

    /// Frees every lane; when the upstream is gone, nobody else will. Prefixes that do not stand in the runtime's cells stay.
    pub fn reset(&mut self) {
        self.runtime.clear();
        for (lane, slot) in (0..).zip(&mut self.lanes) {
            tell(&mut self.observer, lane, slot.take());
        }
        self.idle.fill(None);
        if self.states.is_none() {
            self.residents.fill(None);
            self.refills.iter_mut().for_each(|r| r.store.clear());
        }
        self.weigh_rows();
        self.log(|| Op::Clear);
    }

    /// Runs one frame. `wait_us` is the time it waited in the engine's queue, for the statistics.
    pub fn step(&mut self, mut frame: Frame, wait_us: u32) -> Outcome {
        let (start, seq) = (Instant::now(), frame.seq);
        let mut reports = Vec::new();
        for section in &mut frame.sections {
            self.apply(section, &mut reports);
        }
        self.batch.clear();
        self.given.clear();
        for i in 0..frame.rows.len() {
            self.admit(&mut frame.rows, i, &mut reports);
        }
        if self.sink.is_some() && self.batch.index.len() + self.given.index.len() != frame.rows.len() {
            let (seq, sessions) = (frame.seq, dropped_sessions(&frame));
            self.log(|| Op::Dropped { seq, sessions });
        }
        self.compute(&mut frame, &mut reports);
        let compute_us = micros(start);
        let stats = StageStats {
            version: 1,
            stage: self.place.stage,
            rows: u32::try_from(self.batch.index.len()).unwrap_or(u32::MAX),
            wait_us,
            compute_us,
            encode_us: 0,
            lanes: u32::try_from(self.lanes_in_use()).unwrap_or(u32::MAX),
        };
        let outcome = if self.runtime.is_last() {
            let records = self.predict(&frame, &mut reports);
            let keep = |s: &Section| {
                matches!(
                    s,
                    Section::Probe(_)
                        | Section::Stats(_)
                        | Section::Report(_)
                        | Section::Trace { .. }
                        | Section::Restored { .. }
                )
            };
            frame.sections.retain(keep);
            self.spare = std::mem::take(&mut frame.activations.data);
            Outcome::Reply(Predictions { seq: frame.seq, sections: frame.sections, records })
        } else {
            self.collect(&mut frame);
            self.weigh_rows();
            frame.sections.retain(|s| !matches!(s, Section::Refill { .. }));
            Outcome::Forward(frame)
        };
        let total = micros(start);
        let stats = if self.runtime.is_last() {
            StageStats { compute_us: total, ..stats }
        } else {
            StageStats { encode_us: total.saturating_sub(compute_us), ..stats }
        };
        self.count(seq, &stats);
        self.finish(outcome, stats, reports)
    }

    fn finish(&mut self, mut outcome: Outcome, stats: StageStats, reports: Vec<Report>) -> Outcome {
        let sections = match &mut outcome {
            Outcome::Forward(f) => &mut f.sections,
            Outcome::Reply(p) => &mut p.sections,
        };
        sections.push(Section::Stats(stats));
        sections.extend(reports.into_iter().map(Section::Report));
        outcome
    }

    fn apply(&mut self, section: &mut Section, reports: &mut Vec<Report>) {
        match section {
            Section::Reset => self.reset(),
            Section::Stop(target) => {
                if self.holds(target.lane, target.session) {
                    self.leave(target.lane);
                }
            }
            Section::Trim { target, position } => {
                if self.holds(target.lane, target.session) {
                    self.trim(target.lane, *position);
                }
            }
            Section::Config { target, json } => self.configure(*target, json, reports),
            Section::Trace { session, context } => self.trace(*session, *context),
            Section::Restore { target, candidates } => {
                let length = self.restore(*target, candidates);
                if self.runtime.is_last() {
                    *section = Section::Restored { session: target.session, epoch: target.epoch, length };
                }
            }
            Section::Refill { target, candidates } => self.refill(*target, std::mem::take(candidates)),
            Section::Record { target, resident } => self.record(*target, *resident),
            Section::Evict { page, slot } => {
                if self.residents.get(usize::from(*slot)).is_some_and(|r| r.is_some_and(|(p, _)| p == *page)) {
                    self.evict(*slot);
                }
            }
            Section::Probe(_)
            | Section::Stats(_)
            | Section::Report(_)
            | Section::Restored { .. }
            | Section::Unknown { .. } => {}
        }
    }

    fn trace(&mut self, session: SessionId, context: TraceContext) {
        let lane = self.lanes.iter_mut().flatten().find(|l| l.session == session);
        if let (Some(lane), true) = (lane, self.observer.is_some()) {
            lane.traced.get_or_insert_with(|| Traced::new(context));
        }
    }

    /// Counts the frame for every traced session with rows in it: a run of rows of one lane.
    fn count(&mut self, seq: u64, stats: &StageStats) {
        let Some(observer) = &mut self.observer else { return };
        for run in self.batch.lanes.chunk_by(|a, b| a == b) {
            if let Some(Some(state)) = run.first().and_then(|l| self.lanes.get_mut(usize::from(*l)))
                && let Some(traced) = &mut state.traced
            {
                traced.count(state.session, (seq, run.len()), stats, observer.as_mut());
            }
        }
    }

    fn configure(&mut self, target: Target, json: &[u8], reports: &mut Vec<Report>) {
        if usize::from(target.lane) >= self.lanes.len() {
            return; // its rows are reported
        }
        if !self.holds(target.lane, target.session) {
            self.take(target.lane, target.session);
        }
        if !self.runtime.is_last() {
            return;
        }
        let parsed = serde_json::from_slice::<GenerationConfig>(json).map_err(|e| e.to_string());
        let made = parsed.and_then(|c| SessionSampler::new(c, self.grammars.as_ref()).map_err(|e| e.to_string()));
        if let Some(sink) = &mut self.sink {
            let config = serde_json::from_slice(json).unwrap_or_default();
            sink.record(Op::Config { session: target.session, lane: target.lane, config });
        }
        let sampler = match made {
            Ok(sampler) => Some(sampler),
            Err(e) => {
                let message = format!("the generation config is refused: {e}");
                reports.push(self.report(ErrorClass::InvalidRequest, None, target.session, message));
                None
            }
        };
        if let Some(Some(state)) = self.lanes.get_mut(usize::from(target.lane)) {
            state.sampler = sampler;
        }
    }

    /// Decides whether row `i` can be computed, makes room for it and puts it into the batch, or drops it.
    fn admit(&mut self, rows: &mut [Row], i: usize, reports: &mut Vec<Report>) {
        let row = rows[i];
        if row.has(row_flags::DROPPED) {
            return;
        }
        let problem = self.prepare(&row);
        let Some(Some(state)) = self.lanes.get_mut(usize::from(row.lane)).filter(|_| problem.is_none()) else {
            rows[i].flags |= row_flags::DROPPED;
            let message = problem.unwrap_or_else(|| format!("lane {} does not exist", row.lane));
            reports.push(self.report(ErrorClass::Backend, u32::try_from(i).ok(), row.session, message));
            return;
        };
        state.next = row.position + 1;
        if row.position >= state.refilled {
            state.added.get_or_insert(row.position);
        }
        if self.give(i, &row) {
            return;
        }
        self.batch.index.push(i);
        self.batch.lanes.push(row.lane);
        self.batch.positions.push(row.position);
        self.batch.want.push(row.has(row_flags::WANT));
        self.batch.tokens.push(row.token);
    }

    /// Aligns the lane with an authoritative position; says why that is impossible.
    fn prepare(&mut self, row: &Row) -> Option<String> {
        if usize::from(row.lane) >= self.lanes.len() {
            return Some(format!("lane {} does not exist, the stage has {}", row.lane, self.lanes.len()));
        }
        if !self.holds(row.lane, row.session) {
            if row.position != 0 {
                return Some(format!("the lane was lost: position {} of a session it does not hold", row.position));
            }
            self.take(row.lane, row.session);
        }
        let (next, added) = self.slot(row.lane).map(|l| (l.next, l.added.is_some()))?;
        if row.position < next {
            if added {
                return Some(format!("position {} comes after {} in one frame", row.position, next - 1));
            }
            self.trim(row.lane, row.position);
        }
        self.check_refill(row);
        let next = self.slot(row.lane).map_or(0, |l| l.next);
        (row.position != next).then(|| format!("position {} on top of {next} cells: a gap", row.position))
    }

    fn compute(&mut self, frame: &mut Frame, reports: &mut Vec<Report>) {
        if self.batch.index.is_empty() {
            return;
        }
        let result = self.gather(frame).and_then(|()| {
            let all = self.place.stage != 0 && self.batch.index.len() == frame.rows.len();
            self.runtime.decode(Batch {
                lanes: &self.batch.lanes,
                positions: &self.batch.positions,
                want: &self.batch.want,
                input: if all { &frame.activations.data } else { &self.batch.input },
            })
        });
        match result {
            Ok(()) => {
                self.note_rows();
                if self.sink.is_some() && !self.runtime.is_last() {
                    let op = self.decode_op(frame, Vec::new());
                    self.log(|| op);
                }
            }
            Err(error) => self.undo(frame, &error, reports),
        }
        for lane in &self.batch.lanes {
            if let Some(Some(state)) = self.lanes.get_mut(usize::from(*lane)) {
                state.added = None;
            }
        }
    }

    /// Brings together the input rows of the batch: embeddings on stage 0, else the frame's activations.
    fn gather(&mut self, frame: &Frame) -> Result<(), RuntimeError> {
        if self.place.stage == 0 {
            return self.runtime.embed(&self.batch.tokens, &mut self.batch.input);
        }
        let width = self.runtime.width();
        let want = frame.rows.len() * width;
        if frame.activations.data.len() != want {
            let got = frame.activations.data.len();
            return Err(RuntimeError::Shape { what: "activations of the frame", want, got });
        }
        if self.batch.index.len() != frame.rows.len() {
            for &i in &self.batch.index {
                self.batch.input.extend_from_slice(&frame.activations.data[i * width..(i + 1) * width]);
            }
        }
        Ok(())
    }

    /// A failed computation: what was added goes, the rows are dropped, the other lanes stay as they are.
    fn undo(&mut self, frame: &mut Frame, error: &RuntimeError, reports: &mut Vec<Report>) {
        for at in 0..self.batch.index.len() {
            let (i, lane) = (self.batch.index[at], self.batch.lanes[at]);
            frame.rows[i].flags |= row_flags::DROPPED;
            let Some(from) = self.slot(lane).and_then(|l| l.added) else { continue };
            // `next` counts rows that are not there; the cells in doubt go either way.
            self.trim(lane, from);
            if let Some(Some(state)) = self.lanes.get_mut(usize::from(lane)) {
                state.added = None;
            }
            let session = frame.rows[i].session;
            reports.push(self.report(error.class(), u32::try_from(i).ok(), session, error.to_string()));
        }
        let (seq, sessions) = (frame.seq, dropped_sessions(frame));
        self.log(|| Op::Dropped { seq, sessions });
        self.batch.clear();
    }

    fn decode_op(&self, frame: &Frame, logits: Vec<LoggedLogits>) -> Op {
        let row = |&i: &usize| {
            let r = &frame.rows[i];
            LoggedRow(r.session, r.epoch, r.lane, r.position, r.token, r.has(row_flags::WANT))
        };
        Op::Decode { seq: frame.seq, rows: self.batch.index.iter().map(row).collect(), logits }
    }

    fn log(&mut self, op: impl FnOnce() -> Op) {
        if let Some(sink) = &mut self.sink {
            sink.record(op());
        }
    }

    fn report(&self, class: ErrorClass, record: Option<u32>, session: SessionId, message: String) -> Report {
        Report { stage: self.place.stage, class, record, session, message }
    }
}

/// Digest of logits as schedules record it: hex BLAKE3 of the little-endian bytes.
#[must_use]
pub fn digest(logits: &[f32]) -> String {
    blake3::hash(logits.as_bytes()).to_hex().to_string()
}

fn dropped_sessions(frame: &Frame) -> Vec<SessionId> {
    let mut sessions: Vec<_> = frame.rows.iter().filter(|r| r.has(row_flags::DROPPED)).map(|r| r.session).collect();
    sessions.sort_unstable();
    sessions.dedup();
    sessions
}

fn micros(since: Instant) -> u32 {
    u32::try_from(since.elapsed().as_micros()).unwrap_or(u32::MAX)
}
