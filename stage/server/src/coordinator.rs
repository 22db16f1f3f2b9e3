//! Stage 0's coordinator: the scheduler behind one short lock, driven by whoever has news (the API, the return path, the
//! chain's manager), so that a prediction becomes the next frame without a hop through another task.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use splitmodel_cache::SnapshotError;
use splitmodel_chain::scheduler::{AdmissionError, Counts, Event, Finish, Limits, OutOfOrder, Request, Scheduler};
use splitmodel_link::Sender;
use splitmodel_link::frame::{ErrorClass, Predictions, SessionId, StageStats};
use splitmodel_openai::{ApiError, EndReason, ErrorClass as Api, GenEvent, GenSender, TokenEvent};
use tokio::sync::{oneshot, watch};

use crate::engine::EngineQueue;
use crate::telemetry::timeline::{Breakdown, Timelines};
use crate::telemetry::{Ended, RequestTrace};

/// Deadlines of requests and of the chain.
#[derive(Clone, Copy, Debug)]
pub struct Deadlines {
    /// Longest wait for a lane.
    pub admission: Duration,
    /// Longest wait for a broken chain.
    pub recovery: Duration,
    /// Longest time a frame may be under way before the chain is taken for hung.
    pub step: Duration,
    /// Idle time after which a probe goes through the chain.
    pub probe: Duration,
}

/// Seconds after which a client may try again when the chain is broken.
const RETRY_AFTER: u32 = 5;

/// Tells the chain's manager that the formation cannot go on.
pub type BreakChain = Box<dyn Fn(String) + Send>;

/// Who waits for a generation.
#[derive(Debug)]
pub struct Client {
    /// Where its events go.
    pub sender: GenSender,
    /// When its request began to arrive.
    pub received: Instant,
    /// Its trace, where it is traced.
    pub trace: Option<Box<RequestTrace>>,
}

struct Listener {
    client: Client,
    submitted: Instant,
    tokens: u64,
    /// Whether it was told that it started.
    announced: bool,
}

struct Inner {
    scheduler: Scheduler,
    listeners: HashMap<SessionId, Listener>,
    /// Sessions waiting for a lane, by the time they must have one.
    waiting: BTreeMap<(Instant, SessionId), ()>,
    formation: u64,
    /// When the chain broke; `None` while it is whole.
    broken_since: Option<Instant>,
    break_chain: Option<BreakChain>,
    /// Whether the token probe of this formation came back.
    probed: bool,
    /// Oldest frame under way since.
    busy_since: Option<Instant>,
    last_answer: Instant,
    probes: HashMap<u64, oneshot::Sender<Duration>>,
    probe_sent: HashMap<u64, Instant>,
    next_probe: u64,
    draining: bool,
    /// Sessions before their first token; `None` where requests are not measured.
    timelines: Option<Timelines>,
    /// The link to stage 1, while there is one.
    down: Option<Sender>,
    figures: Figures,
}

/// What went through the chain since the start.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Prompt tokens of admitted requests.
    pub prompt: u64,
    /// Of those, tokens that came from kept prefixes.
    pub cached: u64,
    /// Tokens generated.
    pub generated: u64,
    /// First tokens.
    pub first_tokens: u64,
    /// Parts of the time to them, in the order of [`Breakdown::parts`].
    pub ttft: [(&'static str, Duration); 7],
    /// What each stage did, as its statistics on answered frames say; by index.
    pub stages: Vec<StageTotals>,
}

impl Figures {
    fn add_stats(&mut self, s: &StageStats) {
        let stage = usize::from(s.stage);
        if stage >= self.stages.len() {
            self.stages.resize(stage + 1, StageTotals::default());
        }
        let us = |n: u32| Duration::from_micros(n.into());
        let t = &mut self.stages[stage];
        t.frames += 1;
        t.rows += u64::from(s.rows);
        t.wait += us(s.wait_us);
        t.compute += us(s.compute_us);
        t.encode += us(s.encode_us);
        t.lanes = s.lanes;
    }

    fn add_breakdown(&mut self, b: &Breakdown) {
        self.first_tokens += 1;
        for (sum, part) in self.ttft.iter_mut().zip(b.parts()) {
            *sum = (part.0, sum.1 + part.1);
        }
    }
}

/// What a stage did, summed over answered frames.
#[derive(Clone, Copy, Debug, Default)]
pub struct StageTotals {
    /// Frames.
    pub frames: u64,
    /// Rows computed.
    pub rows: u64,
    /// In the engine's queue.
    pub wait: Duration,
    /// In computation.
    pub compute: Duration,
    /// In bringing activations out.
    pub encode: Duration,
    /// Lanes in use after its last frame.
    pub lanes: u32,
}

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// By the scheduler.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The stage is ending.
    #[error("the server is shutting down")]
    Draining,
}

