//! A context: a model with its KV cache. This is the only place where rows go into llama.cpp and come out of it.

use std::ffi::c_void;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;

use llama_cpp_sys_2 as sys;
use splitmodel_link::frame::{Lane, Position, Token};

use super::capture::{self, Capture};
use super::log::Record;
use super::model::Model;
use super::threads::Pools;
use crate::{CacheType, EngineConfig, EngineError, FlashAttention};

/// Rows of one `llama_decode`.
pub(crate) struct Rows<'a> {
    pub(crate) input: Input<'a>,
    pub(crate) lanes: &'a [Lane],
    pub(crate) positions: &'a [Position],
    /// Rows whose logits are wanted; ignored where the output of a layer is captured.
    pub(crate) want: &'a [bool],
}

#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// `rows × n_embd_inp` floats.
    Embeddings(&'a [f32]),
    /// One id a row.
    Tokens(&'a [Token]),
}

/// Buffers of a batch, as llama.cpp wants them; kept between calls.
struct Scratch {
    seq: Vec<sys::llama_seq_id>,
    seq_ptr: Vec<*mut sys::llama_seq_id>,
    n_seq: Vec<i32>,
    pos: Vec<sys::llama_pos>,
    output: Vec<i8>,
}

impl Scratch {
    fn new(rows: usize, positions: usize) -> Self {
        Self {
            seq: Vec::with_capacity(rows),
            seq_ptr: Vec::with_capacity(rows),
            n_seq: vec![1; rows],
            pos: Vec::with_capacity(rows * positions),
            output: Vec::with_capacity(rows),
        }
    }
}

pub(crate) struct Context {
    ptr: NonNull<sys::llama_context>,
    memory: sys::llama_memory_t,
    /// Where the evaluation callback writes; null without one.
    capture: *mut Capture,
    scratch: Scratch,
    max_rows: usize,
    n_lanes: u32,
    multi_rope: bool,
    n_vocab: usize,
    // Freed after the context, in this order.
    _pools: Option<Pools>,
    _model: Arc<Model>,
}

// SAFETY: the context, its capture and its scratch pointers belong to this value alone; llama.cpp ties none to a thread.
unsafe impl Send for Context {}

impl Context {
    /// A context for `model`, loaded from `path` (for messages). With `capture`, the rows of the tensor of that name are
    /// taken out and the computation ends there.
    pub(crate) fn new(
        model: Arc<Model>,
        path: &Path,
        config: &EngineConfig,
        capture: Option<&str>,
    ) -> Result<(Self, Record), EngineError> {
        let (threads, threads_batch) = config.thread_counts();
        let max_rows = config.n_ubatch as usize;
        // Owned by the raw pointer from here: llama.cpp writes through it while Rust holds the context.
        let capture = capture.map_or(std::ptr::null_mut(), |target| {
            Box::into_raw(Box::new(Capture::new(target, model.n_embd(), max_rows)))
        });
        let mut params = params(config, threads, threads_batch);
        if !capture.is_null() {
            params.cb_eval = Some(capture::on_eval);
            params.cb_eval_user_data = capture.cast::<c_void>();
        }
        // SAFETY: the model is alive and kept so by the `Arc`; the capture outlives the context.
        let (ptr, record) = Record::of(|| unsafe { sys::llama_init_from_model(model.as_ptr(), params) });
        let Some(ptr) = NonNull::new(ptr) else {
            if !capture.is_null() {
                // SAFETY: made above by `Box::into_raw`; nobody else has it.
                drop(unsafe { Box::from_raw(capture) });
            }
            let reason = record.reason();
            return Err(EngineError::Context { path: path.to_owned(), cells: config.n_ctx, reason });
        };
        let pools = Pools::new(threads, threads_batch);
        if let Some(pools) = &pools {
            // SAFETY: `Drop` frees the context before the pools.
            unsafe { pools.attach(ptr.as_ptr()) };
        }
        let multi_rope = model.multi_rope();
        // SAFETY: the context is alive.
        let (memory, batch) = unsafe { (sys::llama_get_memory(ptr.as_ptr()), sys::llama_n_batch(ptr.as_ptr())) };
        let max_rows = max_rows.min(batch as usize);
        let context = Self {
            ptr,
            memory,
            capture,
            scratch: Scratch::new(max_rows, if multi_rope { 4 } else { 1 }),
            max_rows,
            n_lanes: config.lanes,
            multi_rope,
            n_vocab: model.n_vocab(),
            _pools: pools,
            _model: model,
        };
        if context.memory.is_null() {
            let reason = "the model has no KV cache: it is not a text generator".to_owned();
            return Err(EngineError::Context { path: path.to_owned(), cells: config.n_ctx, reason });
        }
        Ok((context, record))
    }

    /// Most rows of a call.
    pub(crate) fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Cells of the KV cache.
    pub(crate) fn cells(&self) -> u32 {
        // SAFETY: the context is alive.
        unsafe { sys::llama_n_ctx(self.ptr.as_ptr()) }
    }

    /// Whether there is such a lane. llama.cpp aborts the process on others.
    pub(crate) fn has_lane(&self, lane: Lane) -> bool {
        u32::from(lane) < self.n_lanes
    }

    /// Runs `llama_decode` and gives its return code. The caller has checked: 1 to `max_rows` rows, slices of equal
    /// length, `Input` of the right width, lanes that exist, no negative position.
    pub(crate) fn decode(&mut self, rows: &Rows<'_>) -> i32 {
        let n = rows.lanes.len();
        let s = &mut self.scratch;
        s.seq.clear();
        s.seq.extend(rows.lanes.iter().map(|&l| sys::llama_seq_id::from(l)));
        s.seq_ptr.clear();
        let seq = s.seq.as_mut_ptr();
        // SAFETY: the offsets stay inside `seq`, which is not touched again before the call.
        s.seq_ptr.extend((0..n).map(|i| unsafe { seq.add(i) }));
        s.pos.clear();
        s.pos.extend_from_slice(rows.positions);
        let (mut token, mut embd) = (std::ptr::null_mut(), std::ptr::null_mut());
        match rows.input {
            Input::Tokens(t) => token = t.as_ptr().cast_mut(),
            Input::Embeddings(e) => {
                embd = e.as_ptr().cast_mut();
                if self.multi_rope {
                    // Section-major: [t…, y…, x…, z…]; text has t = y = x and z = 0.
                    s.pos.extend_from_slice(rows.positions);
                    s.pos.extend_from_slice(rows.positions);
                    s.pos.resize(4 * n, 0);
                }
            }
        }
        s.output.clear();
        if self.capture.is_null() {
            s.output.extend(rows.want.iter().map(|&w| i8::from(w)));
        } else {
            // Else the last layer drops the rows that nobody wants logits of.
            s.output.resize(n, 1);
            // SAFETY: no computation is running, so the callback does not use it.
            unsafe { (*self.capture).clear() };
        }
        let batch = sys::llama_batch {
            n_tokens: n as i32,
            token,
            embd,
            pos: s.pos.as_mut_ptr(),
            n_seq_id: s.n_seq.as_mut_ptr(),
            seq_id: s.seq_ptr.as_mut_ptr(),
            logits: s.output.as_mut_ptr(),
        };
        // SAFETY: every array has `n` entries (`pos` 4n for M-RoPE) and lives for the call; llama.cpp only reads them.
        unsafe { sys::llama_decode(self.ptr.as_ptr(), batch) }
    }

    /// What the last call captured: values, and whether they are one whole, well-formed result for `rows` rows.
    /// `exact` demands that one computation gave all rows, so that their order is certain.
    pub(crate) fn captured(&self, exact: bool) -> Result<&[f32], &'static str> {
        if self.capture.is_null() {
            return Err("this slice has no captured layer");
        }
        // SAFETY: no computation is running, so the callback does not write.
        let capture = unsafe { &*self.capture };
        match (capture.wrong, capture.hits) {
            (true, _) => Err("the output of the last layer has another shape"),
            (_, 0) => Err("the output of the last layer was not computed"),
            (_, hits) if exact && hits > 1 => Err("the cache forced several computations: the order of rows is lost"),
            _ => Ok(&capture.out),
        }
    }

    /// Logits of row `row` of the last call, which must have wanted them.
    pub(crate) fn logits(&self, row: usize) -> Option<&[f32]> {
        let row = i32::try_from(row).ok()?;
        // SAFETY: llama.cpp checks the index and returns null for a row without logits; the buffer is overwritten by the
        // next call only, which needs `&mut self`.
        unsafe {
            let logits = sys::llama_get_logits_ith(self.ptr.as_ptr(), row);
            (!logits.is_null()).then(|| std::slice::from_raw_parts(logits, self.n_vocab))
        }
    }

    pub(crate) fn seq_rm(&mut self, lane: Lane, from: Position, to: Position) -> bool {
        // SAFETY: the memory lives as long as the context; the caller has checked the lane.
        unsafe { sys::llama_memory_seq_rm(self.memory, lane.into(), from, to) }
    }

    pub(crate) fn seq_cp(&mut self, from: Lane, to: Lane, begin: Position, end: Position) {
        // SAFETY: as above.
        unsafe { sys::llama_memory_seq_cp(self.memory, from.into(), to.into(), begin, end) }
    }

    pub(crate) fn clear(&mut self) {
        // SAFETY: as above.
        unsafe { sys::llama_memory_clear(self.memory, true) }
    }

    /// Puts the state of `lane` into `out`, in place of what was there; `false` when llama.cpp gives none.
    pub(crate) fn state(&mut self, lane: Lane, out: &mut Vec<u8>) -> bool {
        out.clear();
        let ctx = self.ptr.as_ptr();
        // SAFETY: the context is alive; the caller has checked the lane.
        let size = unsafe { sys::llama_state_seq_get_size(ctx, lane.into()) };
        if out.try_reserve_exact(size).is_err() {
            return false;
        }
        // SAFETY: `out` has room for `size` bytes; llama.cpp writes no more and gives 0 when they do not do.
        let written = unsafe { sys::llama_state_seq_get_data(ctx, out.as_mut_ptr(), size, lane.into()) };
        if written != size {
            return false;
        }
        // SAFETY: llama.cpp has written all of them.
        unsafe { out.set_len(size) };
        size > 0
    }

    /// Puts a state that [`Context::state`] gave into `lane`, in place of what it holds; `false` when llama.cpp has no room.
    pub(crate) fn set_state(&mut self, lane: Lane, state: &[u8]) -> bool {
        // SAFETY: the context is alive, the caller has checked the lane; llama.cpp reads no more than the given bytes.
        let read =
            unsafe { sys::llama_state_seq_set_data(self.ptr.as_ptr(), state.as_ptr(), state.len(), lane.into()) };
        !state.is_empty() && read == state.len()
    }

    pub(crate) fn pos_max(&self, lane: Lane) -> Position {
        // SAFETY: as above.
        unsafe { sys::llama_memory_seq_pos_max(self.memory, lane.into()) }
    }

    pub(crate) fn pos_min(&self, lane: Lane) -> Position {
        // SAFETY: as above.
        unsafe { sys::llama_memory_seq_pos_min(self.memory, lane.into()) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is ours; capture, pools and model are freed after it.
        unsafe {
            sys::llama_free(self.ptr.as_ptr());
            if !self.capture.is_null() {
                drop(Box::from_raw(self.capture));
            }
        }
    }
}

fn params(config: &EngineConfig, threads: u32, threads_batch: u32) -> sys::llama_context_params {
    // SAFETY: returns plain data.
    let mut p = unsafe { sys::llama_context_default_params() };
    p.n_ctx = config.n_ctx;
    p.n_batch = config.n_batch;
    p.n_ubatch = config.n_ubatch;
    p.n_seq_max = config.lanes;
    p.n_threads = threads.cast_signed();
    p.n_threads_batch = threads_batch.cast_signed();
    p.flash_attn_type = match config.flash_attn {
        FlashAttention::Auto => sys::LLAMA_FLASH_ATTN_TYPE_AUTO,
        FlashAttention::On => sys::LLAMA_FLASH_ATTN_TYPE_ENABLED,
        FlashAttention::Off => sys::LLAMA_FLASH_ATTN_TYPE_DISABLED,
    };
    p.type_k = ggml_type(config.cache_type_k);
    p.type_v = ggml_type(config.cache_type_v);
    p.swa_full = config.swa_full;
    p.kv_unified = config.kv_unified;
    p.offload_kqv = true;
    p.no_perf = true;
    p
}

fn ggml_type(t: CacheType) -> sys::ggml_type {
    match t {
        CacheType::F32 => sys::GGML_TYPE_F32,
        CacheType::F16 => sys::GGML_TYPE_F16,
        CacheType::Bf16 => sys::GGML_TYPE_BF16,
        CacheType::Q8_0 => sys::GGML_TYPE_Q8_0,
        CacheType::Q5_1 => sys::GGML_TYPE_Q5_1,
        CacheType::Q5_0 => sys::GGML_TYPE_Q5_0,
        CacheType::Q4_1 => sys::GGML_TYPE_Q4_1,
        CacheType::Q4_0 => sys::GGML_TYPE_Q4_0,
        CacheType::Iq4Nl => sys::GGML_TYPE_IQ4_NL,
    }
}
