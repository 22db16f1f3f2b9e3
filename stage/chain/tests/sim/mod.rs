//! A chain of workers over arithmetic instead of a model. Each cell keeps a hash; what a row gives depends on every cell
//! of its lane and on all stages before, so one wrong cell anywhere changes the text.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use splitmodel_cache::{DiskStore, Fingerprint, Payload, Settings};
use splitmodel_chain::runtime::{Batch, Runtime, RuntimeError};
use splitmodel_chain::schedule::{Op, Sink};
use splitmodel_chain::scheduler::{Event, Limits, Request, Scheduler};
use splitmodel_chain::worker::{Outcome, Place, Worker};
use splitmodel_link::frame::{Frame, Lane, Position, Predictions, Section, SessionId, Token};
use splitmodel_sampling::GenerationConfig;

pub const VOCAB: usize = 48;
pub const EOG: Token = 7;
const WIDTH: usize = 4;
/// Of exact states, and of activations: some, not all that stage 0 notes.
pub const MAX_BYTES: u64 = 1500;

pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

fn to_row(h: u64) -> [f32; WIDTH] {
    [0, 16, 32, 48].map(|s| f32::from(u16::try_from((h >> s) & 0xFFFF).unwrap()))
}

fn from_row(row: &[f32]) -> u64 {
    row.iter().rev().fold(0, |h, x| (h << 16) | u64::from(*x as u16))
}

/// What can be removed of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Any tail.
    Dense,
    /// Any tail, and prefixes are kept as copies.
    Copied,
    /// The whole only.
    Recurrent,
    /// Any tail; but what is left is not what was there before.
    Windowed,
}

impl Memory {
    pub const ALL: [Self; 4] = [Self::Dense, Self::Copied, Self::Recurrent, Self::Windowed];

    /// Whether any part of a prefix can be used.
    pub fn can_be_cut(self) -> bool {
        matches!(self, Self::Dense | Self::Copied)
    }

    /// `settings` for what such lanes can give.
    pub fn settings(self, settings: Settings) -> Settings {
        let payload = match self {
            Self::Dense => Payload::Resident,
            Self::Copied => Payload::Copied,
            Self::Recurrent | Self::Windowed => Payload::Exact,
        };
        Settings { payload, ..settings }
    }
}

/// A slice of the arithmetic model.
pub struct Arithmetic {
    last: bool,
    layer: u64,
    cells: HashMap<Lane, Vec<u64>>,
    out: Vec<f32>,
    logits: HashMap<usize, Vec<f32>>,
    /// Every n-th computation fails.
    pub fail_every: Option<u64>,
    /// So many computations from here on fail.
    pub fail_next: Arc<AtomicU32>,
    pub memory: Memory,
    /// So many states from here on are neither taken nor set.
    pub fail_states: Arc<AtomicU32>,
    steps: u64,
}

impl Arithmetic {
    pub fn new(layer: u64, last: bool) -> Self {
        Self {
            last,
            layer,
            cells: HashMap::new(),
            out: Vec::new(),
            logits: HashMap::new(),
            fail_every: None,
            fail_next: Arc::default(),
            memory: Memory::Dense,
            fail_states: Arc::default(),
            steps: 0,
        }
    }

    pub fn held(&self) -> usize {
        self.cells.values().map(Vec::len).sum()
    }

    fn state_fails(&self, done: &'static str) -> Result<(), RuntimeError> {
        let next = self.fail_states.load(Ordering::Relaxed);
        self.fail_states.store(next.saturating_sub(1), Ordering::Relaxed);
        if next > 0 { Err(RuntimeError::State { done, why: "a test says so" }) } else { Ok(()) }
    }
}