/// See the module.
pub struct Coordinator {
    inner: Mutex<Inner>,
    queue: EngineQueue,
    deadlines: Deadlines,
    probe: Request,
    changed: watch::Sender<bool>,
    active: watch::Sender<usize>,
}

impl std::fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Coordinator").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

impl Coordinator {
    /// A coordinator of a chain that is not formed yet. `probe` is the one-token request that opens every formation.
    #[must_use]
    ///
    /// With `measures`, the time to each first token is divided into its parts.
    pub fn new(limits: Limits, deadlines: Deadlines, queue: EngineQueue, probe: Request, measures: bool) -> Arc<Self> {
        let now = Instant::now();
        let inner = Inner {
            scheduler: Scheduler::new(limits),
            listeners: HashMap::new(),
            waiting: BTreeMap::new(),
            formation: 0,
            broken_since: Some(now),
            break_chain: None,
            probed: false,
            busy_since: None,
            last_answer: now,
            probes: HashMap::new(),
            probe_sent: HashMap::new(),
            next_probe: 1,
            draining: false,
            timelines: measures.then(Timelines::default),
            down: None,
            figures: Figures { ttft: Breakdown::default().parts(), ..Figures::default() },
        };
        let (changed, active) = (watch::Sender::new(false), watch::Sender::new(0));
        Arc::new(Self { inner: Mutex::new(inner), queue, deadlines, probe, changed, active })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // The scheduler's state is consistent after every call; a panic elsewhere must not end the service.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows readiness: `true` while tokens cross the whole chain.
    #[must_use]
    pub fn ready(&self) -> watch::Receiver<bool> {
        self.changed.subscribe()
    }

    /// Counts of now.
    #[must_use]
    pub fn counts(&self) -> (Counts, Figures) {
        let inner = self.lock();
        (inner.scheduler.counts(), inner.figures.clone())
    }

    /// The directory of kept prefixes with the number of its changes, where that is not `known`.
    #[must_use]
    pub fn directory(&self, known: u64) -> Option<(u64, Vec<u8>)> {
        let inner = self.lock();
        let directory = inner.scheduler.directory();
        (directory.changes() != known).then(|| (directory.changes(), directory.snapshot()))
    }

    /// Begins with the directory of an earlier stage 0.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn remember(&self, snapshot: &[u8]) -> Result<(), SnapshotError> {
        self.lock().scheduler.remember(snapshot)
    }

    /// Takes a request of `client`.
    ///
    /// # Errors
    /// [`Refused`].
    pub fn submit(&self, mut request: Request, client: Client) -> Result<SessionId, Refused> {
        let mut inner = self.lock();
        if inner.draining {
            return Err(Refused::Draining);
        }
        let prompt = request.prompt.len() as u64;
        request.trace = client.trace.as_ref().map(|t| t.context());
        let id = inner.scheduler.submit(request)?;
        let now = Instant::now();
        if let Some(timelines) = &mut inner.timelines {
            timelines.submitted(id, client.received, now);
        }
        inner.listeners.insert(id, Listener { client, submitted: now, tokens: 0, announced: false });
        inner.waiting.insert((now + self.deadlines.admission, id), ());
        inner.figures.prompt += prompt;
        self.active.send_replace(inner.listeners.len());
        self.pump(&mut inner);
        Ok(id)
    }

