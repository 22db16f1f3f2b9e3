//! Taking the output of the last layer out of llama.cpp's computation through its evaluation callback.

use std::ffi::{CStr, c_void};

use llama_cpp_sys_2 as sys;

/// Rows of one tensor of the graph, of the last call.
pub(super) struct Capture {
    target: Vec<u8>,
    width: usize,
    /// Values, `rows × width`; the capacity is reserved once.
    pub(super) out: Vec<f32>,
    /// Times the tensor was computed.
    pub(super) hits: u32,
    /// The tensor did not have the expected shape, or had more rows than announced.
    pub(super) wrong: bool,
}

impl Capture {
    pub(super) fn new(target: &str, width: usize, rows: usize) -> Self {
        let out = Vec::with_capacity(width.saturating_mul(rows));
        Self { target: target.as_bytes().to_vec(), width, out, hits: 0, wrong: false }
    }

    pub(super) fn clear(&mut self) {
        self.out.clear();
        self.hits = 0;
        self.wrong = false;
    }

    fn take(&mut self, tensor: *mut sys::ggml_tensor) {
        self.hits += 1;
        // SAFETY: llama.cpp passes a tensor of its graph that is alive during the callback.
        let t = unsafe { &*tensor };
        let rows = t.ne[1].max(0) as usize;
        let dense = t.nb[0] == size_of::<f32>() && t.nb[1] == self.width * size_of::<f32>();
        let count = rows * self.width;
        let fits = self.out.len() + count <= self.out.capacity();
        if t.type_ != sys::GGML_TYPE_F32
            || t.ne[0] != self.width as i64
            || t.ne[2] != 1
            || t.ne[3] != 1
            || !dense
            || !fits
        {
            self.wrong = true;
            return;
        }
        let start = self.out.len();
        self.out.resize(start + count, 0.0);
        // SAFETY: the tensor holds exactly `count` dense floats, as checked, and `out` has room for them.
        unsafe {
            let to = self.out[start..].as_mut_ptr().cast::<c_void>();
            sys::ggml_backend_tensor_get(tensor, to, 0, count * size_of::<f32>());
        }
    }
}

/// llama.cpp's evaluation callback; `user` is a [`Capture`].
pub(super) unsafe extern "C" fn on_eval(tensor: *mut sys::ggml_tensor, ask: bool, user: *mut c_void) -> bool {
    // SAFETY: `user` is the context's capture, which outlives it and is touched by nobody else during `llama_decode`.
    let capture = unsafe { &mut *user.cast::<Capture>() };
    if ask {
        // SAFETY: names are NUL-terminated arrays inside a live tensor.
        let name = unsafe { CStr::from_ptr((*tensor).name.as_ptr()) };
        return name.to_bytes() == capture.target;
    }
    capture.take(tensor);
    // Skips what follows: the norm and the head of a slice that is not the last.
    false
}
