//! Thread pools whose idle threads sleep. llama.cpp's own pools are made for each computation; ggml's default pool polls.

use std::ptr::NonNull;

use llama_cpp_sys_2 as sys;

use super::backend;

type New = unsafe extern "C" fn(*mut sys::ggml_threadpool_params) -> *mut sys::ggml_threadpool;
type Free = unsafe extern "C" fn(*mut sys::ggml_threadpool);

/// Pools for computations of one row and of several.
pub(super) struct Pools {
    one: NonNull<sys::ggml_threadpool>,
    many: Option<NonNull<sys::ggml_threadpool>>,
    free: Free,
}

impl Pools {
    /// `None` where one thread suffices, or the CPU backend offers no pools.
    pub(super) fn new(one: u32, many: u32) -> Option<Self> {
        if one.max(many) <= 1 {
            return None;
        }
        // The CPU backend is a library loaded at run time: its functions are found by name.
        let cpu = backend::registry(c"CPU");
        let new = backend::function(cpu, c"ggml_threadpool_new")?;
        let free = backend::function(cpu, c"ggml_threadpool_free")?;
        // SAFETY: the addresses are those of these functions (ggml-cpu.h).
        let (new, free) = unsafe {
            (
                std::mem::transmute::<*mut std::ffi::c_void, New>(new),
                std::mem::transmute::<*mut std::ffi::c_void, Free>(free),
            )
        };
        let pool = |threads: u32| {
            // SAFETY: the parameters are initialised by ggml and live for the call.
            NonNull::new(unsafe {
                let mut params = sys::ggml_threadpool_params_default(threads.cast_signed());
                params.poll = 0;
                new(&mut params)
            })
        };
        let one_pool = pool(one)?;
        let mut pools = Self { one: one_pool, many: None, free };
        if many != one {
            pools.many = Some(pool(many)?);
        }
        Some(pools)
    }

    /// Gives the pools to a context.
    ///
    /// # Safety
    /// `context` is alive and is freed before `self`.
    pub(super) unsafe fn attach(&self, context: *mut sys::llama_context) {
        // SAFETY: by the contract of this function.
        unsafe { sys::llama_attach_threadpool(context, self.one.as_ptr(), self.many.unwrap_or(self.one).as_ptr()) }
    }
}

impl Drop for Pools {
    fn drop(&mut self) {
        // SAFETY: the pools are ours and no context uses them any more.
        unsafe {
            (self.free)(self.one.as_ptr());
            if let Some(many) = self.many {
                (self.free)(many.as_ptr());
            }
        }
    }
}
