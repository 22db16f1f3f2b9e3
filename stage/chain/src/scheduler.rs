//! The scheduler of stage 0: admits sessions to lanes, makes frames with rows of many sessions, keeps up to N of them
//! in flight in a chain of N stages, and turns predictions into events. Pure: no clock, no I/O.

use std::collections::{BTreeMap, VecDeque};

use splitmodel_link::frame::{
    Activations, Epoch, ErrorClass, Frame, Lane, Prediction, Predictions, Report, Row, Section, SessionId, Target,
    Token, prediction_flags, row_flags,
};

use crate::observe::TraceContext;

/// Most bytes of generation configs in a frame: half of what a message's sections may have, the rest is for reports.
const MAX_CONFIGS: usize = splitmodel_link::codec::MAX_SECTION_BYTES as usize / 2;

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sessions decoded at once. One more lane, the last, belongs to the probe.
    pub lanes: u16,
    /// Tokens of one session, prompt and answer.
    pub context: usize,
    /// Frames in flight: the number of stages keeps every stage busy.
    pub max_in_flight: usize,
    /// Rows of one frame at most (`n_ubatch`).
    pub max_rows: usize,
    /// Prompt rows of one frame while no answer is running.
    pub prefill_chunk: usize,
    /// Prompt rows in flight at once while answers are running, spread over the frames in flight: what a long prompt may
    /// cost a running answer per token.
    pub prefill_chunk_shared: usize,
    /// Sessions that may wait for a lane.
    pub max_queue: usize,
    /// Attempts of a session whose rows were dropped before it fails.
    pub max_attempts: u32,
}

/// A generation to run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Prompt tokens, at least one.
    pub prompt: Vec<Token>,
    /// JSON of the generation config, as the last stage reads it.
    pub config: Vec<u8>,
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// Tokens that end the answer.
    pub eog: Vec<Token>,
    /// Whether log-probabilities are wanted.
    pub logprobs: bool,
    /// Its trace, where it is traced.
    pub trace: Option<TraceContext>,
}

/// Why a request is not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// The queue is full.
    #[error("all lanes are busy and {0} requests wait already; try again later")]
    QueueFull(usize),
    /// Nothing to start from.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// Too long.
    #[error("the prompt has {prompt} tokens, the context holds {context}")]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// Its config would not fit into a frame.
    #[error("the generation config has {bytes} bytes; at most {MAX_CONFIGS} fit into a frame")]
    ConfigTooLarge {
        /// Bytes of its JSON.
        bytes: usize,
    },
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model ended it, with this token, which is not part of the answer; `None`: its grammar is complete.
    Stop(Option<Token>),
    /// A limit: `max_tokens` or the context.
    Length,
}

/// What happened to a session.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// It got its lane.
    Started(SessionId),
    /// A token of the answer.
    Token(SessionId, Box<Prediction>),
    /// The answer is complete.
    Finished(SessionId, Finish),
    /// It failed.
    Failed(SessionId, ErrorClass, String),
    /// The token probe or control probe came back.
    Probed(u64),
}

struct Session {
    lane: Lane,
    epoch: Epoch,
    tokens: Vec<Token>,
    prompt: usize,
    /// Rows sent in this epoch.
    sent: usize,
    /// Whether the last stage has this epoch's config.
    config_sent: bool,
    /// Whether the stages of this formation know the session.
    on_stages: bool,
    attempts: u32,
    request: Request,
}

impl Session {
    fn remaining(&self) -> usize {
        self.tokens.len() - self.sent
    }

    fn target(&self, id: SessionId) -> Target {
        Target { session: id, epoch: self.epoch, lane: self.lane }
    }

    /// Its answer has begun, and no more than its newest token is to be sent.
    fn is_decoding(&self) -> bool {
        self.tokens.len() > self.prompt && self.remaining() <= 1
    }
}

struct InFlight {
    seq: u64,
    prefill_rows: usize,
}

/// Counts for metrics and tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sessions with a lane.
    pub running: usize,
    /// Sessions waiting for a lane.
    pub queued: usize,
    /// Frames in flight.
    pub in_flight: usize,
    /// KV cells that the running sessions use.
    pub cells: usize,
    /// Frames made since the start.
    pub frames: u64,
}

