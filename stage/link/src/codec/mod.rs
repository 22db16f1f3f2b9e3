//! Messages to bytes and back. The pure part works on slices; [`MessageReader`] and [`MessageWriter`] on streams.

mod activations;
mod encode;
mod header;
mod sections;
mod stream;

pub use activations::ActivationDtype;
pub use encode::{encode, wire_len};
pub use stream::{MessageReader, MessageWriter, read_message, write_message};

use header::{Header, Kind};
use zerocopy::FromBytes;

use crate::frame::{
    Activations, ErrorClass, Frame, Prediction, Predictions, RawPrediction, RawRow, Report, Row, Section,
    prediction_flags, row_flags,
};

/// Bytes of a message header.
pub const HEADER_BYTES: usize = 32;
/// Most records in a message.
pub const MAX_RECORDS: u64 = 65_536;
/// Most bytes of sections in a message.
pub const MAX_SECTION_BYTES: u64 = 4 << 20;

/// One message of the link.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// One step of the chain. Costs a credit.
    Frame(Frame),
    /// The answer to a frame. Costs a credit.
    Predictions(Predictions),
    /// So many messages more may be sent.
    Credit(u32),
    /// Asks for a [`Message::Pong`] with the same number.
    Ping(u64),
    /// Answers a ping.
    Pong(u64),
    /// An error of the connection, or one on its way upstream.
    Error(Report),
    /// An orderly end.
    Goodbye,
}

impl Message {
    /// Whether the message costs a credit.
    #[must_use]
    pub fn costs_credit(&self) -> bool {
        matches!(self, Self::Frame(_) | Self::Predictions(_))
    }
}

/// Width and type of the activations of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Floats in a row.
    pub width: u32,
    /// How they travel.
    pub dtype: ActivationDtype,
}

/// What a receiver accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest message in bytes, header included.
    pub max_message_bytes: u64,
    /// When set, a frame with rows must carry activations of exactly this shape.
    pub shape: Option<Shape>,
}

/// The bytes are no message of this protocol, or a message cannot be put into bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    /// The message does not begin as messages do.
    #[error("not a message: it begins with {got:#010x}, not \"SMF1\"; the stream is out of step or not ours")]
    Magic {
        /// The first four bytes.
        got: u32,
    },
    /// A kind this version does not know.
    #[error("unknown message kind {0}")]
    Kind(u8),
    /// Flags this version does not know.
    #[error("unknown flags {got:#x} in {what}")]
    Flags {
        /// Where.
        what: &'static str,
        /// The unknown bits.
        got: u32,
    },
    /// A length above its limit.
    #[error("{what}: {got} is more than the limit of {limit}")]
    TooLarge {
        /// What was measured.
        what: &'static str,
        /// Its size.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// Fields that contradict each other or the protocol.
    #[error("malformed {what}: {why}")]
    Malformed {
        /// Which part.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The slice ends before the message does.
    #[error("the message has {need} bytes, only {got} are there")]
    Truncated {
        /// Bytes of the message, or of its header when that is cut.
        need: u64,
        /// Bytes given.
        got: u64,
    },
    /// A section that stays within stage 0's process.
    #[error("section type {section} is stage 0's own and is never sent")]
    NotSent {
        /// Its type.
        section: u16,
    },
    /// A section that has a number but no implementation, or an unknown one that must be understood.
    #[error("section type {section} is not supported by this version")]
    Unsupported {
        /// Its type.
        section: u16,
    },
}

impl CodecError {
    /// Class under which the peer is told.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Unsupported { .. } => ErrorClass::Unsupported,
            _ => ErrorClass::Protocol,
        }
    }

    pub(crate) fn malformed(what: &'static str, why: impl Into<String>) -> Self {
        Self::Malformed { what, why: why.into() }
    }
}

/// Decodes one message from the start of `bytes`; returns it and the bytes it took.
///
/// # Errors
/// [`CodecError`]; nothing is allocated before the lengths were checked against `limits` and against `bytes`.
pub fn decode(bytes: &[u8], limits: &Limits) -> Result<(Message, usize), CodecError> {
    let truncated = |need: u64| CodecError::Truncated { need, got: bytes.len() as u64 };
    let (head, rest) = bytes.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| truncated(HEADER_BYTES as u64))?;
    let header = Header::parse(head, limits)?;
    let total = header.total();
    let size = usize::try_from(total).map_err(|_| truncated(total))?;
    let rest = rest.get(..size - HEADER_BYTES).ok_or_else(|| truncated(total))?;
    let (meta, payload) = rest.split_at(header.meta_bytes());
    let mut message = decode_meta(&header, meta)?;
    if let (Message::Frame(frame), Some(dtype)) = (&mut message, header.dtype) {
        frame.activations = Activations {
            width: header.width,
            data: activations::from_bytes(dtype, payload, header.records as usize, header.width as usize)?,
        };
    }
    Ok((message, size))
}

