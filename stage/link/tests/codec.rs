//! Messages to bytes and back.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::from_bytes::{Draw, message};
use common::{bytes, fuzz, limits, samples};
use proptest::prelude::*;
use splitmodel_link::codec::{
    ActivationDtype, CodecError, Limits, MAX_RECORDS, Message, Shape, decode, encode, wire_len,
};
use splitmodel_link::frame::{Activations, ErrorClass, Frame, Row, Section, Target};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_message_survives_a_round(seed in proptest::collection::vec(any::<u8>(), 0..600)) {
        fuzz::structured(&seed);
    }

    #[test]
    fn any_bytes_are_an_error_or_a_message(seed in proptest::collection::vec(any::<u8>(), 0..200)) {
        fuzz::raw(&seed);
    }

    #[test]
    fn flipped_bits_never_panic(
        seed in proptest::collection::vec(any::<u8>(), 0..600),
        flips in proptest::collection::vec(any::<u32>(), 1..9),
    ) {
        let mut wire = bytes(&message(&mut Draw(&seed)));
        for flip in flips {
            let bit = flip as usize % (wire.len() * 8);
            wire[bit / 8] ^= 1 << (bit % 8);
        }
        fuzz::raw(&wire);
    }

    #[test]
    fn f16_holds_eleven_bits_beside_the_largest_of_the_row(
        width in 1usize..40,
        exponent in -149i32..127,
        seed in proptest::collection::vec(any::<i32>(), 1..160),
    ) {
        let rows = seed.len() / width;
        prop_assume!(rows > 0);
        let value = |n: &i32| *n as f32 / 2f32.powi(31) * 2f32.powi(exponent);
        let data: Vec<f32> = seed[..rows * width].iter().map(value).collect();
        let activations = Activations { width: width as u32, data: data.clone() };
        let sent = Message::Frame(Frame { rows: vec![Row::default(); rows], activations, ..Frame::default() });
        let wire = encode(&sent, ActivationDtype::F16).unwrap();
        prop_assert_eq!(wire.len(), 32 + rows * (32 + 4 + 2 * width));
        let Message::Frame(got) = decode(&wire, &limits()).unwrap().0 else { panic!("a frame") };
        fuzz::close_in_f16(&data, &got.activations.data, width);
    }
}

#[test]
fn every_truncation_is_an_error() {
    for (name, message) in samples() {
        let wire = bytes(&message);
        assert_eq!(decode(&wire, &limits()).unwrap().1, wire.len());
        for n in 0..wire.len() {
            let e = decode(&wire[..n], &limits()).expect_err(name);
            assert!(matches!(e, CodecError::Truncated { .. }), "{name} cut to {n}: {e}");
            fuzz::ready(splitmodel_link::read_message(&mut &wire[..n], &limits())).expect_err(name);
        }
    }
}

#[test]
fn what_follows_a_message_is_left_alone() {
    let wire: Vec<u8> = samples().iter().flat_map(|(_, m)| bytes(m)).collect();
    let mut rest = &wire[..];
    for (name, message) in samples() {
        let (got, size) = decode(rest, &limits()).unwrap();
        assert_eq!(bytes(&got), bytes(&message), "{name}");
        rest = &rest[size..];
    }
    assert!(rest.is_empty());
}

#[test]
fn special_values_travel_in_both_types() {
    let data = vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 24_800.0, 1.0, f32::MAX, 1e-45, f32::MIN];
    for width in [1, 3, 9] {
        let rows = data.len() / width;
        let activations = Activations { width: width as u32, data: data.clone() };
        let sent = Message::Frame(Frame { rows: vec![Row::default(); rows], activations, ..Frame::default() });
        for dtype in [ActivationDtype::F32, ActivationDtype::F16] {
            let wire = encode(&sent, dtype).unwrap();
            let Message::Frame(got) = decode(&wire, &limits()).unwrap().0 else { panic!("a frame") };
            fuzz::close_in_f16(&data, &got.activations.data, width);
            if dtype == ActivationDtype::F32 {
                let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&data), bits(&got.activations.data));
            }
        }
    }
}

