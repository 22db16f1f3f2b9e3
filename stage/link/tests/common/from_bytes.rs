//! Any message, drawn from any bytes: used by the fuzz targets and by the tests.

use splitmodel_link::codec::Message;
use splitmodel_link::frame::{
    Activations, Candidate, ErrorClass, Frame, Prediction, Predictions, Report, Row, Section, StageStats, Target,
    row_flags,
};

/// Takes values off the front of bytes; zeros when they are used up.
pub struct Draw<'a>(pub &'a [u8]);

impl Draw<'_> {
    pub fn array<const N: usize>(&mut self) -> [u8; N] {
        let n = self.0.len().min(N);
        let (head, rest) = self.0.split_at(n);
        self.0 = rest;
        let mut all = [0; N];
        all[..n].copy_from_slice(head);
        all
    }

    pub fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub fn f32(&mut self) -> f32 {
        f32::from_le_bytes(self.array())
    }

    fn position(&mut self) -> i32 {
        (self.u32() >> 1).cast_signed()
    }

    /// Up to `max - 1` bytes.
    fn bytes(&mut self, max: u8) -> Vec<u8> {
        let n = usize::from(self.u8() % max);
        (0..n).map(|_| self.u8()).collect()
    }

    fn list<T>(&mut self, max: u8, one: impl Fn(&mut Self) -> T) -> Vec<T> {
        let n = self.u8() % max;
        (0..n).map(|_| one(self)).collect()
    }
}

pub fn message(d: &mut Draw<'_>) -> Message {
    match d.u8() % 8 {
        0 | 1 => Message::Frame(frame(d)),
        2 => Message::Predictions(predictions(d)),
        3 => Message::Credit(d.u32()),
        4 => Message::Ping(d.u64()),
        5 => Message::Pong(d.u64()),
        6 => Message::Error(report(d)),
        _ => Message::Goodbye,
    }
}

fn frame(d: &mut Draw<'_>) -> Frame {
    let (seq, sections, rows) = (d.u64(), d.list(6, |d| section(d, true)), d.list(6, row));
    let width = u32::from(d.u8() % 9);
    let floats = rows.len() * width as usize;
    let activations = match floats {
        0 => Activations::default(),
        _ => Activations { width, data: (0..floats).map(|_| d.f32()).collect() },
    };
    Frame { seq, sections, rows, activations }
}

fn row(d: &mut Draw<'_>) -> Row {
    Row {
        session: d.u64(),
        epoch: d.u32(),
        ordinal: d.u32(),
        position: d.position(),
        token: d.u32().cast_signed(),
        lane: d.u16(),
        flags: d.u16() & row_flags::ALL,
    }
}

fn predictions(d: &mut Draw<'_>) -> Predictions {
    Predictions { seq: d.u64(), sections: d.list(6, |d| section(d, false)), records: d.list(6, prediction) }
}

fn prediction(d: &mut Draw<'_>) -> Prediction {
    Prediction {
        session: d.u64(),
        epoch: d.u32(),
        ordinal: d.u32(),
        position: d.position(),
        token: d.u32().cast_signed(),
        logprob: d.f32(),
        entropy: d.f32(),
        margin: d.f32(),
        mu: d.f32(),
        draws: d.u32(),
        flags: d.u16() & 3,
        top: d.list(5, |d| (d.u32().cast_signed(), d.f32())),
    }
}

fn section(d: &mut Draw<'_>, control: bool) -> Section {
    let kinds = if control { 13 } else { 6 };
    match d.u8() % kinds {
        0 => Section::Probe(d.u64()),
        1 => Section::Stats(StageStats {
            version: d.u16(),
            stage: d.u16(),
            rows: d.u32(),
            wait_us: d.u32(),
            compute_us: d.u32(),
            encode_us: d.u32(),
            lanes: d.u32(),
        }),
        2 => Section::Report(report(d)),
        3 => Section::Trace { session: d.u64(), context: d.array() },
        4 => Section::Unknown { kind: d.u16().max(19), flags: 0, body: d.bytes(40) },
        5 => Section::Restored { session: d.u64(), epoch: d.u32(), length: d.u32() },
        6 => Section::Config { target: target(d), json: d.bytes(40) },
        7 => Section::Trim { target: target(d), position: d.position() },
        8 => Section::Stop(target(d)),
        9 => Section::Restore { target: target(d), candidates: (0..d.u8() % 9).map(|_| candidate(d)).collect() },
        10 => Section::Record { target: target(d), resident: candidate(d) },
        11 => Section::Evict { page: d.u64(), slot: d.u16() },
        _ => Section::Reset,
    }
}

fn candidate(d: &mut Draw<'_>) -> Candidate {
    Candidate { page: d.u64(), length: 1 + d.u32() % i32::MAX as u32, slot: d.u16() }
}

fn target(d: &mut Draw<'_>) -> Target {
    Target { session: d.u64(), epoch: d.u32(), lane: d.u16() }
}

fn report(d: &mut Draw<'_>) -> Report {
    Report {
        stage: d.u16(),
        class: ErrorClass::from_number(1 + u16::from(d.u8() % 8)).unwrap_or(ErrorClass::Io),
        record: Some(d.u32()).filter(|n| *n != u32::MAX),
        session: d.u64(),
        message: String::from_utf8_lossy(&d.bytes(60)).into_owned(),
    }
}
