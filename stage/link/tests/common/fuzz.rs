//! What must hold for any bytes. The fuzz targets and `fuzz_corpus.rs` run the same functions.

use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::from_bytes::{Draw, message};
use splitmodel_link::codec::{ActivationDtype, Limits, Message, decode, encode, read_message, wire_len};
use splitmodel_link::setup::{Hello, Role, Setup, Side, check, read_hello, write_setup};

const LIMITS: Limits = Limits { max_message_bytes: 1 << 20, shape: None };

/// Runs a future that never waits.
pub fn ready<F: Future>(f: F) -> F::Output {
    match pin!(f).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(out) => out,
        Poll::Pending => panic!("waits although all bytes are there"),
    }
}

/// Any bytes as a message: slices and streams agree, and what was understood survives a round.
pub fn raw(bytes: &[u8]) {
    let from_stream = ready(read_message(&mut &bytes[..], &LIMITS));
    match (decode(bytes, &LIMITS), from_stream) {
        (Err(_), Err(_)) => {}
        (Ok((message, size)), Ok(streamed)) => {
            assert!(size <= bytes.len());
            let again = encode(&message, ActivationDtype::F32).expect("decoded messages can be sent");
            assert_eq!(again, encode(&streamed, ActivationDtype::F32).expect("decoded messages can be sent"));
            same_after_a_round(&message);
        }
        (slice, stream) => panic!("slice: {slice:?}\nstream: {stream:?}"),
    }
}

/// Any message: encodes, decodes to itself, cannot be cut short.
pub fn structured(bytes: &[u8]) {
    same_after_a_round(&message(&mut Draw(bytes)));
}

fn same_after_a_round(message: &Message) {
    let wire = encode(message, ActivationDtype::F32).expect("a valid message");
    assert_eq!(wire_len(message, ActivationDtype::F32, &LIMITS), Ok(wire.len() as u64));
    let (back, size) = decode(&wire, &LIMITS).expect("what was encoded");
    assert_eq!(size, wire.len());
    // Bytes are compared because NaN differs from itself.
    assert_eq!(encode(&back, ActivationDtype::F32).as_ref(), Ok(&wire));
    if wire.len() > 32 {
        decode(&wire[..wire.len() - 1], &LIMITS).expect_err("a byte is missing");
    }
    let half = encode(message, ActivationDtype::F16).expect("a valid message");
    let (back, _) = decode(&half, &LIMITS).expect("what was encoded");
    if let (Message::Frame(a), Message::Frame(b)) = (message, &back) {
        assert_eq!((&a.sections, &a.rows), (&b.sections, &b.rows));
        close_in_f16(&a.activations.data, &b.activations.data, a.activations.width as usize);
    }
}

/// Each row within what f16 with a scale per row can hold.
pub fn close_in_f16(a: &[f32], b: &[f32], width: usize) {
    assert_eq!(a.len(), b.len());
    for (a, b) in a.chunks(width.max(1)).zip(b.chunks(width.max(1))) {
        let max = a.iter().filter(|x| x.is_finite()).fold(0.0f32, |m, x| m.max(x.abs()));
        for (x, y) in a.iter().zip(b) {
            if x.is_finite() {
                // Half a unit of 11 bits, or of the smallest f16 against the largest of the row; f32's own smallest.
                let allowed = (x.abs() / 2048.0).max(max / 2f32.powi(38)).max(f32::MIN_POSITIVE / 2f32.powi(22));
                assert!((x - y).abs() <= allowed, "{x:e} became {y:e} beside {max:e}");
            } else {
                assert!(x.is_nan() && y.is_nan() || x == y, "{x} became {y}");
            }
        }
    }
}

/// Any bytes as preface and document: no panic, and an understood setup survives a round.
pub fn setup(bytes: &[u8]) {
    let Ok(Hello::Setup(setup, _)) = ready(read_hello(&mut &bytes[..])) else { return };
    let mut wire = Vec::new();
    if ready(write_setup(&mut wire, &setup)).is_ok() {
        let Ok(Hello::Setup(back, _)) = ready(read_hello(&mut &wire[..])) else { panic!("what was written") };
        assert_eq!(back, setup);
    }
    let ours = Setup { role: Role::Data, stage: setup.stage.wrapping_add(1), ..(*setup).clone() };
    for side in [Side::Dialler, Side::Acceptor] {
        let there = check(&ours, &setup, side);
        let back = check(&setup, &ours, if side == Side::Dialler { Side::Acceptor } else { Side::Dialler });
        assert_eq!(there.is_ok(), back.is_ok(), "both sides find the same");
        if let Err(refusal) = there {
            assert!(!refusal.message.is_empty() && refusal.message.len() < 4096);
        }
    }
}
