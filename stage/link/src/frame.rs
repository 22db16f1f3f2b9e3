//! The content of messages: rows, sections, frames and predictions (docs/wire.md, sections 3 to 6). No I/O.

use zerocopy::little_endian::{F32, I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A generation. Unique in the lifetime of one stage-0 instance.
pub type SessionId = u64;
/// An attempt of a session; raised by stop, rollback and recovery.
pub type Epoch = u32;
/// A KV sequence slot, the same number on every stage.
pub type Lane = u16;
/// Position in a sequence.
pub type Position = i32;
/// A token id; −1 for media rows.
pub type Token = i32;

/// Flags of a [`Row`].
pub mod row_flags {
    /// The last stage predicts the next token from this row.
    pub const WANT: u16 = 1;
    /// With [`WANT`]: log-probabilities too.
    pub const LOGPROBS: u16 = 2;
    /// The frame is one non-causal media chunk.
    pub const EXCLUSIVE: u16 = 4;
    /// Some stage could not compute the row; later stages skip it.
    pub const DROPPED: u16 = 8;
    /// The row belongs to a verification window.
    pub const DRAFT: u16 = 16;
    /// All flags known to this version.
    pub const ALL: u16 = 31;
}

/// Flags of a [`Prediction`].
pub mod prediction_flags {
    /// The row was dropped; there is no token.
    pub const DROPPED: u16 = 1;
    /// The grammar accepts nothing more: the text is complete with this token.
    pub const GRAMMAR_END: u16 = 2;
}

/// Record of a frame on the wire, 32 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawRow {
    /// See [`Row::session`].
    pub session: U64,
    /// See [`Row::epoch`].
    pub epoch: U32,
    /// See [`Row::ordinal`].
    pub ordinal: U32,
    /// See [`Row::position`].
    pub position: I32,
    /// See [`Row::token`].
    pub token: I32,
    /// See [`Row::lane`].
    pub lane: U16,
    /// See [`Row::flags`].
    pub flags: U16,
    /// Zero.
    pub reserved: U32,
}

/// One token of one session, to be computed by every stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// The generation it belongs to.
    pub session: SessionId,
    /// The attempt it belongs to.
    pub epoch: Epoch,
    /// Rises by one with every row sent for this session and epoch.
    pub ordinal: u32,
    /// Authoritative position in the sequence.
    pub position: Position,
    /// Token id, −1 for media.
    pub token: Token,
    /// KV sequence slot.
    pub lane: Lane,
    /// Bits of [`row_flags`].
    pub flags: u16,
}

impl Row {
    /// Whether all of `bits` are set.
    #[must_use]
    pub fn has(&self, bits: u16) -> bool {
        self.flags & bits == bits
    }
}

impl From<Row> for RawRow {
    fn from(r: Row) -> Self {
        Self {
            session: r.session.into(),
            epoch: r.epoch.into(),
            ordinal: r.ordinal.into(),
            position: r.position.into(),
            token: r.token.into(),
            lane: r.lane.into(),
            flags: r.flags.into(),
            reserved: 0.into(),
        }
    }
}

impl From<&RawRow> for Row {
    fn from(r: &RawRow) -> Self {
        Self {
            session: r.session.get(),
            epoch: r.epoch.get(),
            ordinal: r.ordinal.get(),
            position: r.position.get(),
            token: r.token.get(),
            lane: r.lane.get(),
            flags: r.flags.get(),
        }
    }
}

