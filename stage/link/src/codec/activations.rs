//! Activations as bytes: f32 as they are, or f16 with a scale per row.

use std::fmt;

use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::CodecError;

/// How activations travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActivationDtype {
    /// Bit-exact.
    F32,
    /// Half the bytes: each row is a scale (f32) and its values divided by it (f16).
    F16,
}

impl fmt::Display for ActivationDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
        })
    }
}

/// A scale takes the place of two f16.
const SCALE: usize = 2;

impl ActivationDtype {
    /// Bytes of a row of `width` floats.
    #[must_use]
    pub fn row_bytes(self, width: u32) -> u64 {
        match self {
            Self::F32 => u64::from(width) * 4,
            Self::F16 => 4 + u64::from(width) * 2,
        }
    }

    pub(super) fn number(self) -> u16 {
        match self {
            Self::F32 => 1,
            Self::F16 => 2,
        }
    }

    pub(super) fn from_number(n: u16) -> Result<Option<Self>, CodecError> {
        match n {
            0 => Ok(None),
            1 => Ok(Some(Self::F32)),
            2 => Ok(Some(Self::F16)),
            _ => Err(CodecError::malformed("message header", format!("unknown activation type {n}"))),
        }
    }
}

/// f16 elements of a row on the wire, its scale included.
pub(super) fn f16_row(width: usize) -> usize {
    SCALE + width
}

/// A power of two that brings the largest finite magnitude of `row` to [2^14, 2^15), under the end of f16 (65,504). Scaling
/// itself then loses nothing.
fn scale_of(row: &[f32]) -> f32 {
    let max = row.iter().filter(|x| x.is_finite()).fold(0.0f32, |m, x| m.max(x.abs()));
    if max == 0.0 {
        return 1.0;
    }
    // Exponent of the largest value; subnormal ones count as the smallest normal.
    let exponent = ((max.to_bits() >> 23) as i32 - 127).max(-126);
    f32::from_bits(((exponent - 14).clamp(-126, 126) + 127).cast_unsigned() << 23)
}

/// Largest f16 below 2^15.
const BELOW_2_15: f32 = 32_752.0;

/// Whether the row holds values of the highest exponent of f32.
fn max_exponent(scale: f32) -> bool {
    scale >= 2f32.powi(113)
}

/// Appends the wire form of `rows × width` floats to `out`.
pub(super) fn to_f16(data: &[f32], width: usize, out: &mut Vec<f16>) {
    let mut scaled = vec![0.0f32; width];
    for row in data.chunks_exact(width.max(1)) {
        let scale = scale_of(row);
        let inverse = 1.0 / scale;
        for (s, x) in scaled.iter_mut().zip(row) {
            *s = x * inverse;
        }
        if max_exponent(scale) {
            // Rounding up would give 2^15, which times this scale is no f32 any more.
            scaled.iter_mut().filter(|s| s.is_finite()).for_each(|s| *s = s.clamp(-BELOW_2_15, BELOW_2_15));
        }
        let start = out.len();
        out.resize(start + f16_row(width), f16::ZERO);
        let (head, values) = out[start..].split_at_mut(SCALE);
        head.as_mut_bytes().copy_from_slice(&scale.to_le_bytes());
        values.convert_from_f32_slice(&scaled);
    }
}

/// Converts whole wire rows into `out`; `first` is the number of the first row, for the error.
pub(super) fn from_f16(wire: &[f16], width: usize, first: usize, out: &mut [f32]) -> Result<(), CodecError> {
    for (i, (row, floats)) in wire.chunks_exact(f16_row(width)).zip(out.chunks_exact_mut(width)).enumerate() {
        let (head, values) = row.split_at(SCALE);
        let scale = f32::read_from_bytes(head.as_bytes()).unwrap_or(f32::NAN);
        if !(scale.is_finite() && scale > 0.0) {
            let why = format!("scale {scale} of row {} is no positive number", first + i);
            return Err(CodecError::malformed("activations", why));
        }
        values.convert_to_f32_slice(floats);
        for x in floats {
            *x *= scale;
        }
    }
    Ok(())
}

/// Decodes a payload whose length was checked.
pub(super) fn from_bytes(
    dtype: ActivationDtype,
    payload: &[u8],
    rows: usize,
    width: usize,
) -> Result<Vec<f32>, CodecError> {
    let mut data = vec![0.0f32; rows * width];
    match dtype {
        ActivationDtype::F32 => data.as_mut_bytes().copy_from_slice(payload),
        ActivationDtype::F16 => {
            let mut wire = vec![f16::ZERO; rows * f16_row(width)];
            wire.as_mut_bytes().copy_from_slice(payload);
            from_f16(&wire, width, 0, &mut data)?;
        }
    }
    Ok(data)
}
