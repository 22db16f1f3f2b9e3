//! Any bytes as the beginning of a GGUF file: header, tokenizer, facts and packages.
#![no_main]
#![allow(dead_code, reason = "each target uses a part of what the tests share")]

#[path = "../../stage/gguf/tests/common/fuzz.rs"]
mod fuzz;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::header(bytes));
