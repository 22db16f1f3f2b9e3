//! Messages to bytes.

use half::f16;
use zerocopy::IntoBytes;

use super::header::{Header, Kind};
use super::{
    ActivationDtype, CodecError, Limits, Message, PREDICTION_FLAGS, activations, check_flags, check_position,
    check_row, sections,
};
use crate::frame::{Activations, Frame, Prediction, Predictions, RawPrediction, RawRow, Section};

/// A message that any receiver with `limits` would take: its bytes on the wire, header included.
///
/// # Errors
/// [`CodecError`] when it cannot be sent: too large, activations that do not fit the rows, unknown flags.
pub fn wire_len(message: &Message, dtype: ActivationDtype, limits: &Limits) -> Result<u64, CodecError> {
    let header = header_of(message, dtype)?;
    header.check(limits)?;
    Ok(header.total())
}

/// Encodes a whole message.
///
/// # Errors
/// As [`wire_len`], without a limit on the size.
pub fn encode(message: &Message, dtype: ActivationDtype) -> Result<Vec<u8>, CodecError> {
    let mut out = Vec::new();
    match encode_head(message, dtype, &mut out)? {
        Some(a) if dtype == ActivationDtype::F16 => {
            let mut wire = Vec::new();
            to_f16(a, &mut wire);
            out.extend_from_slice(wire.as_bytes());
        }
        Some(a) => out.extend_from_slice(a.data.as_bytes()),
        None => {}
    }
    Ok(out)
}

pub(super) fn to_f16(a: &Activations, out: &mut Vec<f16>) {
    activations::to_f16(&a.data, a.width as usize, out);
}

/// Appends header, sections and records to `out`; returns the activations that must follow.
pub(super) fn encode_head<'m>(
    message: &'m Message,
    dtype: ActivationDtype,
    out: &mut Vec<u8>,
) -> Result<Option<&'m Activations>, CodecError> {
    let header = header_of(message, dtype)?;
    header.check(&Limits { max_message_bytes: u64::MAX, shape: None })?;
    out.reserve(super::HEADER_BYTES + header.meta_bytes());
    out.extend_from_slice(header.raw().as_bytes());
    match message {
        Message::Frame(frame) => {
            frame.sections.iter().for_each(|s| sections::encode(s, out));
            for row in &frame.rows {
                out.extend_from_slice(RawRow::from(*row).as_bytes());
            }
            return Ok(header.dtype.map(|_| &frame.activations));
        }
        Message::Predictions(p) => encode_predictions(p, out),
        Message::Error(report) => sections::encode(&Section::Report(report.clone()), out),
        Message::Credit(_) | Message::Ping(_) | Message::Pong(_) | Message::Goodbye => {}
    }
    Ok(None)
}

fn encode_predictions(p: &Predictions, out: &mut Vec<u8>) {
    p.sections.iter().for_each(|s| sections::encode(s, out));
    let entries = p.records.iter().map(|r| r.top.len()).sum();
    if entries > 0 {
        sections::encode_logprobs_head(entries, out);
        for (token, logprob) in p.records.iter().flat_map(|r| &r.top) {
            out.extend_from_slice(&token.to_le_bytes());
            out.extend_from_slice(&logprob.to_le_bytes());
        }
    }
    for record in &p.records {
        out.extend_from_slice(raw_prediction(record).as_bytes());
    }
}

fn raw_prediction(r: &Prediction) -> RawPrediction {
    RawPrediction {
        session: r.session.into(),
        epoch: r.epoch.into(),
        ordinal: r.ordinal.into(),
        position: r.position.into(),
        token: r.token.into(),
        logprob: r.logprob.into(),
        entropy: r.entropy.into(),
        margin: r.margin.into(),
        mu: r.mu.into(),
        draws: r.draws.into(),
        flags: r.flags.into(),
        top: (r.top.len() as u16).into(),
    }
}

fn header_of(message: &Message, dtype: ActivationDtype) -> Result<Header, CodecError> {
    let empty = |kind, seq| Header { kind, dtype: None, seq, records: 0, sections: 0, payload: 0, width: 0 };
    match message {
        Message::Frame(frame) => frame_header(frame, dtype),
        Message::Predictions(p) => {
            if let Some(s) = p.sections.iter().find(|s| !sections::belongs_to_predictions(s)) {
                let why = format!("section type {} does not belong into predictions", sections::kind_of(s));
                return Err(CodecError::malformed("predictions", why));
            }
            let mut entries = 0;
            for r in &p.records {
                check_flags("prediction", r.flags, PREDICTION_FLAGS)?;
                check_position("prediction", r.position)?;
                u16::try_from(r.top.len()).map_err(|_| CodecError::TooLarge {
                    what: "log-probabilities of one prediction",
                    got: r.top.len() as u64,
                    limit: u16::MAX.into(),
                })?;
                entries += r.top.len();
            }
            let bytes = section_bytes(&p.sections)? + sections::logprobs_len(entries);
            Ok(Header {
                records: narrow("records of a message", p.records.len() as u64)?,
                sections: narrow("section bytes of a message", bytes)?,
                ..empty(Kind::Predictions, p.seq)
            })
        }
        Message::Credit(n) => Ok(empty(Kind::Credit, u64::from(*n))),
        Message::Ping(n) => Ok(empty(Kind::Ping, *n)),
        Message::Pong(n) => Ok(empty(Kind::Pong, *n)),
        Message::Error(report) => {
            let bytes = sections::wire_len(&Section::Report(report.clone()))?;
            Ok(Header { sections: narrow("section bytes of a message", bytes)?, ..empty(Kind::Error, 0) })
        }
        Message::Goodbye => Ok(empty(Kind::Goodbye, 0)),
    }
}

fn frame_header(frame: &Frame, dtype: ActivationDtype) -> Result<Header, CodecError> {
    frame.rows.iter().try_for_each(check_row)?;
    let (rows, width, floats) = (frame.rows.len(), frame.activations.width, frame.activations.data.len());
    if floats != 0 && (rows as u64).checked_mul(width.into()) != Some(floats as u64) {
        let why = format!("{floats} floats are not {rows} rows × {width}");
        return Err(CodecError::malformed("activations", why));
    }
    let payload = if floats == 0 { 0 } else { (rows as u64).saturating_mul(dtype.row_bytes(width)) };
    Ok(Header {
        kind: Kind::Frame,
        dtype: (floats != 0).then_some(dtype),
        seq: frame.seq,
        records: narrow("records of a message", rows as u64)?,
        sections: narrow("section bytes of a message", section_bytes(&frame.sections)?)?,
        payload: narrow("payload of a message", payload)?,
        width: if floats == 0 { 0 } else { width },
    })
}

fn section_bytes(list: &[Section]) -> Result<u64, CodecError> {
    list.iter().map(sections::wire_len).sum()
}

fn narrow(what: &'static str, n: u64) -> Result<u32, CodecError> {
    u32::try_from(n).map_err(|_| CodecError::TooLarge { what, got: n, limit: u32::MAX.into() })
}