/// See the module.
pub struct Scheduler {
    limits: Limits,
    sessions: BTreeMap<SessionId, Session>,
    /// Waiting for a lane, in order of arrival.
    queue: VecDeque<(SessionId, Request)>,
    free: Vec<Lane>,
    /// Sessions whose next token is known and not sent, in turn.
    decodes: VecDeque<SessionId>,
    /// Sessions with rows of a prompt (or, after a loss, of all that is known) to send, in order of arrival.
    prefills: VecDeque<SessionId>,
    pending: Vec<Section>,
    in_flight: VecDeque<InFlight>,
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
            free: (0..limits.lanes).rev().collect(),
            decodes: VecDeque::new(),
            prefills: VecDeque::new(),
            pending: Vec::new(),
            in_flight: VecDeque::new(),
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
        }
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

    /// Ends a session, wherever it is. Its lane is free for the next one at once: the stop goes ahead of it.
    pub fn cancel(&mut self, id: SessionId) {
        self.queue.retain(|(i, _)| *i != id);
        self.release(id);
    }

    fn release(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
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
        self.up = true;
        self.next_seq = 1;
        self.pending = vec![Section::Reset];
        let id = self.next_session;
        self.next_session += 1;
        let lane = self.limits.lanes;
        self.start(id, lane, probe);
        self.probe = Some(id);
    }

    /// The chain is broken: what is in flight is lost, the sessions wait.
    pub fn lost(&mut self) {
        self.up = false;
        if let Some(id) = self.probe {
            self.release(id);
        }
        self.in_flight.clear();
        self.pending.clear();
        for session in self.sessions.values_mut() {
            session.epoch += 1;
            session.sent = 0;
            session.config_sent = false;
            session.on_stages = false;
        }
        self.decodes.clear();
        self.prefills = self.sessions.keys().copied().collect();
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

    /// Adds a section to the next frame.
    pub fn push_section(&mut self, section: Section) {
        self.pending.push(section);
    }

    fn start(&mut self, id: SessionId, lane: Lane, request: Request) {
        let tokens = request.prompt.clone();
        let prompt = tokens.len();
        let session = Session {
            lane,
            epoch: 0,
            tokens,
            prompt,
            sent: 0,
            config_sent: false,
            on_stages: false,
            attempts: 0,
            request,
        };
        self.sessions.insert(id, session);
        self.prefills.push_back(id);
    }

    /// The next frame, if one can be sent now. Call it until it gives none.
    pub fn next_frame(&mut self, events: &mut Vec<Event>) -> Option<Frame> {
        if !self.up || self.in_flight.len() >= self.limits.max_in_flight {
            return None;
        }
        while self.probe.is_none() && !self.free.is_empty() {
            let Some((id, request)) = self.queue.pop_front() else { break };
            let Some(lane) = self.free.pop() else { break };
            self.start(id, lane, request);
            events.push(Event::Started(id));
        }
        let mut rows = Vec::new();
        self.add_decodes(&mut rows);
        let prefill_rows = self.add_prefill(&mut rows);
        if rows.is_empty() && self.pending.is_empty() {
            return None;
        }
        Some(self.emit(rows, prefill_rows))
    }

    /// Rows of answers under way, one each, up to this frame's share.
    fn add_decodes(&mut self, rows: &mut Vec<Row>) {
        let share = self.decode_share().min(self.limits.max_rows);
        while rows.len() < share && self.probe.is_none() {
            let Some(id) = self.decodes.pop_front() else { break };
            if let Some(session) = self.sessions.get_mut(&id) {
                send(id, session, 1, &mut self.pending, rows);
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
            let take = session.remaining().min(budget);
            // The frame after this one has room again.
            let fits = session.config_sent || config_bytes(&self.pending) + session.request.config.len() <= MAX_CONFIGS;
            if take > 0 && fits {
                budget -= take;
                send(id, session, take, &mut self.pending, rows);
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
        self.in_flight.push_back(InFlight { seq, prefill_rows });
        Frame { seq, sections: std::mem::take(&mut self.pending), rows, activations: Activations::default() }
    }

    /// Decode rows of one frame: an equal share of the running sessions for each frame in flight.
    fn decode_share(&self) -> usize {
        let decoding = self.sessions.values().filter(|s| s.is_decoding()).count();
        decoding.div_ceil(self.limits.max_in_flight).max(1)
    }

    /// Prompt rows of the next frame.
    fn prefill_budget(&self) -> usize {
        if !self.sessions.values().any(Session::is_decoding) {
            return self.limits.prefill_chunk;
        }
        let in_flight: usize = self.in_flight.iter().map(|f| f.prefill_rows).sum();
        let shared = self.limits.prefill_chunk_shared;
        shared.div_ceil(self.limits.max_in_flight).min(shared.saturating_sub(in_flight))
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
        self.in_flight.pop_front();
        let mut events = Vec::new();
        let mut reports = Vec::new();
        for section in predictions.sections {
            match section {
                Section::Probe(id) => events.push(Event::Probed(id)),
                Section::Report(report) => reports.push(report),
                _ => {}
            }
        }
        // What a request itself brought about ends it at once, whichever of its rows it befell.
        for report in reports.iter().filter(|r| is_final(r)) {
            if self.sessions.contains_key(&report.session) {
                self.give_up(report.session, Some(report), &mut events);
            }
        }
        for prediction in predictions.records {
            self.take(prediction, &reports, &mut events);
        }
        Ok(events)
    }

    fn take(&mut self, prediction: Prediction, reports: &[Report], events: &mut Vec<Event>) {
        let id = prediction.session;
        let Some(session) = self.sessions.get_mut(&id) else { return };
        if session.epoch != prediction.epoch {
            return;
        }
        if prediction.flags & prediction_flags::DROPPED != 0 {
            self.retry(id, reports, events);
            return;
        }
        if usize::try_from(i64::from(prediction.position) + 1) != Ok(session.tokens.len()) {
            return; // not the end of what is known: nobody asked
        }
        session.attempts = 0;
        let token = prediction.token;
        let ends = session.request.eog.contains(&token);
        session.tokens.push(token);
        let answered = session.tokens.len() - session.prompt;
        let full = answered >= session.request.max_tokens || session.tokens.len() >= self.limits.context;
        let grammar_end = prediction.flags & prediction_flags::GRAMMAR_END != 0;
        let is_probe = self.probe == Some(id);
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
    fn retry(&mut self, id: SessionId, reports: &[Report], events: &mut Vec<Event>) {
        let own = reports.iter().find(|r| r.session == id).or(reports.first());
        let Some(session) = self.sessions.get_mut(&id) else { return };
        session.attempts += 1;
        if session.attempts >= self.limits.max_attempts {
            self.give_up(id, own, events);
            return;
        }
        let old = session.target(id);
        session.epoch += 1;
        session.sent = 0;
        session.config_sent = false;
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

/// Appends the next `count` rows of a session, and its config before the first.
fn send(id: SessionId, session: &mut Session, count: usize, pending: &mut Vec<Section>, rows: &mut Vec<Row>) {
    if !session.config_sent {
        session.config_sent = true;
        session.on_stages = true;
        pending.push(Section::Config { target: session.target(id), json: session.request.config.clone() });
        if let Some(context) = session.request.trace {
            pending.push(Section::Trace { session: id, context });
        }
    }
    for at in session.sent..session.sent + count {
        let last = at + 1 == session.tokens.len();
        let logprobs = if session.request.logprobs { row_flags::LOGPROBS } else { 0 };
        rows.push(Row {
            session: id,
            epoch: session.epoch,
            ordinal: u32::try_from(at).unwrap_or(u32::MAX),
            position: i32::try_from(at).unwrap_or(i32::MAX),
            token: session.tokens[at],
            lane: session.lane,
            flags: if last { row_flags::WANT | logprobs } else { 0 },
        });
    }
    session.sent += count;
}

/// An answer to another frame than the oldest in flight.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("frame {expected:?} had to be answered next, the answer was for {got}")]
pub struct OutOfOrder {
    /// Oldest frame in flight.
    pub expected: Option<u64>,
    /// Frame answered.
    pub got: u64,
}
