//! Hostile lengths do not allocate. Its own binary, because it counts every allocation of the process.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::alloc::System;

use cap::Cap;
use common::fuzz::ready;
use common::{bytes, samples};
use splitmodel_link::codec::{Limits, decode};
use splitmodel_link::read_message;
use splitmodel_link::setup::read_hello;

#[global_allocator]
static ALLOCATED: Cap<System> = Cap::new(System, usize::MAX);

/// Sum of all that `f` allocated.
fn allocated<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = ALLOCATED.total_allocated();
    let out = f();
    (out, ALLOCATED.total_allocated() - before)
}

/// One test, so that no other allocates beside it.
#[test]
fn claimed_lengths_with_short_input_do_not_allocate() {
    let limits = Limits { max_message_bytes: 64 << 20, shape: None };
    let frame = bytes(&samples()[0].1);
    for at in [16, 20, 24, 28] {
        for claim in [0xffff_ffffu32, 0x7fff_ffff, 0x00ff_ffff, 0x0000_ffff] {
            let mut wire = frame.clone();
            wire[at..at + 4].copy_from_slice(&claim.to_le_bytes());
            let (outcome, slice) = allocated(|| decode(&wire, &limits));
            outcome.expect_err("more was claimed than is there");
            let (outcome, stream) = allocated(|| ready(read_message(&mut &wire[..], &limits)));
            outcome.expect_err("more was claimed than is there");
            assert!(slice < 8 << 10, "{slice} bytes for {claim:#x} at {at} of a slice");
            assert!(stream < 256 << 10, "{stream} bytes for {claim:#x} at {at} of a stream");
        }
    }

    // A header whose lengths agree and are allowed, and nothing after it.
    let mut wire = frame[..32].to_vec();
    wire[16..20].copy_from_slice(&1024u32.to_le_bytes());
    wire[20..24].copy_from_slice(&0u32.to_le_bytes());
    wire[24..28].copy_from_slice(&(1024u32 * 4 * 8192).to_le_bytes());
    wire[28..32].copy_from_slice(&8192u32.to_le_bytes());
    let (outcome, stream) = allocated(|| ready(read_message(&mut &wire[..], &limits)));
    outcome.expect_err("nothing follows");
    assert!(stream < 256 << 10, "{stream} bytes for a header alone");
    // With its rows, and without a single float: never more than the limit.
    wire.resize(32 + 1024 * 32, 0);
    let (outcome, stream) = allocated(|| ready(read_message(&mut &wire[..], &limits)));
    outcome.expect_err("no floats follow");
    assert!(stream < 64 << 20, "{stream} bytes for a message of 32 MiB");

    let mut preface = b"SPLTMDL\x01\x01\0\0\0\0\0\0\0".to_vec();
    preface.extend_from_slice(&u32::MAX.to_le_bytes());
    let (outcome, hello) = allocated(|| ready(read_hello(&mut &preface[..])));
    outcome.expect_err("too long");
    assert!(hello < 4 << 10, "{hello} bytes for a preface");
}