impl Runtime for Arithmetic {
    fn width(&self) -> usize {
        WIDTH
    }
    fn is_last(&self) -> bool {
        self.last
    }
    fn seq_rm(&mut self, lane: Lane, from: Position, to: Position) -> bool {
        assert!(to < 0, "only tails are removed");
        let cells = self.cells.entry(lane).or_default();
        let from = usize::try_from(from).unwrap_or(0);
        if from > 0 && from < cells.len() {
            match self.memory {
                Memory::Dense | Memory::Copied => {}
                Memory::Recurrent => return false,
                Memory::Windowed => cells.iter_mut().for_each(|c| *c ^= 1),
            }
        }
        cells.truncate(from);
        true
    }
    fn seq_cp(&mut self, from: Lane, to: Lane, _: Position, end: Position) {
        let mut cells = self.cells.get(&from).cloned().unwrap_or_default();
        cells.truncate(usize::try_from(end).unwrap_or(usize::MAX));
        self.cells.insert(to, cells);
    }
    fn state(&mut self, lane: Lane, out: &mut Vec<u8>) -> Result<(), RuntimeError> {
        self.state_fails("taken")?;
        out.clear();
        out.extend(self.cells.get(&lane).into_iter().flatten().flat_map(|c| c.to_le_bytes()));
        Ok(())
    }
    fn set_state(&mut self, lane: Lane, state: &[u8]) -> Result<(), RuntimeError> {
        let cells = state.chunks_exact(8).map(|c| u64::from_le_bytes(c.try_into().unwrap()));
        self.cells.insert(lane, cells.collect());
        self.state_fails("set")
    }
    fn clear(&mut self) {
        self.cells.clear();
    }
    fn has_own_caches(&self) -> bool {
        matches!(self.memory, Memory::Copied)
    }
    fn pos_max(&self, lane: Lane) -> Position {
        self.cells.get(&lane).map_or(-1, |c| i32::try_from(c.len()).unwrap() - 1)
    }
    fn embed(&mut self, tokens: &[Token], out: &mut Vec<f32>) -> Result<(), RuntimeError> {
        for &t in tokens {
            out.extend(to_row(mix(1, u64::try_from(t).map_err(|_| RuntimeError::Embedding("media".into()))?)));
        }
        Ok(())
    }
    fn decode(&mut self, batch: Batch<'_>) -> Result<(), RuntimeError> {
        self.out.clear();
        self.logits.clear();
        self.steps += 1;
        let next = self.fail_next.load(Ordering::Relaxed);
        self.fail_next.store(next.saturating_sub(1), Ordering::Relaxed);
        let fails = next > 0 || self.fail_every.is_some_and(|n| self.steps.is_multiple_of(n));
        for i in 0..batch.lanes.len() {
            if fails && i == batch.lanes.len() / 2 {
                return Err(RuntimeError::Decode { code: -3, rows: batch.lanes.len() });
            }
            let cells = self.cells.entry(batch.lanes[i]).or_default();
            assert_eq!(usize::try_from(batch.positions[i]), Ok(cells.len()), "a gap reached the model");
            cells.push(from_row(&batch.input[i * WIDTH..(i + 1) * WIDTH]));
            let h = cells.iter().fold(self.layer + 11, |h, c| mix(h, *c));
            self.out.extend(to_row(h));
            if batch.want[i] {
                let logit = |t: u64| (mix(h, t) % 10_000) as f32 / 1000.0;
                self.logits.insert(i, (0..VOCAB as u64).map(logit).collect());
            }
        }
        Ok(())
    }
    fn activations(&self) -> &[f32] {
        &self.out
    }
    fn logits(&self, row: usize) -> Result<&[f32], RuntimeError> {
        self.logits.get(&row).map(Vec::as_slice).ok_or(RuntimeError::Shape { what: "logits", want: VOCAB, got: 0 })
    }
}

pub struct Shared(pub Arc<Mutex<Vec<Op>>>);
impl Sink for Shared {
    fn record(&mut self, op: Op) {
        self.0.lock().unwrap().push(op);
    }
}

