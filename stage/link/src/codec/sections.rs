//! Sections of a message: type, flags, length, body.

use super::{CodecError, check_position};
use crate::frame::{Candidate, ErrorClass, MAX_CANDIDATES, MUST_UNDERSTAND, Report, Section, StageStats, Target};

const HEAD: usize = 8;
const NO_RECORD: u32 = u32::MAX;

mod kind {
    pub(super) const CONFIG: u16 = 1;
    pub(super) const RESTORE: u16 = 2;
    pub(super) const RECORD: u16 = 3;
    pub(super) const EVICT: u16 = 4;
    pub(super) const TRIM: u16 = 5;
    pub(super) const STOP: u16 = 7;
    pub(super) const RESET: u16 = 8;
    pub(super) const PROBE: u16 = 9;
    pub(super) const STATS: u16 = 11;
    pub(super) const REPORT: u16 = 12;
    pub(super) const RESTORED: u16 = 13;
    pub(super) const TRACE: u16 = 14;
    pub(super) const LOGPROBS: u16 = 15;
    pub(super) const REFILL: u16 = 18;
    /// Numbers with a meaning and no implementation: retire, positions, mtp, conditioning.
    pub(super) const LATER: [u16; 4] = [6, 10, 16, 17];
    pub(super) const LAST_KNOWN: u16 = 18;
}

pub(super) fn kind_of(section: &Section) -> u16 {
    match section {
        Section::Config { .. } => kind::CONFIG,
        Section::Restore { .. } => kind::RESTORE,
        Section::Refill { .. } => kind::REFILL,
        Section::Record { .. } => kind::RECORD,
        Section::Evict { .. } => kind::EVICT,
        Section::Restored { .. } => kind::RESTORED,
        Section::Trim { .. } => kind::TRIM,
        Section::Stop(_) => kind::STOP,
        Section::Reset => kind::RESET,
        Section::Probe(_) => kind::PROBE,
        Section::Stats(_) => kind::STATS,
        Section::Report(_) => kind::REPORT,
        Section::Trace { .. } => kind::TRACE,
        Section::Unknown { kind, .. } => *kind,
    }
}

pub(super) fn belongs_to_predictions(section: &Section) -> bool {
    !is_command(section)
}

/// What stage 0 orders; it never comes back.
fn is_command(section: &Section) -> bool {
    matches!(
        section,
        Section::Config { .. }
            | Section::Restore { .. }
            | Section::Refill { .. }
            | Section::Record { .. }
            | Section::Evict { .. }
            | Section::Trim { .. }
            | Section::Stop(_)
            | Section::Reset
    )
}

/// The sections of one message; `logprobs` is kept as bytes until the records are known.
pub(super) struct Decoded<'a> {
    pub(super) list: Vec<Section>,
    pub(super) logprobs: Option<&'a [u8]>,
}

pub(super) fn decode(bytes: &[u8]) -> Result<Decoded<'_>, CodecError> {
    let mut all = Cursor { what: "section header", bytes };
    let mut decoded = Decoded { list: Vec::new(), logprobs: None };
    while !all.bytes.is_empty() {
        let (kind, flags, length) = (all.u16()?, all.u16()?, all.u32()?);
        let body = all.take(length as usize)?;
        match flags & !MUST_UNDERSTAND {
            0 => {}
            got => return Err(CodecError::Flags { what: "section", got: got.into() }),
        }
        if kind == kind::LOGPROBS {
            if decoded.logprobs.replace(body).is_some() {
                return Err(CodecError::malformed("logprobs", "more than one section"));
            }
            continue;
        }
        decoded.list.push(decode_body(kind, flags, body)?);
    }
    Ok(decoded)
}