#[test]
fn f16_refuses_a_scale_that_is_none() {
    let activations = Activations { width: 1, data: vec![1.0, 1.0] };
    let sent = Message::Frame(Frame { rows: vec![Row::default(); 2], activations, ..Frame::default() });
    let wire = encode(&sent, ActivationDtype::F16).unwrap();
    let second = wire.len() - 6;
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut wire = wire.clone();
        wire[second..second + 4].copy_from_slice(&scale.to_le_bytes());
        let e = decode(&wire, &limits()).unwrap_err();
        assert!(e.to_string().contains("row 1"), "{e}");
        fuzz::raw(&wire);
    }
}

/// A field of the sample frame's header overwritten, and the error it must give.
#[test]
fn contradicting_headers_are_refused() {
    let (_, sample) = samples().swap_remove(0);
    let good = bytes(&sample);
    type Case = (usize, &'static [u8], fn(&CodecError) -> bool);
    let cases: [Case; 12] = [
        (0, b"HTTP", |e| matches!(e, CodecError::Magic { .. })),
        (4, &[0], |e| matches!(e, CodecError::Kind(0))),
        (4, &[8], |e| matches!(e, CodecError::Kind(8))),
        (5, &[1], |e| matches!(e, CodecError::Flags { .. })),
        (6, &[3], |e| matches!(e, CodecError::Malformed { .. })),
        (6, &[0], |e| matches!(e, CodecError::Malformed { .. })),
        (16, &[0xff; 4], |e| matches!(e, CodecError::TooLarge { limit: MAX_RECORDS, .. })),
        (16, &[3], |e| matches!(e, CodecError::Malformed { .. })),
        (20, &[0xff; 4], |e| matches!(e, CodecError::TooLarge { .. })),
        (24, &[0xff; 4], |e| matches!(e, CodecError::TooLarge { .. })),
        (24, &[15], |e| matches!(e, CodecError::Malformed { .. })),
        (28, &[0xff; 4], |e| matches!(e, CodecError::Malformed { .. })),
    ];
    for (at, new, right) in cases {
        let mut wire = good.clone();
        wire[at..at + new.len()].copy_from_slice(new);
        let e = decode(&wire, &limits()).unwrap_err();
        assert!(right(&e), "at {at}: {e}");
        assert_eq!(e.class(), ErrorClass::Protocol);
    }
}

#[test]
fn kinds_without_a_body_refuse_one() {
    for (name, message) in samples() {
        for at in [16, 20, 24, 28] {
            let mut wire = bytes(&message);
            if wire[at..at + 4] != [0; 4] {
                continue;
            }
            wire[at] = 8;
            wire.resize(wire.len() + 8192, 0);
            decode(&wire, &limits()).expect_err(&format!("{name} with 8 at {at}"));
        }
    }
}

#[test]
fn a_connection_refuses_other_shapes_than_agreed() {
    let frame = |width: u32, floats: usize| {
        let activations = Activations { width, data: vec![1.0; floats] };
        bytes(&Message::Frame(Frame { rows: vec![Row::default(); 2], activations, ..Frame::default() }))
    };
    let agreed = Limits { shape: Some(Shape { width: 4, dtype: ActivationDtype::F32 }), ..limits() };
    assert!(decode(&frame(4, 8), &agreed).is_ok());
    assert!(decode(&bytes(&Message::Frame(Frame::default())), &agreed).is_ok(), "control only");
    for wire in [frame(5, 10), frame(0, 0)] {
        assert!(decode(&wire, &limits()).is_ok());
        assert!(matches!(decode(&wire, &agreed), Err(CodecError::Malformed { .. })));
    }
    let half = Limits { shape: Some(Shape { width: 4, dtype: ActivationDtype::F16 }), ..limits() };
    assert!(matches!(decode(&frame(4, 8), &half), Err(CodecError::Malformed { .. })));
}

/// A frame with one section of these bytes.
fn with_section(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let unknown = Section::Unknown { kind: 1000, flags: 0, body: body.to_vec() };
    let mut wire = bytes(&Message::Frame(Frame { sections: vec![unknown], ..Frame::default() }));
    wire[32..34].copy_from_slice(&kind.to_le_bytes());
    wire[34..36].copy_from_slice(&flags.to_le_bytes());
    wire
}

#[test]
fn sections_without_implementation_are_named() {
    for kind in [6, 10, 16, 17, 18] {
        for flags in [0, 1] {
            let e = decode(&with_section(kind, flags, &[0; 16]), &limits()).unwrap_err();
            assert_eq!(e, CodecError::Unsupported { section: kind });
            assert_eq!(e.class(), ErrorClass::Unsupported);
        }
    }
    let e = decode(&with_section(500, 1, &[]), &limits()).unwrap_err();
    assert_eq!(e, CodecError::Unsupported { section: 500 });
}

#[test]
fn what_stays_within_stage_0_is_not_encoded() {
    let refill = Section::Refill { target: Target::default(), candidates: Vec::new() };
    let message = Message::Frame(Frame { sections: vec![refill], ..Frame::default() });
    let e = encode(&message, ActivationDtype::F32).unwrap_err();
    assert_eq!(e, CodecError::NotSent { section: 18 });
    assert_eq!(wire_len(&message, ActivationDtype::F32, &limits()).unwrap_err(), e);
}

#[test]
fn unknown_plain_sections_pass_unchanged() {
    let wire = with_section(500, 0, b"later");
    let (message, _) = decode(&wire, &limits()).unwrap();
    let Message::Frame(frame) = &message else { panic!("a frame") };
    assert_eq!(frame.sections, [Section::Unknown { kind: 500, flags: 0, body: b"later".to_vec() }]);
    assert_eq!(bytes(&message), wire);
}

#[test]
fn malformed_sections_are_refused() {
    let mut negative = [0; 20];
    negative[15] = 0x80;
    let cases: [(u16, u16, &[u8], &str); 10] = [
        (1, 1, &[0; 15], "a config without its head"),
        (5, 1, &[0; 19], "a short trim"),
        (5, 1, &[0; 21], "a long trim"),
        (5, 1, &negative, "a trim at a negative position"),
        (7, 1, &[1; 16], "a stop with a reserved field"),
        (8, 1, &[0], "a reset with a body"),
        (11, 0, &[0; 23], "short stats"),
        (12, 0, &[0; 20], "a report of class 0"),
        (15, 0, &[0; 8], "log-probabilities in a frame"),
        (500, 2, &[], "an unknown flag"),
    ];
    for (kind, flags, body, what) in cases {
        let e = decode(&with_section(kind, flags, body), &limits()).expect_err(what);
        assert!(matches!(e, CodecError::Malformed { .. } | CodecError::Flags { .. }), "{what}: {e}");
    }
    // Stats may grow.
    assert!(decode(&with_section(11, 0, &[1; 40]), &limits()).is_ok());
}

#[test]
fn what_a_peer_would_refuse_is_not_encoded() {
    let row = |change: fn(&mut Row)| {
        let mut row = Row::default();
        change(&mut row);
        Message::Frame(Frame { rows: vec![row], ..Frame::default() })
    };
    let section = |s| Message::Frame(Frame { sections: vec![s], ..Frame::default() });
    let many = Message::Frame(Frame { rows: vec![Row::default(); 65_537], ..Frame::default() });
    let mismatch = Frame {
        rows: vec![Row::default()],
        activations: Activations { width: 2, data: vec![0.0; 3] },
        ..Frame::default()
    };
    let control = splitmodel_link::frame::Predictions { sections: vec![Section::Reset], ..Default::default() };
    for (what, message) in [
        ("unknown row flag", row(|r| r.flags = 32)),
        ("negative position", row(|r| r.position = -1)),
        ("a known section as unknown", section(Section::Unknown { kind: 5, flags: 0, body: vec![] })),
        ("an unknown section that must be understood", section(Section::Unknown { kind: 50, flags: 1, body: vec![] })),
        ("too many rows", many),
        ("activations of another size", Message::Frame(mismatch)),
        ("control in predictions", Message::Predictions(control)),
        ("too many section bytes", section(Section::Unknown { kind: 50, flags: 0, body: vec![0; 4 << 20] })),
    ] {
        assert!(encode(&message, ActivationDtype::F32).is_err(), "{what}");
    }
}
