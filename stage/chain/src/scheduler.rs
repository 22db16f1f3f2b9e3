//! The scheduler of stage 0: admits sessions to lanes, makes frames with rows of many sessions, keeps up to N of them
//! in flight in a chain of N stages, and turns predictions into events. Pure: no clock, no I/O.

mod pace;
mod prefixes;
mod session;
mod types;

use std::collections::{BTreeMap, VecDeque};

use splitmodel_cache::{Directory, MAX_REPLAY, Replays, SnapshotError};
use splitmodel_link::frame::{
    Activations, ErrorClass, Frame, Lane, Prediction, Predictions, Report, Row, Section, SessionId, Token,
    prediction_flags,
};

use pace::Pace;
use session::Session;
pub use types::{AdmissionError, Counts, Event, Finish, Limits, OutOfOrder, Request};

/// Most bytes of generation configs in a frame: half of what a message's sections may have, the rest is for reports.
const MAX_CONFIGS: usize = splitmodel_link::codec::MAX_SECTION_BYTES as usize / 2;

struct InFlight {
    seq: u64,
    prefill_rows: usize,
    decode_rows: usize,
}

impl InFlight {
    fn has_rows(&self) -> bool {
        self.prefill_rows + self.decode_rows > 0
    }
}

/// See the module.
pub struct Scheduler {
    limits: Limits,
    sessions: BTreeMap<SessionId, Session>,
    /// Waiting for a lane, in order of arrival.
    queue: VecDeque<(SessionId, Request)>,
    free: Vec<Lane>,
    /// Of each lane: the page that was recorded when its last session ended, which it may still begin with.
    ended: Vec<Option<u64>>,
    /// Sessions whose next token is known and not sent, in turn.
    decodes: VecDeque<SessionId>,
    /// Sessions with rows of a prompt (or, after a loss, of all that is known) to send, in order of arrival.
    prefills: VecDeque<SessionId>,
    pending: Vec<Section>,
    in_flight: VecDeque<InFlight>,
    kept: Directory,
    answers: Replays,
    replays: u64,
    replayed_tokens: u64,
    /// Sessions whose state is to be recorded when the frame under construction has brought them there.
    due: Vec<SessionId>,
    hits: u64,
    misses: u64,
    shortened: u64,
    pace: Pace,
    next_session: SessionId,
    next_seq: u64,
    frames: u64,
    up: bool,
    /// The token probe holds everything back until it is through.
    probe: Option<SessionId>,
}

