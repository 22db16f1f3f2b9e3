//! The 32 bytes before each message, and the limits checked on them.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{ActivationDtype, CodecError, HEADER_BYTES, Limits, MAX_RECORDS, MAX_SECTION_BYTES, Shape};
use crate::frame::{RawPrediction, RawRow};

pub(super) const MAGIC: u32 = 0x3146_4D53;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawHeader {
    pub(super) magic: U32,
    pub(super) kind: u8,
    pub(super) flags: u8,
    pub(super) dtype: U16,
    pub(super) seq: U64,
    pub(super) records: U32,
    pub(super) sections: U32,
    pub(super) payload: U32,
    pub(super) width: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Frame = 1,
    Predictions = 2,
    Credit = 3,
    Ping = 4,
    Pong = 5,
    Error = 6,
    Goodbye = 7,
}

impl Kind {
    fn from_number(n: u8) -> Result<Self, CodecError> {
        Ok(match n {
            1 => Self::Frame,
            2 => Self::Predictions,
            3 => Self::Credit,
            4 => Self::Ping,
            5 => Self::Pong,
            6 => Self::Error,
            7 => Self::Goodbye,
            _ => return Err(CodecError::Kind(n)),
        })
    }

    pub(super) fn record_bytes(self) -> u64 {
        match self {
            Self::Frame => size_of::<RawRow>() as u64,
            Self::Predictions => size_of::<RawPrediction>() as u64,
            _ => 0,
        }
    }
}

/// A header whose lengths agree with each other and with the limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) dtype: Option<ActivationDtype>,
    pub(super) seq: u64,
    pub(super) records: u32,
    pub(super) sections: u32,
    pub(super) payload: u32,
    pub(super) width: u32,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER_BYTES], limits: &Limits) -> Result<Self, CodecError> {
        let raw: RawHeader = zerocopy::transmute!(*bytes);
        if raw.magic.get() != MAGIC {
            return Err(CodecError::Magic { got: raw.magic.get() });
        }
        let kind = Kind::from_number(raw.kind)?;
        if raw.flags != 0 {
            return Err(CodecError::Flags { what: "message header", got: raw.flags.into() });
        }
        let dtype = ActivationDtype::from_number(raw.dtype.get())?;
        let header = Self {
            kind,
            dtype,
            seq: raw.seq.get(),
            records: raw.records.get(),
            sections: raw.sections.get(),
            payload: raw.payload.get(),
            width: raw.width.get(),
        };
        header.check(limits)?;
        Ok(header)
    }

    pub(super) fn check(&self, limits: &Limits) -> Result<(), CodecError> {
        at_most("records of a message", self.records.into(), MAX_RECORDS)?;
        at_most("section bytes of a message", self.sections.into(), MAX_SECTION_BYTES)?;
        at_most("bytes of a message", self.total(), limits.max_message_bytes)?;
        if self.kind.record_bytes() == 0 && self.records != 0 {
            return Err(CodecError::malformed("message header", format!("{:?} has no records", self.kind)));
        }
        if self.sections != 0 && !matches!(self.kind, Kind::Frame | Kind::Predictions | Kind::Error) {
            return Err(CodecError::malformed("message header", format!("{:?} has no sections", self.kind)));
        }
        if self.seq != 0 && matches!(self.kind, Kind::Error | Kind::Goodbye) {
            return Err(CodecError::malformed("message header", format!("{:?} has no number", self.kind)));
        }
        self.check_payload(limits.shape)
    }

    fn check_payload(&self, shape: Option<Shape>) -> Result<(), CodecError> {
        let bad = |why: String| Err(CodecError::malformed("message header", why));
        let Some(dtype) = self.dtype else {
            if self.payload != 0 || self.width != 0 {
                return bad(format!("payload {} and width {} without a type", self.payload, self.width));
            }
            if self.kind == Kind::Frame && self.records != 0 && shape.is_some() {
                return bad("a frame with rows has no activations".into());
            }
            return Ok(());
        };
        if self.kind != Kind::Frame {
            return bad(format!("{:?} has no payload", self.kind));
        }
        if self.records == 0 || self.width == 0 {
            return bad(format!("activations of {} rows × {} floats", self.records, self.width));
        }
        let want = u64::from(self.records) * dtype.row_bytes(self.width);
        if u64::from(self.payload) != want {
            let (rows, width) = (self.records, self.width);
            return bad(format!("{rows} rows × {width} floats as {dtype} are {want} bytes, not {}", self.payload));
        }
        match shape {
            Some(s) if s.width != self.width || s.dtype != dtype => {
                bad(format!("rows of {} floats as {dtype}, agreed were {} as {}", self.width, s.width, s.dtype))
            }
            _ => Ok(()),
        }
    }

    /// Bytes of the message, header included.
    pub(super) fn total(&self) -> u64 {
        HEADER_BYTES as u64 + self.meta() + u64::from(self.payload)
    }

    fn meta(&self) -> u64 {
        u64::from(self.sections) + u64::from(self.records) * self.kind.record_bytes()
    }

    /// Bytes of sections and records; small once [`Header::check`] passed.
    pub(super) fn meta_bytes(&self) -> usize {
        self.meta() as usize
    }

    pub(super) fn raw(&self) -> RawHeader {
        RawHeader {
            magic: MAGIC.into(),
            kind: self.kind as u8,
            flags: 0,
            dtype: self.dtype.map_or(0, ActivationDtype::number).into(),
            seq: self.seq.into(),
            records: self.records.into(),
            sections: self.sections.into(),
            payload: self.payload.into(),
            width: self.width.into(),
        }
    }
}

fn at_most(what: &'static str, got: u64, limit: u64) -> Result<(), CodecError> {
    if got > limit { Err(CodecError::TooLarge { what, got, limit }) } else { Ok(()) }
}
