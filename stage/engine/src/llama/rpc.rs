//! ggml-RPC: devices in other processes. ggml aborts the process when such a server breaks; so this is for tests and
//! trusted networks, not what stages use between them.

use std::ffi::{CStr, CString, c_char};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::Path;
use std::time::Duration;

use llama_cpp_sys_2 as sys;

use super::backend::{self, Handle};
use crate::EngineError;

const CONNECT: Duration = Duration::from_secs(5);
const NAME: &CStr = c"RPC";

type AddServer = unsafe extern "C" fn(*const c_char) -> sys::ggml_backend_reg_t;
type StartServer = unsafe extern "C" fn(*const c_char, *const c_char, usize, usize, *mut sys::ggml_backend_dev_t);

fn failed(endpoint: &str, reason: impl std::fmt::Display) -> EngineError {
    EngineError::Rpc { endpoint: endpoint.to_owned(), reason: reason.to_string() }
}

fn function(endpoint: &str, name: &CStr) -> Result<*mut std::ffi::c_void, EngineError> {
    backend::function(backend::registry(NAME), name).ok_or_else(|| {
        let dir = backend::init().map(Path::display).map(|d| d.to_string()).unwrap_or_default();
        failed(endpoint, format!("this build has no RPC backend (libggml-rpc in {dir}); build with GGML_RPC=ON"))
    })
}

/// Devices of a server.
pub(super) fn connect(endpoint: &str) -> Result<Vec<Handle>, EngineError> {
    let name = CString::new(endpoint).map_err(|e| failed(endpoint, e))?;
    let add = function(endpoint, c"ggml_backend_rpc_add_server")?;
    // ggml aborts when nobody answers: look first.
    let address = endpoint.to_socket_addrs().map_err(|e| failed(endpoint, e))?.next();
    let address = address.ok_or_else(|| failed(endpoint, "the name has no address"))?;
    TcpStream::connect_timeout(&address, CONNECT).map_err(|e| failed(endpoint, e))?;
    // SAFETY: the address is that of this function (ggml-rpc.h); the name lives for the call; regs are never freed.
    unsafe {
        let add = std::mem::transmute::<*mut std::ffi::c_void, AddServer>(add);
        let reg = add(name.as_ptr());
        if reg.is_null() {
            return Err(failed(endpoint, "it offers no device"));
        }
        let count = sys::ggml_backend_reg_dev_count(reg);
        Ok((0..count).map(|i| Handle(sys::ggml_backend_reg_dev_get(reg, i))).collect())
    }
}

/// Serves this machine's CPU as a ggml-RPC device on `endpoint` (`host:port`) with `threads` threads. Blocks; returns
/// only when the server cannot go on. ggml's protocol has neither authentication nor encryption, and writes to stdout.
///
/// # Errors
/// [`EngineError::Rpc`] when the backend is not built in, or the server ended.
pub fn serve(endpoint: &str, threads: usize) -> Result<std::convert::Infallible, EngineError> {
    backend::init()?;
    let name = CString::new(endpoint).map_err(|e| failed(endpoint, e))?;
    let start = function(endpoint, c"ggml_backend_rpc_start_server")?;
    let mut device = backend::cpu().0;
    // SAFETY: the address is that of this function (ggml-rpc.h); name and device array live for the call.
    unsafe {
        let start = std::mem::transmute::<*mut std::ffi::c_void, StartServer>(start);
        start(name.as_ptr(), std::ptr::null(), threads, 1, &mut device);
    }
    Err(failed(endpoint, "the server ended; is the address free?"))
}