impl Scheduler {
    /// A scheduler of a chain that is not formed yet.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            sessions: BTreeMap::new(),
            queue: VecDeque::new(),
            free: (0..limits.lanes).collect(),
            ended: vec![None; limits.lanes.into()],
            decodes: VecDeque::new(),
            prefills: VecDeque::new(),
            pending: Vec::new(),
            in_flight: VecDeque::new(),
            kept: Directory::new(limits.cache),
            answers: Replays::new(limits.cache.replays),
            replays: 0,
            replayed_tokens: 0,
            due: Vec::new(),
            hits: 0,
            misses: 0,
            shortened: 0,
            pace: Pace::new(limits.prefill_chunk_shared, limits.max_in_flight),
            next_session: 1,
            next_seq: 1,
            frames: 0,
            up: false,
            probe: None,
        }
    }

    /// Counts of now.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts {
            running: self.sessions.keys().filter(|id| Some(**id) != self.probe).count(),
            queued: self.queue.len(),
            in_flight: self.in_flight.len(),
            cells: self.sessions.values().map(|s| s.sent).sum(),
            frames: self.frames,
            payload: self.kept.payload(),
            kept: self.kept.len(),
            kept_tokens: self.kept.tokens(),
            kept_cells: self.kept.cells(),
            evictions: self.kept.evictions(),
            hits: self.hits,
            misses: self.misses,
            shortened: self.shortened,
            replays: self.replays,
            replayed_tokens: self.replayed_tokens,
        }
    }

    /// What is kept.
    #[must_use]
    pub fn directory(&self) -> &Directory {
        &self.kept
    }

    /// Begins with the directory of an earlier stage 0, before the chain is formed: what the stages still have of it can be used.
    ///
    /// # Errors
    /// [`SnapshotError`], and the directory stays empty.
    pub fn remember(&mut self, snapshot: &[u8]) -> Result<(), SnapshotError> {
        self.kept = Directory::restore(self.limits.cache, snapshot)?;
        Ok(())
    }

    /// Frames under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Tokens of a running session: prompt, then answer.
    #[must_use]
    pub fn tokens(&self, id: SessionId) -> Option<&[Token]> {
        self.sessions.get(&id).map(|s| s.tokens.as_slice())
    }

    /// Whether the chain is formed.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.up
    }

    /// Takes a request into the queue.
    ///
    /// # Errors
    /// [`AdmissionError`].
    pub fn submit(&mut self, request: Request) -> Result<SessionId, AdmissionError> {
        let (prompt, context) = (request.prompt.len(), self.limits.context);
        if prompt == 0 {
            return Err(AdmissionError::EmptyPrompt);
        }
        if prompt >= context {
            return Err(AdmissionError::TooLong { prompt, context });
        }
        if request.config.len() > MAX_CONFIGS {
            return Err(AdmissionError::ConfigTooLarge { bytes: request.config.len() });
        }
        // Free lanes do not help while the chain is broken: the queue stays bounded then too.
        if self.queue.len() >= self.limits.max_queue + self.free.len() {
            return Err(AdmissionError::QueueFull(self.queue.len()));
        }
        let id = self.next_session;
        self.next_session += 1;
        self.queue.push_back((id, request));
        Ok(id)
    }

    /// A queued request waits no more for a prompt that begins alike; says whether it did.
    pub fn hurry(&mut self, id: SessionId) -> bool {
        let queued = self.queue.iter_mut().find(|(i, _)| *i == id);
        queued.is_some_and(|(_, request)| !std::mem::replace(&mut request.alone, true))
    }

    /// Ends a session, wherever it is. Its lane is free for the next one at once: the stop goes ahead of it.
    pub fn cancel(&mut self, id: SessionId) {
        self.queue.retain(|(i, _)| *i != id);
        self.release(id);
    }

    fn release(&mut self, id: SessionId) {
        let page = if self.kept.payload().can_be_cut() { self.keep(id) } else { None };
        self.share(id, None);
        let Some(session) = self.sessions.remove(&id) else { return };
        if let Some(ended) = self.ended.get_mut(usize::from(session.lane)) {
            *ended = page;
        }
        if self.up && session.on_stages {
            self.pending.push(Section::Stop(session.target(id)));
        }
        self.decodes.retain(|i| *i != id);
        self.prefills.retain(|i| *i != id);
        if self.probe == Some(id) {
            self.probe = None;
        } else {
            self.free.push(session.lane);
        }
    }

    /// The chain is formed: every lane of every stage is emptied, every session is computed again from its tokens, and a
    /// probe token goes first.
    pub fn formed(&mut self, probe: Request) {
        self.lost();
        self.ended.fill(None);
        self.up = true;
        self.next_seq = 1;
        self.pending = vec![Section::Reset];
        let id = self.next_session;
        self.next_session += 1;
        self.probe = Some(id);
        // Lane 0 is empty on all stages until its own session is computed again, after the probe.
        self.start(id, 0, probe);
    }

    /// The chain is broken: what is in flight is lost, the sessions wait.
    pub fn lost(&mut self) {
        self.up = false;
        if let Some(id) = self.probe {
            self.release(id);
        }
        self.in_flight.clear();
        self.pending.clear();
        self.due.clear();
        self.kept.formed();
        self.decodes.clear();
        self.prefills = self.sessions.keys().copied().collect();
        for at in 0..self.prefills.len() {
            let id = self.prefills[at];
            self.again_from(id, 0);
            if let Some(session) = self.sessions.get_mut(&id) {
                session.on_stages = false;
            }
        }
    }

    /// Fails every session, e.g. when a deadline passed.
    pub fn fail_all(&mut self, class: ErrorClass, message: &str) -> Vec<Event> {
        let ids: Vec<_> = self.queue.drain(..).map(|(id, _)| id).chain(self.sessions.keys().copied()).collect();
        let probe = self.probe;
        for id in &ids {
            self.release(*id);
        }
        let failed = |id| Event::Failed(id, class, message.to_owned());
        ids.into_iter().filter(|id| Some(*id) != probe).map(failed).collect()
    }

    /// Fails one session.
    pub fn fail(&mut self, id: SessionId, class: ErrorClass, message: &str) -> Event {
        self.cancel(id);
        Event::Failed(id, class, message.to_owned())
    }

    /// Sends a control probe with the next frame; it comes back as [`Event::Probed`].
    pub fn probe(&mut self, id: u64) {
        self.pending.push(Section::Probe(id));
    }

    /// The next frame, if one can be sent now. Call it until it gives none.
    pub fn next_frame(&mut self, events: &mut Vec<Event>) -> Option<Frame> {
        // One without rows, as the end of a session is, keeps no stage busy and holds up no rows.
        let with_rows = self.in_flight.iter().filter(|f| f.has_rows()).count();
        if !self.up || with_rows >= self.limits.max_in_flight || self.in_flight.len() > self.limits.max_in_flight {
            return None;
        }
        while self.probe.is_none() && !self.free.is_empty() {
            let Some(next) = self.queue.iter().position(|(_, request)| !self.waits(request)) else { break };
            let Some((id, request)) = self.queue.remove(next) else { break };
            let Some(lane) = self.pick(&request) else { break };
            let cold = self.start(id, lane, request);
            events.push(Event::Started(id));
            if cold {
                events.push(Event::Restored(id, 0));
            }
        }
        let mut rows = Vec::new();
        self.add_decodes(&mut rows);
        let prefill_rows = self.add_prefill(&mut rows);
        if rows.is_empty() && self.pending.is_empty() {
            return None;
        }
        self.make_room();
        Some(self.emit(rows, prefill_rows))
    }

    /// Rows of answers under way, one each, up to this frame's share.
    fn add_decodes(&mut self, rows: &mut Vec<Row>) {
        let share = self.decode_share().min(self.limits.max_rows);
        while rows.len() < share && self.probe.is_none() {
            let Some(id) = self.decodes.pop_front() else { break };
            if let Some(session) = self.sessions.get_mut(&id) {
                session.send(id, 1, &mut self.pending, rows);
            }
        }
    }

    /// Rows of prompts, in order of arrival, up to the budget.
    fn add_prefill(&mut self, rows: &mut Vec<Row>) -> usize {
        let mut budget = self.prefill_budget().min(self.limits.max_rows - rows.len());
        let before = rows.len();
        for at in 0..self.prefills.len() {
            let id = self.prefills[at];
            let held_back = self.probe.is_some_and(|p| p != id);
            let Some(session) = self.sessions.get_mut(&id).filter(|_| !held_back) else { continue };
            let take = session.until_checkpoint().min(budget);
            // The frame after this one has room again.
            let fits = session.config_sent || config_bytes(&self.pending) + session.config_bytes() <= MAX_CONFIGS;
            if take > 0 && fits {
                budget -= take;
                session.send(id, take, &mut self.pending, rows);
                if session.checkpoints.pop_if(|at| *at == session.sent).is_some() {
                    self.due.push(id);
                }
            }
            if budget == 0 {
                break;
            }
        }
        let sessions = &self.sessions;
        self.prefills.retain(|id| sessions.get(id).is_some_and(|s| s.remaining() > 0));
        rows.len() - before
    }

    fn emit(&mut self, rows: Vec<Row>, prefill_rows: usize) -> Frame {
        let seq = self.next_seq;
        self.next_seq += 1;
        self.frames += 1;
        self.in_flight.push_back(InFlight { seq, prefill_rows, decode_rows: rows.len() - prefill_rows });
        let sections = std::mem::take(&mut self.pending);
        // Before whatever comes next of these sessions.
        while let Some(id) = self.due.pop() {
            self.keep(id);
        }
        Frame { seq, sections, rows, activations: Activations::default() }
    }

    /// Decode rows of one frame: an equal share of the running sessions for each frame in flight.
    fn decode_share(&self) -> usize {
        let decoding = self.sessions.values().filter(|s| s.is_decoding()).count();
        decoding.div_ceil(self.limits.max_in_flight).max(1)
    }

    /// Prompt rows of the next frame.
    fn prefill_budget(&self) -> usize {
        let in_flight: usize = self.in_flight.iter().map(|f| f.prefill_rows).sum();
        if !self.sessions.values().any(Session::is_decoding) {
            let left: usize = self.prefills.iter().filter_map(|id| self.sessions.get(id)).map(Session::remaining).sum();
            // A frame that has to wait for another to come back would make the prompt late.
            let answers = self.in_flight.iter().filter(|f| f.decode_rows > 0).count();
            let without = self.in_flight.iter().filter(|f| !f.has_rows()).count();
            let frames = self.limits.max_in_flight.saturating_sub(answers + without.saturating_sub(1));
            return self.limits.prefill_chunk.min(self.pace.alone(in_flight + left, frames));
        }
        let shared = self.pace.in_flight().min(self.limits.prefill_chunk_shared);
        self.pace.per_frame().min(shared.saturating_sub(in_flight))
    }

    /// Takes the answer to the oldest frame in flight.
    ///
    /// # Errors
    /// When it answers another frame: the chain lost its order and must be formed again.
    pub fn answered(&mut self, predictions: Predictions) -> Result<Vec<Event>, OutOfOrder> {
        let expected = self.in_flight.front().map(|f| f.seq);
        if expected != Some(predictions.seq) {
            return Err(OutOfOrder { expected, got: predictions.seq });
        }
        if let Some(frame) = self.in_flight.pop_front() {
            self.pace.answered(frame.prefill_rows, frame.decode_rows, predictions.stats());
        }
        let mut events = Vec::new();
        let mut reports = Vec::new();
        for section in predictions.sections {
            match section {
                Section::Probe(id) => events.push(Event::Probed(id)),
                Section::Report(report) => reports.push(report),
                Section::Restored { session, epoch, length } => {
                    self.restored(session, epoch, length as usize, &mut events);
                }
                _ => {}
            }
        }
        // What a request itself brought about ends it at once, whichever of its rows it befell.
        for report in reports.iter().filter(|r| is_final(r)) {
            if self.sessions.contains_key(&report.session) {
                self.give_up(report.session, Some(report), &mut events);
            }
        }
        for report in reports {
            if let Some(session) = self.sessions.get_mut(&report.session) {
                session.cause.get_or_insert(report);
            }
        }
        for prediction in predictions.records {
            self.take(prediction, &mut events);
        }
        Ok(events)
    }

    fn take(&mut self, prediction: Prediction, events: &mut Vec<Event>) {
        let id = prediction.session;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.epoch != prediction.epoch {
            return;
        }
        if prediction.flags & prediction_flags::DROPPED != 0 {
            self.retry(id, events);
            return;
        }
        if usize::try_from(i64::from(prediction.position) + 1) != Ok(session.tokens.len()) {
            return; // not the end of what is known: nobody asked
        }
        (session.attempts, session.cause) = (0, None);
        session.recorded.clear();
        let token = prediction.token;
        let ends = session.request.eog.contains(&token);
        session.tokens.push(token);
        let answered = session.tokens.len() - session.prompt;
        if answered == 1 && self.kept.payload().can_be_cut() {
            self.keep(id); // others with this prompt need not wait for the end of the answer
        }
        let Some(session) = self.sessions.get(&id) else { return };
        let full = answered >= session.request.max_tokens || session.tokens.len() >= self.limits.context;
        let grammar_end = prediction.flags & prediction_flags::GRAMMAR_END != 0;
        let is_probe = self.probe == Some(id);
        // A grammar's end is not in its last token.
        let shown = session.prompt..session.tokens.len() - usize::from(grammar_end);
        if answered == MAX_REPLAY || (answered < MAX_REPLAY && (ends || grammar_end || full)) {
            let (request, tokens) = (&session.request, &session.tokens);
            if let Some(fingerprint) = request.fingerprint {
                self.answers.record(request.namespace, fingerprint, &tokens[..session.prompt], &tokens[shown]);
            }
        }
        let finish = match (ends, grammar_end) {
            (true, _) => Some(Finish::Stop(Some(token))),
            (false, true) => Some(Finish::Stop(None)),
            (false, false) => full.then_some(Finish::Length),
        };
        if is_probe {
            self.release(id);
            events.push(Event::Probed(0));
            return;
        }
        if !ends {
            events.push(Event::Token(id, Box::new(prediction)));
        }
        match finish {
            Some(finish) => {
                events.push(Event::Finished(id, finish));
                self.release(id);
            }
            None => self.decodes.push_back(id),
        }
    }

    /// Fails a session with the words of a report.
    fn give_up(&mut self, id: SessionId, report: Option<&Report>, events: &mut Vec<Event>) {
        let (class, message) = report.map_or_else(
            || (ErrorClass::Backend, "a stage dropped the request's rows and did not say why".to_owned()),
            |r| (r.class, format!("stage {}: {}", r.stage, r.message)),
        );
        let is_probe = self.probe == Some(id);
        self.release(id);
        if !is_probe {
            events.push(Event::Failed(id, class, message));
        }
    }

    /// Rows of the session were dropped somewhere: compute it again from its tokens, or give up.
    fn retry(&mut self, id: SessionId, events: &mut Vec<Event>) {
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.attempts += 1;
        if session.attempts >= self.limits.max_attempts {
            let cause = session.cause.take();
            self.give_up(id, cause.as_ref(), events);
            return;
        }
        let old = session.target(id);
        self.again_from(id, 0);
        self.pending.push(Section::Trim { target: old, position: 0 });
        if !self.prefills.contains(&id) {
            self.prefills.push_back(id);
        }
    }
}

/// Whether another attempt would end the same way.
fn is_final(report: &Report) -> bool {
    matches!(report.class, ErrorClass::InvalidRequest | ErrorClass::Unsupported)
}

fn config_bytes(sections: &[Section]) -> usize {
    let bytes = |s: &Section| if let Section::Config { json, .. } = s { json.len() } else { 0 };
    sections.iter().map(bytes).sum()
}
