//! The bytes of one message of each kind, so that the format cannot drift.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{bytes, limits, samples, setup};
use splitmodel_link::codec::{ActivationDtype, Message, decode, encode};
use splitmodel_link::frame::{Activations, Frame, Row};
use splitmodel_link::setup::{Refusal, RefusalCode, Role, write_refusal, write_setup};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(byte).collect()
}

#[track_caller]
fn same(name: &str, got: &[u8], want: &[u8]) {
    let at = got.iter().zip(want).position(|(a, b)| a != b).unwrap_or(got.len().min(want.len()));
    assert!(got == want, "{name} differs at byte {at}: {:02x?}", &got[at..(at + 16).min(got.len())]);
}

const FRAME: &str = "
    534d4631 01 00 0100 0102030405060708 02000000 54010000 10000000 02000000
    0800 0100 00000000
    0100 0100 1a000000 0807060504030201 0d0c0b0a 0f0e 0000 7b2273656564223a317d
    0500 0100 14000000 0807060504030201 0d0c0b0a 40302010 0f0e 0000
    0700 0100 10000000 0807060504030201 0d0c0b0a 0f0e 0000
    0900 0100 08000000 1122334455667788
    0b00 0000 18000000 0100 0200 03000000 04000000 05000000 06000000 07000000
    0c00 0000 16000000 0200 0300 03000000 0900000000000000 02000000 6e6f
    0e00 0000 21000000 0900000000000000 000102030405060708090a0b0c0d0e0f101112131415161718
    e703 0000 03000000 010203
    0200 0100 30000000 0807060504030201 0d0c0b0a 0f0e 0200
        3837363534333231 3c3b3a39 3e3d 0000 0100000000000000 02000000 0300 0000
    0300 0100 20000000 0807060504030201 0d0c0b0a 0f0e 0000 3837363534333231 3c3b3a39 3e3d 0000
    0400 0100 0c000000 2827262524232221 2a29 0000
    0807060504030201 01000000 02000000 03000000 04000000 0500 0100 00000000
    0807060504030201 01000000 03000000 04000000 ffffffff 0500 1f00 00000000
    0000803f 000000c0 0000003f 0000807f";

const PREDICTIONS: &str = "
    534d4631 02 00 0000 0800000000000000 02000000 60000000 00000000 00000000
    0b00 0000 18000000 0100 0200 03000000 04000000 05000000 06000000 07000000
    0900 0100 08000000 0100000000000000
    0d00 0000 10000000 0807060504030201 01000000 2c010000
    0f00 0000 10000000 07000000 000080be 08000000 000080c0
    1817161514131211 02000000 03000000 04000000 05000000 000000bf 0000c03f 0000c07f 0000c07f 06000000 0200 0200
    1817161514131211 02000000 03000000 04000000 05000000 000000bf 0000c03f 0000c07f 0000c07f 06000000 0200 0000";

#[test]
fn one_message_of_each_kind() {
    let golden = [
        FRAME,
        PREDICTIONS,
        "534d4631 03 00 0000 0300000000000000 00000000 00000000 00000000 00000000",
        "534d4631 04 00 0000 0807060504030201 00000000 00000000 00000000 00000000",
        "534d4631 05 00 0000 0807060504030201 00000000 00000000 00000000 00000000",
        "534d4631 06 00 0000 0000000000000000 00000000 20000000 00000000 00000000
         0c00 0000 18000000 0200 0300 ffffffff 0900000000000000 04000000 6c6f7374",
        "534d4631 07 00 0000 0000000000000000 00000000 00000000 00000000 00000000",
    ];
    for ((name, message), golden) in samples().iter().zip(golden) {
        let golden = hex(golden);
        same(name, &bytes(message), &golden);
        let (back, _) = decode(&golden, &limits()).unwrap();
        same(name, &bytes(&back), &golden);
    }
}

#[test]
fn a_frame_in_f16() {
    let activations = Activations { width: 3, data: vec![1.0, -2.0, 0.25, 0.0, 0.0, 0.0] };
    let frame = Message::Frame(Frame { rows: vec![Row::default(); 2], activations, ..Frame::default() });
    // 2.0 lies at 2^14 when divided by 2^-13; zeros have the scale 1.
    let golden = hex("
        534d4631 01 00 0200 0000000000000000 02000000 00000000 14000000 03000000
        0000000000000000 00000000 00000000 00000000 00000000 0000 0000 00000000
        0000000000000000 00000000 00000000 00000000 00000000 0000 0000 00000000
        00000039 0070 00f4 0068
        0000803f 0000 0000 0000");
    same("f16 frame", &encode(&frame, ActivationDtype::F16).unwrap(), &golden);
    assert_eq!(decode(&golden, &limits()).unwrap().0, frame);
}

#[test]
fn preface_and_documents() {
    let mut wire = Vec::new();
    common::fuzz::ready(write_setup(&mut wire, &setup(Role::Return, 2))).unwrap();
    let document = r#"{"role":"return","chain":"smol","formation":7,"root":"0123456789abcdef0123456789abcdef","#
        .to_owned()
        + r#""stage":2,"stages":3,"layers":[8,12],"n_layers":12,"model":""#
        + &"ab".repeat(32)
        + r#"","n_embd":4,"activations":"f32","lanes":4,"n_ctx":1024,"n_ubatch":64,"#
        + r#""instance":"00000000000000000000000000000003","cache_generation":0,"credits":4,"#
        + r#""max_message_bytes":16777216,"versions":{"software":"0.1.0","llama_cpp":"b1234"},"features":[]}"#;
    let mut golden = hex("53504c544d444c01 0100 0000 00 000000");
    golden.extend_from_slice(&(document.len() as u32).to_le_bytes());
    golden.extend_from_slice(document.as_bytes());
    same("setup", &wire, &golden);

    let mut wire = Vec::new();
    let refusal =
        Refusal { field: "f".into(), ours: "1".into(), theirs: "2".into(), ..Refusal::new(RefusalCode::Busy, "m") };
    common::fuzz::ready(write_refusal(&mut wire, &refusal)).unwrap();
    let document = br#"{"code":"busy","field":"f","ours":"1","theirs":"2","message":"m"}"#;
    let mut golden = hex("53504c544d444c01 0100 0000 01 000000");
    golden.extend_from_slice(&(document.len() as u32).to_le_bytes());
    golden.extend_from_slice(document);
    same("refusal", &wire, &golden);
}