fn decode_body(kind: u16, flags: u16, body: &[u8]) -> Result<Section, CodecError> {
    let mut c = Cursor { what: name(kind), bytes: body };
    let section = match kind {
        kind::CONFIG => {
            let target = c.target()?;
            Section::Config { target, json: c.rest().to_vec() }
        }
        kind::TRIM => {
            let (session, epoch, position, lane) = (c.u64()?, c.u32()?, c.i32()?, c.u16()?);
            c.zero()?;
            check_position("trim", position)?;
            Section::Trim { target: Target { session, epoch, lane }, position }
        }
        kind::RESTORE => decode_restore(&mut c)?,
        kind::RECORD => {
            let target = c.target()?;
            Section::Record { target, resident: c.candidate()? }
        }
        kind::EVICT => {
            let (page, slot) = (c.u64()?, c.u16()?);
            c.zero()?;
            Section::Evict { page, slot }
        }
        kind::RESTORED => Section::Restored { session: c.u64()?, epoch: c.u32()?, length: c.u32()? },
        kind::STOP => Section::Stop(c.target()?),
        kind::RESET => Section::Reset,
        kind::PROBE => Section::Probe(c.u64()?),
        kind::STATS => {
            let stats = StageStats {
                version: c.u16()?,
                stage: c.u16()?,
                rows: c.u32()?,
                wait_us: c.u32()?,
                compute_us: c.u32()?,
                encode_us: c.u32()?,
                lanes: c.u32()?,
            };
            // Later minors append fields.
            c.rest();
            Section::Stats(stats)
        }
        kind::REPORT => Section::Report(decode_report(&mut c)?),
        kind::TRACE => Section::Trace { session: c.u64()?, context: c.array()? },
        _ if kind == kind::REFILL || kind::LATER.contains(&kind) || flags & MUST_UNDERSTAND != 0 => {
            return Err(CodecError::Unsupported { section: kind });
        }
        _ => Section::Unknown { kind, flags, body: c.rest().to_vec() },
    };
    if !c.bytes.is_empty() {
        return Err(CodecError::malformed(c.what, format!("{} bytes too many", c.bytes.len())));
    }
    Ok(section)
}

fn decode_restore(c: &mut Cursor<'_>) -> Result<Section, CodecError> {
    let (session, epoch, lane, count) = (c.u64()?, c.u32()?, c.u16()?, c.u16()?);
    if usize::from(count) > MAX_CANDIDATES {
        return Err(CodecError::malformed(
            "restore",
            format!("{count} candidates; at most {MAX_CANDIDATES} may be named"),
        ));
    }
    let candidates = (0..count).map(|_| c.candidate()).collect::<Result<_, _>>()?;
    Ok(Section::Restore { target: Target { session, epoch, lane }, candidates })
}

fn decode_report(c: &mut Cursor<'_>) -> Result<Report, CodecError> {
    let (stage, class, record, session, length) = (c.u16()?, c.u16()?, c.u32()?, c.u64()?, c.u32()?);
    let class = ErrorClass::from_number(class)
        .ok_or_else(|| CodecError::malformed("report", format!("unknown error class {class}")))?;
    let text = std::str::from_utf8(c.take(length as usize)?)
        .map_err(|_| CodecError::malformed("report", "the text is not UTF-8"))?;
    let record = (record != NO_RECORD).then_some(record);
    Ok(Report { stage, class, record, session, message: text.to_owned() })
}

fn name(kind: u16) -> &'static str {
    match kind {
        kind::CONFIG => "config",
        kind::RESTORE => "restore",
        kind::RECORD => "record",
        kind::EVICT => "evict",
        kind::RESTORED => "restored",
        kind::TRIM => "trim",
        kind::STOP => "stop",
        kind::RESET => "reset",
        kind::PROBE => "probe",
        kind::STATS => "stats",
        kind::REPORT => "report",
        kind::TRACE => "trace",
        _ => "section",
    }
}

