//! A loaded model file.

use std::ffi::{CString, c_void};
use std::path::Path;
use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

use super::backend;
use super::log::Record;
use crate::calls::RowOrder;
use crate::{EngineConfig, EngineError, SplitMode};

/// Called with the loaded share, 0 to 1; `false` cancels.
pub(crate) type Progress<'a> = &'a mut dyn FnMut(f32) -> bool;

/// Weights and vocabulary; immutable once loaded.
pub(crate) struct Model {
    ptr: NonNull<sys::llama_model>,
}

// SAFETY: llama.cpp's model is immutable after loading and may be read and freed on any thread.
unsafe impl Send for Model {}
// SAFETY: as above; all uses through `&Model` only read.
unsafe impl Sync for Model {}

pub(crate) fn c_path(path: &Path) -> Result<CString, EngineError> {
    let text = path.to_str().ok_or_else(|| EngineError::file(path, "the path is not UTF-8"))?;
    CString::new(text).map_err(|_| EngineError::file(path, "the path has a NUL byte"))
}

impl Model {
    /// Loads weights to where `config` wants them.
    pub(crate) fn load(
        path: &Path,
        config: &EngineConfig,
        progress: Progress<'_>,
    ) -> Result<(Self, Record), EngineError> {
        let placement = backend::place(config)?;
        let mut devices: Vec<_> = placement.devices.iter().map(|d| d.0).collect();
        // An empty list keeps llama.cpp from choosing devices itself.
        devices.push(std::ptr::null_mut());
        // SAFETY: returns plain data.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.devices = devices.as_mut_ptr();
        params.n_gpu_layers = placement.layers;
        params.use_extra_bufts = config.repack && backend::may_repack();
        params.main_gpu = config.main_gpu.cast_signed();
        params.split_mode = match config.split_mode {
            SplitMode::None => sys::LLAMA_SPLIT_MODE_NONE,
            SplitMode::Layer => sys::LLAMA_SPLIT_MODE_LAYER,
            SplitMode::Row => sys::LLAMA_SPLIT_MODE_ROW,
        };
        params.load_mode = match (config.mmap, config.mlock) {
            (true, false) => sys::LLAMA_LOAD_MODE_AUTO,
            (true, true) => sys::LLAMA_LOAD_MODE_MMAP_MLOCK,
            (false, false) => sys::LLAMA_LOAD_MODE_NONE,
            (false, true) => sys::LLAMA_LOAD_MODE_MLOCK,
        };
        Self::open(path, params, progress)
    }

    /// Loads the vocabulary alone.
    pub(crate) fn load_vocabulary(path: &Path) -> Result<Self, EngineError> {
        backend::init()?;
        let mut devices = [std::ptr::null_mut()];
        // SAFETY: returns plain data.
        let mut params = unsafe { sys::llama_model_default_params() };
        params.devices = devices.as_mut_ptr();
        params.n_gpu_layers = 0;
        params.vocab_only = true;
        Ok(Self::open(path, params, &mut |_| true)?.0)
    }

    fn open(
        path: &Path,
        mut params: sys::llama_model_params,
        progress: Progress<'_>,
    ) -> Result<(Self, Record), EngineError> {
        let file = c_path(path)?;
        let mut watch = Watch { progress, cancelled: false };
        params.progress_callback = Some(on_progress);
        params.progress_callback_user_data = (&raw mut watch).cast::<c_void>();
        // SAFETY: path, device list and callback data live for the call, which is synchronous.
        let (ptr, record) = Record::of(|| unsafe { sys::llama_model_load_from_file(file.as_ptr(), params) });
        match NonNull::new(ptr) {
            Some(ptr) => Ok((Self { ptr }, record)),
            None if watch.cancelled => Err(EngineError::Cancelled { path: path.to_owned() }),
            None => Err(EngineError::Load { path: path.to_owned(), reason: record.reason() }),
        }
    }

    pub(super) fn as_ptr(&self) -> *mut sys::llama_model {
        self.ptr.as_ptr()
    }

    pub(super) fn vocab(&self) -> *const sys::llama_vocab {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_get_vocab(self.as_ptr()) }
    }

    /// Floats in a row between layers.
    pub(crate) fn n_embd(&self) -> usize {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_n_embd(self.as_ptr()) }.max(0) as usize
    }

    /// Floats in a row of an `embd` batch.
    pub(crate) fn n_embd_inp(&self) -> usize {
        // SAFETY: the model is alive.
        unsafe { sys::llama_model_n_embd_inp(self.as_ptr()) }.max(0) as usize
    }

    /// Entries of the vocabulary.
    pub(crate) fn n_vocab(&self) -> usize {
        // SAFETY: the vocabulary lives as long as the model.
        unsafe { sys::llama_vocab_n_tokens(self.vocab()) }.max(0) as usize
    }

    /// Whether `embd` batches carry four positions a row.
    pub(super) fn multi_rope(&self) -> bool {
        // SAFETY: the model is alive.
        let rope = unsafe { sys::llama_model_rope_type(self.as_ptr()) };
        rope == sys::LLAMA_ROPE_TYPE_MROPE || rope == sys::LLAMA_ROPE_TYPE_IMROPE
    }

    /// What llama.cpp does with the order of rows.
    pub(crate) fn row_order(&self) -> RowOrder {
        // SAFETY: the model is alive.
        let (recurrent, hybrid) =
            unsafe { (sys::llama_model_is_recurrent(self.as_ptr()), sys::llama_model_is_hybrid(self.as_ptr())) };
        match (recurrent, hybrid) {
            (_, true) => RowOrder::Grouped,
            (true, false) => RowOrder::Consecutive,
            (false, false) => RowOrder::Kept,
        }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        // SAFETY: the model is ours; contexts hold it through an `Arc` and are gone.
        unsafe { sys::llama_model_free(self.as_ptr()) }
    }
}

struct Watch<'a> {
    progress: Progress<'a>,
    cancelled: bool,
}

unsafe extern "C" fn on_progress(share: f32, user: *mut c_void) -> bool {
    // SAFETY: `user` is the `Watch` of the call that is running.
    let watch = unsafe { &mut *user.cast::<Watch<'_>>() };
    let go_on = (watch.progress)(share);
    watch.cancelled |= !go_on;
    go_on
}
