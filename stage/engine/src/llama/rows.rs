//! Dequantising rows of the embedding table with ggml's own routines, so that they equal what llama.cpp would look up.

use std::ffi::c_void;

use llama_cpp_sys_2 as sys;

/// Turns stored rows into floats.
#[derive(Clone, Copy)]
pub(crate) struct Decoder {
    to_float: unsafe extern "C" fn(*const c_void, *mut f32, i64),
    row_bytes: usize,
    width: usize,
}

impl Decoder {
    /// For rows of `width` values of ggml type number `type_`. `Err` says why there is none.
    pub(crate) fn new(type_: u32, width: usize) -> Result<Self, String> {
        if type_ >= sys::GGML_TYPE_COUNT {
            return Err(format!("ggml type {type_} is unknown"));
        }
        // SAFETY: the type is below the count; the traits are static.
        let traits = unsafe { &*sys::ggml_get_type_traits(type_) };
        let block = usize::try_from(traits.blck_size).unwrap_or(0);
        if block == 0 || traits.type_size == 0 || width == 0 || !width.is_multiple_of(block) {
            return Err(format!("rows of {width} values cannot be of ggml type {type_} (blocks of {block})"));
        }
        let row_bytes = (width / block).checked_mul(traits.type_size).ok_or("rows are too long")?;
        let to_float = match traits.to_float {
            Some(f) => f,
            None if type_ == sys::GGML_TYPE_F32 => copy_f32,
            None => return Err(format!("ggml cannot turn type {type_} into floats")),
        };
        Ok(Self { to_float, row_bytes, width })
    }

    /// Bytes of a stored row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Appends the floats of one stored row. `row` must have [`Decoder::row_bytes`] bytes; else nothing happens.
    pub(crate) fn append(&self, row: &[u8], out: &mut Vec<f32>) {
        if row.len() != self.row_bytes {
            return;
        }
        let start = out.len();
        out.resize(start + self.width, 0.0);
        // SAFETY: `row` holds `width / block` whole blocks and `out` has room for `width` floats.
        unsafe { (self.to_float)(row.as_ptr().cast(), out[start..].as_mut_ptr(), self.width as i64) }
    }
}

unsafe extern "C" fn copy_f32(from: *const c_void, to: *mut f32, count: i64) {
    // SAFETY: called by `Decoder::append` only, with `count` floats on both sides.
    unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), count as usize * size_of::<f32>()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(type_: sys::ggml_type, width: usize, bytes: &[u8]) -> Vec<f32> {
        let decoder = Decoder::new(type_, width).unwrap();
        let mut out = vec![7.0];
        decoder.append(bytes, &mut out);
        out
    }

    #[test]
    fn floats_are_copied_and_halves_widened() {
        let bytes: Vec<u8> = [1.5f32, -0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(rows(sys::GGML_TYPE_F32, 2, &bytes), [7.0, 1.5, -0.0]);
        assert_eq!(rows(sys::GGML_TYPE_F16, 2, &[0x00, 0x3c, 0x00, 0xc0]), [7.0, 1.0, -2.0]);
    }

    #[test]
    fn q8_0_rows_are_scaled() {
        let mut block = vec![0x00, 0x38]; // 0.5 in half precision
        block.extend((0..32).map(|i| (i - 16i8) as u8));
        let got = rows(sys::GGML_TYPE_Q8_0, 32, &block);
        let want: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) * 0.5).collect();
        assert_eq!(got[1..], want);
    }

    #[test]
    fn impossible_rows_are_refused() {
        for (type_, width) in [(9999, 32), (sys::GGML_TYPE_Q8_0, 31), (4, 32), (sys::GGML_TYPE_I32, 4), (0, 0)] {
            assert!(Decoder::new(type_, width).is_err(), "{type_} {width}");
        }
    }
}