    /// Ends a session whose client went away, or that has ended.
    pub fn cancel(&self, id: SessionId) {
        let mut inner = self.lock();
        if let Some(listener) = self.forget(&mut inner, id) {
            listener.end(id, Ended::Cancelled);
        }
        inner.scheduler.cancel(id);
        self.pump(&mut inner);
    }

    /// A new formation is whole; `down` is its first link, if it has one. `break_chain` is called when the coordinator finds
    /// that it cannot go on.
    pub fn formed(&self, formation: u64, down: Option<Sender>, break_chain: BreakChain) {
        let mut inner = self.lock();
        inner.formation = formation;
        inner.broken_since = None;
        inner.probed = false;
        inner.busy_since = None;
        inner.last_answer = Instant::now();
        inner.break_chain = Some(break_chain);
        inner.down = down;
        inner.scheduler.formed(self.probe.clone());
        self.pump(&mut inner);
    }

    /// The formation broke.
    pub fn lost(&self, formation: u64) {
        let mut inner = self.lock();
        if inner.formation != formation {
            return;
        }
        inner.scheduler.lost();
        inner.down = None;
        if let Some(timelines) = &mut inner.timelines {
            timelines.lost();
        }
        inner.broken_since.get_or_insert_with(Instant::now);
        inner.break_chain = None;
        inner.probed = false;
        inner.busy_since = None;
        inner.probes.clear();
        inner.probe_sent.clear();
        self.changed.send_if_modified(|r| std::mem::replace(r, false));
    }

    /// Ends `formation` if it is the one that runs; says whether it is. A chain of one has no links to form.
    pub fn form_again(&self, formation: u64, reason: &str) -> bool {
        let inner = self.lock();
        let runs = inner.down.is_some() && inner.formation == formation;
        let Some(break_chain) = inner.break_chain.as_ref().filter(|_| runs) else { return false };
        break_chain(format!("told to form anew: {reason}"));
        true
    }

    /// An answer of the last stage.
    pub fn answered(&self, formation: u64, predictions: Predictions) {
        let mut inner = self.lock();
        if inner.formation != formation || inner.broken_since.is_some() {
            return;
        }
        take_stats(&mut inner, &predictions);
        match inner.scheduler.answered(predictions) {
            Ok(events) => {
                let now = Instant::now();
                inner.last_answer = now;
                inner.busy_since = (inner.scheduler.in_flight() > 0).then_some(now);
                for event in &events {
                    if let Event::Token(id, _) | Event::Finished(id, _) = event {
                        first_token(&mut inner, *id);
                    }
                }
                // The next frame first: clients can wait the microseconds it takes, the chain should not.
                self.pump(&mut inner);
                self.dispatch(&mut inner, events);
            }
            Err(OutOfOrder { expected, got }) => {
                let why = format!("the chain lost its order: frame {expected:?} had to be answered next, not {got}");
                if let Some(break_chain) = &inner.break_chain {
                    break_chain(why);
                }
            }
        }
    }

    /// Sends a probe through the chain; resolves to its round trip, or not at all when the chain breaks.
    pub fn probe(&self) -> Option<oneshot::Receiver<Duration>> {
        let mut inner = self.lock();
        if inner.broken_since.is_some() {
            return None;
        }
        let (tx, rx) = oneshot::channel();
        let id = inner.next_probe;
        inner.next_probe += 1;
        inner.probes.insert(id, tx);
        inner.probe_sent.insert(id, Instant::now());
        inner.scheduler.probe(id);
        self.pump(&mut inner);
        Some(rx)
    }

    /// No new requests from here on.
    pub fn drain(&self) {
        self.lock().draining = true;
    }

    /// Waits until no request is left.
    pub async fn idle(&self) {
        // `self` holds the sender, so the channel cannot close.
        let _ = self.active.subscribe().wait_for(|n| *n == 0).await;
    }

    /// Ends everything that still runs.
    pub fn abort(&self, message: &str) {
        let mut inner = self.lock();
        let events = inner.scheduler.fail_all(ErrorClass::Busy, message);
        self.dispatch(&mut inner, events);
    }