/// Checks that `section` can be decoded by a peer as what it is; returns its bytes, header included.
pub(super) fn wire_len(section: &Section) -> Result<u64, CodecError> {
    match section {
        Section::Trim { position, .. } => check_position("trim", *position)?,
        Section::Restore { candidates, .. } => {
            if candidates.len() > MAX_CANDIDATES {
                return Err(CodecError::malformed("restore", format!("{} candidates", candidates.len())));
            }
            candidates.iter().try_for_each(check_candidate)?;
        }
        Section::Record { resident, .. } => check_candidate(resident)?,
        Section::Refill { .. } => return Err(CodecError::NotSent { section: kind::REFILL }),
        Section::Report(r) if r.record == Some(NO_RECORD) => {
            return Err(CodecError::malformed("report", "record 2³²−1 means none"));
        }
        Section::Unknown { kind, flags, .. } if (1..=kind::LAST_KNOWN).contains(kind) || *flags != 0 => {
            return Err(CodecError::malformed("section", format!("type {kind} with flags {flags} is not unknown")));
        }
        _ => {}
    }
    Ok((HEAD + body_len(section)) as u64)
}

/// A length that a position can count, and more than nothing.
fn check_candidate(c: &Candidate) -> Result<(), CodecError> {
    if c.length == 0 || i32::try_from(c.length).is_err() {
        return Err(CodecError::malformed("candidate", format!("a length of {} cells", c.length)));
    }
    Ok(())
}

fn body_len(section: &Section) -> usize {
    match section {
        Section::Config { json, .. } => 16 + json.len(),
        Section::Restore { candidates, .. } => 16 + 16 * candidates.len(),
        Section::Record { .. } => 32,
        Section::Evict { .. } => 12,
        Section::Restored { .. } => 16,
        Section::Trim { .. } => 20,
        Section::Stop(_) => 16,
        Section::Reset | Section::Refill { .. } => 0,
        Section::Probe(_) => 8,
        Section::Stats(_) => 24,
        Section::Report(r) => 20 + r.message.len(),
        Section::Trace { .. } => 33,
        Section::Unknown { body, .. } => body.len(),
    }
}

/// Appends a section whose length [`wire_len`] accepted.
pub(super) fn encode(section: &Section, out: &mut Vec<u8>) {
    let must = is_command(section) || matches!(section, Section::Probe(_));
    head(kind_of(section), if must { MUST_UNDERSTAND } else { 0 }, body_len(section), out);
    match section {
        Section::Config { target, json } => {
            encode_target(target, out);
            out.extend_from_slice(json);
        }
        Section::Restore { target, candidates } => {
            out.extend_from_slice(&target.session.to_le_bytes());
            out.extend_from_slice(&target.epoch.to_le_bytes());
            out.extend_from_slice(&target.lane.to_le_bytes());
            out.extend_from_slice(&(candidates.len() as u16).to_le_bytes());
            candidates.iter().for_each(|c| encode_candidate(c, out));
        }
        Section::Record { target, resident } => {
            encode_target(target, out);
            encode_candidate(resident, out);
        }
        Section::Evict { page, slot } => {
            out.extend_from_slice(&page.to_le_bytes());
            out.extend_from_slice(&slot.to_le_bytes());
            out.extend_from_slice(&[0; 2]);
        }
        Section::Restored { session, epoch, length } => {
            out.extend_from_slice(&session.to_le_bytes());
            out.extend_from_slice(&epoch.to_le_bytes());
            out.extend_from_slice(&length.to_le_bytes());
        }
        Section::Trim { target, position } => {
            out.extend_from_slice(&target.session.to_le_bytes());
            out.extend_from_slice(&target.epoch.to_le_bytes());
            out.extend_from_slice(&position.to_le_bytes());
            out.extend_from_slice(&target.lane.to_le_bytes());
            out.extend_from_slice(&[0; 2]);
        }
        Section::Stop(target) => encode_target(target, out),
        Section::Reset | Section::Refill { .. } => {}
        Section::Probe(id) => out.extend_from_slice(&id.to_le_bytes()),
        Section::Stats(s) => {
            out.extend_from_slice(&s.version.to_le_bytes());
            out.extend_from_slice(&s.stage.to_le_bytes());
            for n in [s.rows, s.wait_us, s.compute_us, s.encode_us, s.lanes] {
                out.extend_from_slice(&n.to_le_bytes());
            }
        }
        Section::Report(r) => {
            out.extend_from_slice(&r.stage.to_le_bytes());
            out.extend_from_slice(&(r.class as u16).to_le_bytes());
            out.extend_from_slice(&r.record.unwrap_or(NO_RECORD).to_le_bytes());
            out.extend_from_slice(&r.session.to_le_bytes());
            out.extend_from_slice(&(r.message.len() as u32).to_le_bytes());
            out.extend_from_slice(r.message.as_bytes());
        }
        Section::Trace { session, context } => {
            out.extend_from_slice(&session.to_le_bytes());
            out.extend_from_slice(context);
        }
        Section::Unknown { body, .. } => out.extend_from_slice(body),
    }
}