/// A chain whose links hold messages until they are moved by hand.
pub struct Chain {
    pub scheduler: Scheduler,
    /// Makes the worker of a stage.
    make: Box<dyn Fn(usize) -> Worker<Arithmetic>>,
    pub workers: Vec<Worker<Arithmetic>>,
    links: Vec<VecDeque<Frame>>,
    replies: VecDeque<Predictions>,
    pub ops: Vec<Arc<Mutex<Vec<Op>>>>,
    pub fail_next: Vec<Arc<AtomicU32>>,
    pub fail_states: Vec<Arc<AtomicU32>>,
    pub texts: HashMap<SessionId, Vec<Token>>,
    pub ended: HashMap<SessionId, Result<splitmodel_chain::scheduler::Finish, String>>,
    /// Tokens that came from kept prefixes.
    pub restored: HashMap<SessionId, usize>,
}

pub fn limits(lanes: u16, stages: usize, chunk: usize) -> Limits {
    Limits {
        lanes,
        context: 96,
        max_in_flight: stages,
        max_rows: 32,
        prefill_chunk: chunk,
        prefill_chunk_shared: chunk,
        max_queue: 64,
        max_attempts: 5,
        cells: 96 * usize::from(lanes),
        cache: Settings {
            payload: Payload::Resident,
            max_entries: 3,
            min_tokens: 2,
            stride: 8,
            max_records: 2,
            replays: 8,
            activations: false,
            first_page: 1,
        },
    }
}

pub fn request(prompt: Vec<Token>, max_tokens: usize, config: &GenerationConfig) -> Request {
    let config =
        GenerationConfig { prompt_tokens: u32::try_from(prompt.len()).unwrap(), eog: vec![EOG], ..config.clone() };
    let json = serde_json::to_vec(&config).unwrap();
    let fingerprint = config.deterministic().map(|bytes| Fingerprint::of(&bytes));
    Request { prompt, config: json, max_tokens, eog: vec![EOG], fingerprint, ..Request::default() }
}

pub fn greedy() -> GenerationConfig {
    GenerationConfig { temperature: 0.0, ..GenerationConfig::default() }
}

impl Chain {
    pub fn new(stages: u16, limits: Limits) -> Self {
        Self::with(stages, limits, Memory::Dense)
    }

    /// A chain of slices of that kind.
    pub fn with(stages: u16, limits: Limits, memory: Memory) -> Self {
        Self::on_disk(stages, limits, memory, None)
    }

    /// A chain whose stages keep prefixes as files in folders of `disk`, too.
    pub fn on_disk(stages: u16, limits: Limits, memory: Memory, disk: Option<PathBuf>) -> Self {
        let limits = Limits { cache: memory.settings(limits.cache), ..limits };
        let lanes = usize::from(limits.lanes);
        let each = usize::from(stages);
        let ops: Vec<Arc<Mutex<Vec<Op>>>> = std::iter::repeat_with(Arc::default).take(each).collect();
        let fail_next: Vec<Arc<AtomicU32>> = std::iter::repeat_with(Arc::default).take(each).collect();
        let fail_states: Vec<Arc<AtomicU32>> = std::iter::repeat_with(Arc::default).take(each).collect();
        let (log, nexts, states) = (ops.clone(), fail_next.clone(), fail_states.clone());
        let make = move |stage: usize| {
            let place = Place { stage: u16::try_from(stage).unwrap(), stages };
            let mut slice = Arithmetic::new(u64::from(place.stage), place.stage + 1 == stages);
            slice.memory = memory;
            (slice.fail_next, slice.fail_states) = (nexts[stage].clone(), states[stage].clone());
            let mut w = Worker::new(slice, place, lanes, None).with_cache(&limits.cache, MAX_BYTES);
            if let Some(dir) = &disk {
                w = w.with_disk(DiskStore::open(&dir.join(stage.to_string()), "arithmetic", MAX_BYTES).unwrap());
            }
            if limits.cache.activations {
                w = w.with_activations(MAX_BYTES);
            }
            w.set_sink(Some(Box::new(Shared(log[stage].clone()))));
            w
        };
        let workers = (0..each).map(&make).collect();
        let mut chain = Self {
            make: Box::new(make),
            scheduler: Scheduler::new(limits),
            workers,
            links: vec![VecDeque::new(); usize::from(stages)],
            replies: VecDeque::new(),
            ops,
            fail_next,
            fail_states,
            texts: HashMap::new(),
            ended: HashMap::new(),
            restored: HashMap::new(),
        };
        chain.form();
        chain
    }