    /// Looks at deadlines; to be called about once a second.
    pub fn tick(&self) {
        let now = Instant::now();
        let mut inner = self.lock();
        let mut events = Vec::new();
        while let Some((&(due, id), ())) = inner.waiting.first_key_value() {
            if due > now {
                break;
            }
            inner.waiting.remove(&(due, id));
            let message = "no lane became free in time; try again later";
            events.push(inner.scheduler.fail(id, ErrorClass::Timeout, message));
        }
        // What waits for a prompt that begins alike is not to miss its own lane for that.
        let late = inner.waiting.keys().take_while(|(due, _)| *due - now < self.deadlines.admission / 2);
        let late: Vec<_> = late.map(|(_, id)| *id).collect();
        if late.into_iter().filter(|id| inner.scheduler.hurry(*id)).count() > 0 {
            self.pump(&mut inner);
        }
        if inner.broken_since.is_some_and(|s| now - s > self.deadlines.recovery) {
            let message = "the chain is broken and did not come back in time; try again later";
            events.extend(inner.scheduler.fail_all(ErrorClass::Timeout, message));
        }
        if inner.busy_since.is_some_and(|s| now - s > self.deadlines.step) {
            inner.busy_since = Some(now);
            if let Some(break_chain) = &inner.break_chain {
                break_chain(format!("no answer from the chain for {:?}", self.deadlines.step));
            }
        }
        if inner.probed && inner.scheduler.in_flight() == 0 && now - inner.last_answer > self.deadlines.probe {
            inner.scheduler.probe(u64::MAX);
            self.pump(&mut inner);
        }
        self.dispatch(&mut inner, events);
    }

    /// Sends every frame that can be sent now.
    fn pump(&self, inner: &mut Inner) {
        let mut events = Vec::new();
        while let Some(frame) = inner.scheduler.next_frame(&mut events) {
            let now = Instant::now();
            inner.busy_since.get_or_insert(now);
            if let Some(timelines) = &mut inner.timelines {
                timelines.emitted(&frame, now);
            }
            self.queue.frame(inner.formation, frame);
        }
        self.dispatch(inner, events);
    }

    fn dispatch(&self, inner: &mut Inner, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Started(id) => self.started(inner, id),
                Event::Restored(id, cached) => {
                    inner.figures.cached += cached as u64;
                    announce(inner, id, cached);
                }
                Event::Token(id, p) => {
                    inner.figures.generated += 1;
                    let token = TokenEvent { token: p.token, logprob: p.logprob, top: p.top };
                    send(inner, id, GenEvent::Token(token));
                }
                Event::Finished(id, finish) => {
                    let (reason, ended) = match finish {
                        Finish::Stop(token) => (EndReason::Stop(token), "stop"),
                        Finish::Length => (EndReason::Length, "length"),
                    };
                    self.end(inner, id, GenEvent::Done(reason), Ended::Finished(ended));
                }
                Event::Failed(id, class, message) => {
                    let ended = Ended::Failed(class.name());
                    self.end(inner, id, GenEvent::Failed(api_error(class, message)), ended);
                }
                Event::Probed(0) => {
                    inner.probed = true;
                    self.changed.send_if_modified(|r| !std::mem::replace(r, true));
                }
                Event::Probed(id) => {
                    let sent = inner.probe_sent.remove(&id);
                    if let (Some(tx), Some(sent)) = (inner.probes.remove(&id), sent) {
                        let _ = tx.send(sent.elapsed()); // whoever asked may be gone
                    }
                }
            }
        }
    }

    fn started(&self, inner: &mut Inner, id: SessionId) {
        if let Some(listener) = inner.listeners.get_mut(&id) {
            let now = Instant::now();
            if let Some(timelines) = &mut inner.timelines {
                timelines.started(id, now);
            }
            if let Some(trace) = &mut listener.client.trace {
                trace.started(now);
            }
            inner.waiting.remove(&(listener.submitted + self.deadlines.admission, id));
        }
    }

    fn end(&self, inner: &mut Inner, id: SessionId, event: GenEvent, ended: Ended) {
        if let Some(listener) = self.forget(inner, id) {
            let _ = listener.client.sender.send(event); // as above
            listener.end(id, ended);
        }
    }

    fn forget(&self, inner: &mut Inner, id: SessionId) -> Option<Listener> {
        let listener = inner.listeners.remove(&id)?;
        if let Some(timelines) = &mut inner.timelines {
            timelines.forget(id);
        }
        inner.waiting.remove(&(listener.submitted + self.deadlines.admission, id));
        self.active.send_replace(inner.listeners.len());
        Some(listener)
    }
}

