//! Any bytes, read as a message.
#![no_main]
#![allow(dead_code, reason = "each target uses a part of what the tests share")]

#[path = "../../stage/link/tests/common/from_bytes.rs"]
mod from_bytes;
#[path = "../../stage/link/tests/common/fuzz.rs"]
mod fuzz;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::raw(bytes));
