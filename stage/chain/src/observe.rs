//! What a stage tells of the sessions it served: for traces. Nothing of it is on the token path but a few additions.

use std::time::{Duration, SystemTime};

use splitmodel_link::frame::{Lane, SessionId, StageStats};

/// W3C trace context of a session as the section `trace` carries it: trace id (16), span id of the request (8), flags (1).
pub type TraceContext = [u8; 25];

/// Work of a stage, summed over frames. A frame counts in full for every session with rows in it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Frames with rows of the session.
    pub frames: u64,
    /// Rows of the session.
    pub rows: u64,
    /// Those frames' time in the engine's queue, µs.
    pub wait_us: u64,
    /// Their time in computation and sampling, µs.
    pub compute_us: u64,
    /// Their time to bring activations out, µs.
    pub encode_us: u64,
}

impl Work {
    fn add(&mut self, rows: usize, stats: &StageStats) {
        self.frames += 1;
        self.rows += rows as u64;
        self.wait_us += u64::from(stats.wait_us);
        self.compute_us += u64::from(stats.compute_us);
        self.encode_us += u64::from(stats.encode_us);
    }
}

/// A session's stay on a stage, told when its lane is freed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stay {
    /// The session.
    pub session: SessionId,
    /// Its lane.
    pub lane: Lane,
    /// Its trace.
    pub context: TraceContext,
    /// When its first frame came.
    pub began: SystemTime,
    /// When its lane was freed.
    pub ended: SystemTime,
    /// What was done for it.
    pub work: Work,
    /// Time in filling its lane with a kept prefix, where that was tried.
    pub restoring: Option<Duration>,
}

/// A session's rows in one frame.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// The session.
    pub session: SessionId,
    /// Its trace.
    pub context: TraceContext,
    /// The frame.
    pub seq: u64,
    /// The session's rows in it.
    pub rows: usize,
    /// When it was queued.
    pub began: SystemTime,
    /// When it was done.
    pub ended: SystemTime,
    /// The frame's timings.
    pub stats: StageStats,
}

/// Takes what a worker tells. Must not block.
pub trait Observer: Send {
    /// A traced session's lane was freed.
    fn stay(&mut self, stay: Stay);

    /// Whether [`Observer::share`] is wanted.
    fn wants_shares(&self) -> bool;

    /// Rows of a traced session were computed.
    fn share(&mut self, share: Share);
}

/// What a lane keeps for its trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Traced {
    context: TraceContext,
    began: SystemTime,
    work: Work,
}

impl Traced {
    pub(crate) fn new(context: TraceContext) -> Self {
        Self { context, began: SystemTime::now(), work: Work::default() }
    }

    /// Counts `rows` rows of `session` in frame `seq`; tells them where that is wanted.
    pub(crate) fn count(
        &mut self,
        session: SessionId,
        (seq, rows): (u64, usize),
        stats: &StageStats,
        observer: &mut dyn Observer,
    ) {
        self.work.add(rows, stats);
        if observer.wants_shares() {
            let ended = SystemTime::now();
            let took = u64::from(stats.wait_us) + u64::from(stats.compute_us) + u64::from(stats.encode_us);
            let began = ended.checked_sub(Duration::from_micros(took)).unwrap_or(ended);
            observer.share(Share { session, context: self.context, seq, rows, began, ended, stats: *stats });
        }
    }

    pub(crate) fn stay(self, session: SessionId, lane: Lane, restoring: Option<Duration>) -> Stay {
        let Self { context, began, work } = self;
        Stay { session, lane, context, began, ended: SystemTime::now(), work, restoring }
    }
}