/// Record of a predictions message on the wire, 48 bytes.
#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RawPrediction {
    /// See [`Prediction::session`].
    pub session: U64,
    /// See [`Prediction::epoch`].
    pub epoch: U32,
    /// See [`Prediction::ordinal`].
    pub ordinal: U32,
    /// See [`Prediction::position`].
    pub position: I32,
    /// See [`Prediction::token`].
    pub token: I32,
    /// See [`Prediction::logprob`].
    pub logprob: F32,
    /// See [`Prediction::entropy`].
    pub entropy: F32,
    /// See [`Prediction::margin`].
    pub margin: F32,
    /// See [`Prediction::mu`].
    pub mu: F32,
    /// See [`Prediction::draws`].
    pub draws: U32,
    /// See [`Prediction::flags`].
    pub flags: U16,
    /// Entries of this prediction in the `logprobs` section.
    pub top: U16,
}

/// What the last stage says about one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The generation.
    pub session: SessionId,
    /// The row's epoch.
    pub epoch: Epoch,
    /// The row's ordinal.
    pub ordinal: u32,
    /// The row's position; the predicted token stands at `position + 1`.
    pub position: Position,
    /// The token, or −1 when the row was dropped.
    pub token: Token,
    /// Log-probability of the token in nats, before temperature and penalties.
    pub logprob: f32,
    /// Entropy of the distribution in nats; NaN when not computed.
    pub entropy: f32,
    /// Difference of the two best logits; NaN when not computed.
    pub margin: f32,
    /// Mirostat μ; NaN without mirostat.
    pub mu: f32,
    /// Random draws so far.
    pub draws: u32,
    /// Bits of [`prediction_flags`].
    pub flags: u16,
    /// The most likely tokens with their log-probabilities, best first.
    pub top: Vec<(Token, f32)>,
}

/// Flag of a section: a peer that does not know it must refuse it.
pub const MUST_UNDERSTAND: u16 = 1;

/// Identifies a session's attempt on a lane; the head of most control sections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Target {
    /// The generation.
    pub session: SessionId,
    /// Its attempt.
    pub epoch: Epoch,
    /// Its lane.
    pub lane: Lane,
}

/// What one stage did for one frame (section `stats`); appended by each stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageStats {
    /// Layout version of this record, 1.
    pub version: u16,
    /// Index of the stage.
    pub stage: u16,
    /// Rows computed.
    pub rows: u32,
    /// Time in the engine's queue, µs.
    pub wait_us: u32,
    /// Time in `llama_decode` and sampling, µs.
    pub compute_us: u32,
    /// Time to bring activations out and hand them on, µs.
    pub encode_us: u32,
    /// Lanes in use after the frame.
    pub lanes: u32,
}

/// Class of an error, on the link and at the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum ErrorClass {
    /// The request cannot be served as it is.
    InvalidRequest = 1,
    /// The peer does not implement what was asked.
    Unsupported = 2,
    /// llama.cpp or the device failed.
    Backend = 3,
    /// Disk or network.
    Io = 4,
    /// A deadline passed.
    Timeout = 5,
    /// No capacity now.
    Busy = 6,
    /// The peer broke the protocol.
    Protocol = 7,
    /// A neighbour of the reporting stage is gone.
    PeerLost = 8,
}

impl ErrorClass {
    /// The name, as logs and traces show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::Unsupported => "unsupported",
            Self::Backend => "backend",
            Self::Io => "io",
            Self::Timeout => "timeout",
            Self::Busy => "busy",
            Self::Protocol => "protocol",
            Self::PeerLost => "peer_lost",
        }
    }

    /// The class with this number, if there is one.
    #[must_use]
    pub fn from_number(n: u16) -> Option<Self> {
        use ErrorClass::{Backend, Busy, InvalidRequest, Io, PeerLost, Protocol, Timeout, Unsupported};
        [InvalidRequest, Unsupported, Backend, Io, Timeout, Busy, Protocol, PeerLost]
            .into_iter()
            .find(|c| *c as u16 == n)
    }
}

/// An error or a miss, on its way to stage 0 (section `report`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Stage that reports.
    pub stage: u16,
    /// Class.
    pub class: ErrorClass,
    /// Index of the row in the frame; `None` for the whole frame or connection.
    pub record: Option<u32>,
    /// The session concerned, 0 for none.
    pub session: SessionId,
    /// What happened and what to do, for people.
    pub message: String,
}

