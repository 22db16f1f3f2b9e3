//! Everything that calls llama.cpp. The rest of the crate is safe code over these types.
#![allow(unsafe_code, reason = "llama.cpp is reached through its C API")]

pub(crate) mod backend;
mod capture;
pub(crate) mod context;
pub(crate) mod log;
pub(crate) mod model;
pub(crate) mod quantize;
pub(crate) mod rows;
pub(crate) mod rpc;
mod threads;
pub(crate) mod vocab;