impl Listener {
    fn end(self, id: SessionId, ended: Ended) {
        if let Some(trace) = self.client.trace {
            trace.end(id, ended, self.tokens);
        }
    }
}

/// Takes in what the stages say of an answered frame.
fn take_stats(inner: &mut Inner, predictions: &Predictions) {
    predictions.stats().for_each(|s| inner.figures.add_stats(&s));
    if let Some(timelines) = &mut inner.timelines {
        let written = inner.down.as_ref().and_then(|d| d.written(predictions.seq));
        timelines.answered(predictions.seq, predictions.stats(), written);
    }
}

/// Divides the time to the first token, once it is there.
fn first_token(inner: &mut Inner, id: SessionId) {
    let Some(timelines) = inner.timelines.as_mut().filter(|t| t.holds(id)) else { return };
    let now = Instant::now();
    let Some(breakdown) = timelines.first_token(id, now) else { return };
    inner.figures.add_breakdown(&breakdown);
    if let Some(trace) = inner.listeners.get_mut(&id).and_then(|l| l.client.trace.as_mut()) {
        trace.first_token(now, breakdown);
    }
}

/// Tells a client that its generation started, once, with what came from a cache.
fn announce(inner: &mut Inner, id: SessionId, cached: usize) {
    if let Some(listener) = inner.listeners.get_mut(&id).filter(|l| !l.announced) {
        listener.announced = true;
        if let Some(trace) = &mut listener.client.trace {
            let kept = inner.scheduler.directory();
            trace.restored(kept.is_enabled().then(|| kept.payload().name()), cached);
        }
        let cached_tokens = u32::try_from(cached).unwrap_or(u32::MAX);
        let _ = listener.client.sender.send(GenEvent::Started { cached_tokens }); // a closed one is cancelled by its owner
    }
}

fn send(inner: &mut Inner, id: SessionId, event: GenEvent) {
    // Where the chain broke before it said what was restored, all was computed.
    announce(inner, id, 0);
    if let Some(listener) = inner.listeners.get_mut(&id) {
        listener.tokens += 1;
        let _ = listener.client.sender.send(event); // a closed one is cancelled by its owner
    }
}

/// The API's error for a class of the chain.
fn api_error(class: ErrorClass, message: String) -> ApiError {
    match class {
        ErrorClass::InvalidRequest => ApiError::new(Api::InvalidRequest, message),
        ErrorClass::Unsupported => ApiError::new(Api::NotImplemented, message),
        ErrorClass::Backend => ApiError::new(Api::Backend, message),
        ErrorClass::Io | ErrorClass::Protocol => ApiError::new(Api::Io, message),
        ErrorClass::Timeout => ApiError::new(Api::Timeout, message).with_retry_after(RETRY_AFTER),
        ErrorClass::Busy | ErrorClass::PeerLost => {
            ApiError::new(Api::Unavailable, message).with_retry_after(RETRY_AFTER)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_of_the_chain_has_its_status_and_body() {
        for (class, status, code) in [
            (ErrorClass::InvalidRequest, 400, None),
            (ErrorClass::Unsupported, 501, Some("not_implemented")),
            (ErrorClass::Backend, 500, Some("backend_error")),
            (ErrorClass::Io, 500, Some("io_error")),
            (ErrorClass::Protocol, 500, Some("io_error")),
            (ErrorClass::Timeout, 503, Some("timeout")),
            (ErrorClass::Busy, 503, Some("unavailable")),
            (ErrorClass::PeerLost, 503, Some("unavailable")),
        ] {
            let error = api_error(class, "stage 2: no".to_owned());
            assert_eq!(error.class.status().as_u16(), status, "{class:?}");
            assert_eq!(error.retry_after.is_some(), status == 503, "{class:?}");
            assert_eq!(error.class.code(), code, "{class:?}");
        }
    }
}