/// A resident prefix that a session may begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    /// The resident's number, never used twice in a formation.
    pub page: u64,
    /// Cells to take over, from position 0; at least 1.
    pub length: u32,
    /// Where it is kept: an index of the stage's resident sequences.
    pub slot: u16,
}

/// Most candidates of one restore.
pub const MAX_CANDIDATES: usize = 8;

/// An ordered control section of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Section {
    /// Generation config of a session, as JSON bytes; middle stages forward it unread.
    Config {
        /// The session.
        target: Target,
        /// JSON of the generation config.
        json: Vec<u8>,
    },
    /// Begin a session with the longest of these residents that the stage has; each stage forwards those it has.
    Restore {
        /// The session, whose lane is free.
        target: Target,
        /// Longest first, at most [`MAX_CANDIDATES`].
        candidates: Vec<Candidate>,
    },
    /// Begin a session again at position 0, when another stage has lost what it was to begin with: stage 0 takes the longest of these
    /// prefixes of which it has cells and activations, and answers the session's rows with those as far as they go. For stage 0
    /// alone, which takes it out; it is never sent.
    Refill {
        /// The session, whose lane is free or its own.
        target: Target,
        /// Longest first.
        candidates: Vec<Candidate>,
    },
    /// Keep the first cells of a session's lane as a resident.
    Record {
        /// The session.
        target: Target,
        /// What is kept, and where; what stood there goes.
        resident: Candidate,
    },
    /// Forget a resident.
    Evict {
        /// Its number.
        page: u64,
        /// Where it is kept.
        slot: u16,
    },
    /// What every stage restored; the last stage's answer to a restore.
    Restored {
        /// The session.
        session: SessionId,
        /// Its attempt.
        epoch: Epoch,
        /// Cells of the longest candidate that all stages have; 0 for none.
        length: u32,
    },
    /// Remove cells at and after a position.
    Trim {
        /// The session.
        target: Target,
        /// First position that goes.
        position: Position,
    },
    /// Free the lane.
    Stop(Target),
    /// Free every lane; the first frame of a formation.
    Reset,
    /// Comes back from the last stage unchanged.
    Probe(u64),
    /// Timings of one stage.
    Stats(StageStats),
    /// An error or a miss.
    Report(Report),
    /// W3C trace context of a session.
    Trace {
        /// The session.
        session: SessionId,
        /// Trace id, span id and flags as on the wire.
        context: [u8; 25],
    },
    /// A section this version does not know (never must-understand); forwarded as it is.
    Unknown {
        /// Type number.
        kind: u16,
        /// Flags.
        flags: u16,
        /// Body.
        body: Vec<u8>,
    },
}

/// Rows of activations in memory: `rows × width` floats, row-major.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Activations {
    /// Floats in a row.
    pub width: u32,
    /// The floats.
    pub data: Vec<f32>,
}

/// One step of the chain: one `llama_decode` on every stage.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Frame {
    /// Number of the frame in its formation.
    pub seq: u64,
    /// Control, applied in order before the rows.
    pub sections: Vec<Section>,
    /// The rows.
    pub rows: Vec<Row>,
    /// Activations of the rows; empty as stage 0's scheduler makes the frame.
    pub activations: Activations,
}

/// The answer of the last stage to one frame.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Predictions {
    /// The frame answered.
    pub seq: u64,
    /// Sections that came along: probe, stats, report, trace.
    pub sections: Vec<Section>,
    /// Predictions, in row order.
    pub records: Vec<Prediction>,
}

impl Predictions {
    /// What the stages say of the frame.
    pub fn stats(&self) -> impl Iterator<Item = StageStats> + Clone + '_ {
        self.sections.iter().filter_map(|s| if let Section::Stats(s) = s { Some(*s) } else { None })
    }
}
