use std::path::Path;

use llama_cpp_sys_2 as sys;

use super::backend;
use super::log::Record;
use super::model::c_path;
use crate::EngineError;

/// Writes a copy of `model` with F32 weights to `out`. With `flash_attn` off and F32 caches it is the setting in which
/// batch shapes hardly move logits, for tests of exactness. The copy is about 32 bits a weight long.
///
/// # Errors
/// [`EngineError::File`] when `model` is not a GGUF file or `out` has no usable path, [`EngineError::Convert`] with
/// llama.cpp's reason.
pub fn to_f32(model: &Path, out: &Path) -> Result<(), EngineError> {
    backend::init()?;
    crate::slice::check_file(model)?;
    let (from, to) = (c_path(model)?, c_path(out)?);
    // SAFETY: returns plain data.
    let mut params = unsafe { sys::llama_model_quantize_default_params() };
    params.ftype = sys::LLAMA_FTYPE_ALL_F32;
    params.allow_requantize = true;
    // SAFETY: paths and parameters live for the call.
    let (code, record) = Record::of(|| unsafe { sys::llama_model_quantize(from.as_ptr(), to.as_ptr(), &params) });
    if code == 0 {
        return Ok(());
    }
    Err(EngineError::Convert { path: model.to_owned(), reason: record.reason() })
}