/// Decodes sections and records; a frame's activations stay empty.
fn decode_meta(header: &Header, meta: &[u8]) -> Result<Message, CodecError> {
    let (section_bytes, record_bytes) = meta.split_at(header.sections as usize);
    match header.kind {
        Kind::Frame => {
            let sections = sections::decode(section_bytes)?;
            if sections.logprobs.is_some() {
                return Err(CodecError::malformed("frame", "`logprobs` belongs into predictions"));
            }
            let rows = decode_rows(record_bytes)?;
            Ok(Message::Frame(Frame {
                seq: header.seq,
                sections: sections.list,
                rows,
                activations: Default::default(),
            }))
        }
        Kind::Predictions => {
            let sections = sections::decode(section_bytes)?;
            if let Some(section) = sections.list.iter().find(|s| !sections::belongs_to_predictions(s)) {
                let why = format!("section type {} does not belong into predictions", sections::kind_of(section));
                return Err(CodecError::malformed("predictions", why));
            }
            let records = decode_predictions(record_bytes, sections.logprobs)?;
            Ok(Message::Predictions(Predictions { seq: header.seq, sections: sections.list, records }))
        }
        Kind::Credit => match u32::try_from(header.seq) {
            Ok(n) => Ok(Message::Credit(n)),
            Err(_) => Err(CodecError::malformed("credit", format!("a grant of {} is no 32-bit number", header.seq))),
        },
        Kind::Ping => Ok(Message::Ping(header.seq)),
        Kind::Pong => Ok(Message::Pong(header.seq)),
        Kind::Error => {
            let mut sections = sections::decode(section_bytes)?;
            match (sections.list.pop(), sections.list.is_empty(), sections.logprobs) {
                (Some(Section::Report(report)), true, None) => Ok(Message::Error(report)),
                _ => Err(CodecError::malformed("error", "an error carries exactly one section, a report")),
            }
        }
        Kind::Goodbye => Ok(Message::Goodbye),
    }
}

fn decode_rows(bytes: &[u8]) -> Result<Vec<Row>, CodecError> {
    let raw = <[RawRow]>::ref_from_bytes(bytes)
        .map_err(|_| CodecError::malformed("frame", "records of another size than 32 bytes"))?;
    let mut rows = Vec::with_capacity(raw.len());
    for r in raw {
        if r.reserved.get() != 0 {
            return Err(CodecError::malformed("row", format!("reserved field is {}, not 0", r.reserved.get())));
        }
        let row = Row::from(r);
        check_row(&row)?;
        rows.push(row);
    }
    Ok(rows)
}

fn check_row(row: &Row) -> Result<(), CodecError> {
    check_flags("row", row.flags, row_flags::ALL)?;
    check_position("row", row.position)
}

fn check_flags(what: &'static str, flags: u16, known: u16) -> Result<(), CodecError> {
    match flags & !known {
        0 => Ok(()),
        got => Err(CodecError::Flags { what, got: got.into() }),
    }
}

fn check_position(what: &'static str, position: i32) -> Result<(), CodecError> {
    if position < 0 { Err(CodecError::malformed(what, format!("position {position} is negative"))) } else { Ok(()) }
}

const PREDICTION_FLAGS: u16 = prediction_flags::DROPPED | prediction_flags::GRAMMAR_END;

fn decode_predictions(bytes: &[u8], logprobs: Option<&[u8]>) -> Result<Vec<Prediction>, CodecError> {
    let raw = <[RawPrediction]>::ref_from_bytes(bytes)
        .map_err(|_| CodecError::malformed("predictions", "records of another size than 48 bytes"))?;
    let (pairs, rest) = logprobs.unwrap_or_default().as_chunks::<8>();
    let wanted: usize = raw.iter().map(|r| usize::from(r.top.get())).sum();
    if pairs.len() != wanted || !rest.is_empty() {
        let why = format!("{wanted} entries announced, {} bytes given", logprobs.map_or(0, <[u8]>::len));
        return Err(CodecError::malformed("logprobs", why));
    }
    let mut pairs = pairs
        .iter()
        .map(|&[a, b, c, d, e, f, g, h]| (i32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h])));
    let mut records = Vec::with_capacity(raw.len());
    for r in raw {
        check_flags("prediction", r.flags.get(), PREDICTION_FLAGS)?;
        check_position("prediction", r.position.get())?;
        records.push(Prediction {
            session: r.session.get(),
            epoch: r.epoch.get(),
            ordinal: r.ordinal.get(),
            position: r.position.get(),
            token: r.token.get(),
            logprob: r.logprob.get(),
            entropy: r.entropy.get(),
            margin: r.margin.get(),
            mu: r.mu.get(),
            draws: r.draws.get(),
            flags: r.flags.get(),
            top: pairs.by_ref().take(usize::from(r.top.get())).collect(),
        });
    }
    Ok(records)
}
