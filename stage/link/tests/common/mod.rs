//! Shared by the tests of the link.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod from_bytes;
pub mod fuzz;
pub mod meet;
pub mod pki;

use std::sync::Arc;
use std::time::Duration;

use splitmodel_link::codec::{ActivationDtype, Limits, Message, encode};
use splitmodel_link::connection::{Conditioning, Options};
use splitmodel_link::frame::{
    Activations, Candidate, ErrorClass, Frame, Prediction, Predictions, Report, Row, Section, StageStats, Target,
};
use splitmodel_link::setup::{Agreed, InstanceId, Role, Setup, Side, Versions, check};

pub const ROOT: InstanceId = InstanceId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
pub const WIDTH: u32 = 4;

/// The setup of stage `stage` of a chain of three stages with twelve layers.
pub fn setup(role: Role, stage: u16) -> Setup {
    Setup {
        role,
        chain: "smol".into(),
        formation: 7,
        root: ROOT,
        stage,
        stages: 3,
        layers: [u32::from(stage) * 4, u32::from(stage) * 4 + 4],
        n_layers: 12,
        model: "ab".repeat(32),
        n_embd: WIDTH,
        activations: ActivationDtype::F32,
        lanes: 4,
        n_ctx: 1024,
        n_ubatch: 64,
        instance: InstanceId(u128::from(stage) + 1),
        cache_generation: 0,
        credits: 4,
        max_message_bytes: 16 << 20,
        versions: Versions { software: "0.1.0".into(), llama_cpp: "b1234".into() },
        features: vec![],
    }
}

/// What stage 0 (dialler) and stage 1 (acceptor) agree on over a data connection.
pub fn agreed(change: impl Fn(&mut Setup)) -> (Agreed, Agreed) {
    let (mut a, mut b) = (setup(Role::Data, 0), setup(Role::Data, 1));
    change(&mut a);
    change(&mut b);
    (check(&a, &b, Side::Dialler).unwrap(), check(&b, &a, Side::Acceptor).unwrap())
}

pub fn options(deadline: Duration) -> Options {
    Options { peer_deadline: deadline, send_queue: 2, conditioning: Arc::new(Conditioning::default()) }
}

pub fn limits() -> Limits {
    Limits { max_message_bytes: 16 << 20, shape: None }
}

/// A frame of `rows` rows of [`WIDTH`] floats.
pub fn frame(seq: u64, rows: u32) -> Message {
    let row = |i| Row { session: 1, position: i as i32, token: 5, ..Row::default() };
    let data = (0..rows * WIDTH).map(|i| i as f32 * 0.5).collect();
    Message::Frame(Frame {
        seq,
        sections: vec![],
        rows: (0..rows).map(row).collect(),
        activations: Activations { width: WIDTH, data },
    })
}

pub fn report(message: &str) -> Report {
    Report { stage: 2, class: ErrorClass::Backend, record: Some(3), session: 9, message: message.into() }
}

pub fn prediction(top: Vec<(i32, f32)>) -> Prediction {
    Prediction {
        session: 0x1112_1314_1516_1718,
        epoch: 2,
        ordinal: 3,
        position: 4,
        token: 5,
        logprob: -0.5,
        entropy: 1.5,
        margin: f32::NAN,
        mu: f32::NAN,
        draws: 6,
        flags: 2,
        top,
    }
}

/// One message with everything in it, per kind.
pub fn samples() -> Vec<(&'static str, Message)> {
    let target = Target { session: 0x0102_0304_0506_0708, epoch: 0x0a0b_0c0d, lane: 0x0e0f };
    let stats = StageStats { version: 1, stage: 2, rows: 3, wait_us: 4, compute_us: 5, encode_us: 6, lanes: 7 };
    let resident = Candidate { page: 0x3132_3334_3536_3738, length: 0x393a_3b3c, slot: 0x3d3e };
    let rows = vec![
        Row { session: target.session, epoch: 1, ordinal: 2, position: 3, token: 4, lane: 5, flags: 1 },
        Row { session: target.session, epoch: 1, ordinal: 3, position: 4, token: -1, lane: 5, flags: 31 },
    ];
    let sections = vec![
        Section::Reset,
        Section::Config { target, json: b"{\"seed\":1}".to_vec() },
        Section::Trim { target, position: 0x1020_3040 },
        Section::Stop(target),
        Section::Probe(0x8877_6655_4433_2211),
        Section::Stats(stats),
        Section::Report(report("no")),
        Section::Trace { session: 9, context: std::array::from_fn(|i| i as u8) },
        Section::Unknown { kind: 999, flags: 0, body: vec![1, 2, 3] },
        Section::Restore { target, candidates: vec![resident, Candidate { page: 1, length: 2, slot: 3 }] },
        Section::Record { target, resident },
        Section::Evict { page: 0x2122_2324_2526_2728, slot: 0x292a },
    ];
    let activations = Activations { width: 2, data: vec![1.0, -2.0, 0.5, f32::INFINITY] };
    let restored = Section::Restored { session: target.session, epoch: 1, length: 300 };
    let predictions = Predictions {
        seq: 8,
        sections: vec![Section::Stats(stats), Section::Probe(1), restored],
        records: vec![prediction(vec![(7, -0.25), (8, -4.0)]), prediction(vec![])],
    };
    vec![
        ("frame", Message::Frame(Frame { seq: 0x0807_0605_0403_0201, sections, rows, activations })),
        ("predictions", Message::Predictions(predictions)),
        ("credit", Message::Credit(3)),
        ("ping", Message::Ping(0x0102_0304_0506_0708)),
        ("pong", Message::Pong(0x0102_0304_0506_0708)),
        ("error", Message::Error(Report { record: None, ..report("lost") })),
        ("goodbye", Message::Goodbye),
    ]
}

/// Bytes of a message with f32 activations.
pub fn bytes(message: &Message) -> Vec<u8> {
    encode(message, ActivationDtype::F32).unwrap()
}