/// Bytes of a `logprobs` section with `entries` pairs, 0 when there is none.
pub(super) fn logprobs_len(entries: usize) -> u64 {
    if entries == 0 { 0 } else { (HEAD + entries * 8) as u64 }
}

pub(super) fn encode_logprobs_head(entries: usize, out: &mut Vec<u8>) {
    head(kind::LOGPROBS, 0, entries * 8, out);
}

fn head(kind: u16, flags: u16, length: usize, out: &mut Vec<u8>) {
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&flags.to_le_bytes());
    out.extend_from_slice(&(length as u32).to_le_bytes());
}

fn encode_target(t: &Target, out: &mut Vec<u8>) {
    out.extend_from_slice(&t.session.to_le_bytes());
    out.extend_from_slice(&t.epoch.to_le_bytes());
    out.extend_from_slice(&t.lane.to_le_bytes());
    out.extend_from_slice(&[0; 2]);
}

fn encode_candidate(c: &Candidate, out: &mut Vec<u8>) {
    out.extend_from_slice(&c.page.to_le_bytes());
    out.extend_from_slice(&c.length.to_le_bytes());
    out.extend_from_slice(&c.slot.to_le_bytes());
    out.extend_from_slice(&[0; 2]);
}

/// Reads little-endian fields off the front of a slice.
struct Cursor<'a> {
    what: &'static str,
    bytes: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], CodecError> {
        let (head, rest) = self.bytes.split_at_checked(n).ok_or_else(|| self.short(n))?;
        self.bytes = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CodecError> {
        let (head, rest) = self.bytes.split_first_chunk::<N>().ok_or_else(|| self.short(N))?;
        self.bytes = rest;
        Ok(*head)
    }

    fn short(&self, need: usize) -> CodecError {
        CodecError::malformed(self.what, format!("{need} bytes needed, {} left", self.bytes.len()))
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    fn u16(&mut self) -> Result<u16, CodecError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, CodecError> {
        self.array().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32, CodecError> {
        self.array().map(i32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, CodecError> {
        self.array().map(u64::from_le_bytes)
    }

    fn zero(&mut self) -> Result<(), CodecError> {
        match self.u16()? {
            0 => Ok(()),
            n => Err(CodecError::malformed(self.what, format!("reserved field is {n}, not 0"))),
        }
    }

    fn candidate(&mut self) -> Result<Candidate, CodecError> {
        let (page, length, slot) = (self.u64()?, self.u32()?, self.u16()?);
        self.zero()?;
        let candidate = Candidate { page, length, slot };
        check_candidate(&candidate)?;
        Ok(candidate)
    }

    fn target(&mut self) -> Result<Target, CodecError> {
        let (session, epoch, lane) = (self.u64()?, self.u32()?, self.u16()?);
        self.zero()?;
        Ok(Target { session, epoch, lane })
    }
}