    pub fn form(&mut self) {
        self.scheduler.formed(request(vec![1], 1, &greedy()));
    }

    /// A stage is another process, without anyone noticing, as none should.
    pub fn forget(&mut self, stage: usize) {
        drop(self.workers.remove(stage)); // its files are its own
        self.workers.insert(stage, (self.make)(stage));
        self.workers[stage].reset();
    }

    /// A stage loses one prefix without anyone noticing.
    pub fn forget_one(&mut self, stage: usize, page: u64, slot: u16) {
        let frame = Frame { sections: vec![Section::Evict { page, slot }], ..Frame::default() };
        let _ = self.workers[stage].step(frame, 0);
    }

    /// All connections break; stages that upstream left forget their lanes.
    pub fn cut(&mut self) {
        self.links.iter_mut().for_each(VecDeque::clear);
        self.replies.clear();
        self.scheduler.lost();
        self.workers.iter_mut().for_each(Worker::reset);
    }

    pub fn submit(&mut self, request: Request) -> SessionId {
        let id = self.scheduler.submit(request).unwrap();
        self.texts.insert(id, Vec::new());
        id
    }

    /// Moves one thing: 0 the scheduler, 1..=n a stage, n+1 the return path. `false` when there was nothing to move.
    pub fn advance(&mut self, which: usize) -> bool {
        if which == 0 {
            let mut events = Vec::new();
            let frame = self.scheduler.next_frame(&mut events);
            self.take(events);
            return frame.map(|f| self.links[0].push_back(f)).is_some();
        }
        if which <= self.workers.len() {
            let Some(frame) = self.links[which - 1].pop_front() else { return false };
            match self.workers[which - 1].step(frame, 0) {
                Outcome::Forward(f) => self.links[which].push_back(f),
                Outcome::Reply(p) => self.replies.push_back(p),
            }
            return true;
        }
        let Some(mut reply) = self.replies.pop_front() else { return false };
        // What frames cost here is chance, and would make runs differ.
        for section in &mut reply.sections {
            if let Section::Stats(s) = section {
                (s.compute_us, s.encode_us) = (0, 0);
            }
        }
        let events = self.scheduler.answered(reply).unwrap();
        self.take(events);
        true
    }

    pub fn places(&self) -> usize {
        self.workers.len() + 2
    }

    fn take(&mut self, events: Vec<Event>) {
        for event in events {
            match event {
                Event::Token(id, p) => self.texts.get_mut(&id).unwrap().push(p.token),
                Event::Finished(id, f) => assert!(self.ended.insert(id, Ok(f)).is_none(), "ended twice"),
                Event::Failed(id, _, m) => assert!(self.ended.insert(id, Err(m)).is_none(), "ended twice"),
                Event::Started(_) | Event::Probed(_) => {}
                Event::Restored(id, n) => assert!(self.restored.insert(id, n).is_none(), "restored twice"),
            }
        }
    }

    pub fn settle(&mut self) {
        while (0..self.places()).map(|w| self.advance(w)).filter(|moved| *moved).count() > 0 {}
    }
}

/// The text of one undisturbed run in a chain of one stage per layer count, alone.
pub fn alone(stages: u16, request: &Request) -> Vec<Token> {
    let mut chain = Chain::new(stages, limits(1, usize::from(stages), 32));
    chain.settle();
    let id = chain.submit(request.clone());
    chain.settle();
    assert!(chain.ended[&id].is_ok());
    chain.texts.remove(&id).unwrap()
}
