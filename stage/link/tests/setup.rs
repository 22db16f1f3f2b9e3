//! What two stages must have in common.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{ROOT, fuzz, setup};
use proptest::prelude::*;
use splitmodel_link::LinkError;
use splitmodel_link::codec::ActivationDtype;
use splitmodel_link::setup::{
    Formations, Hello, InstanceId, Refusal, RefusalCode, Role, Setup, Side, check, read_hello, write_refusal,
    write_setup,
};

#[test]
fn neighbours_agree() {
    for (role, dialler, acceptor) in [(Role::Data, 0, 1), (Role::Data, 1, 2), (Role::Return, 2, 0)] {
        let (a, b) = (setup(role, dialler), setup(role, acceptor));
        let agreed = check(&a, &b, Side::Dialler).unwrap();
        assert_eq!((&agreed.ours, &agreed.theirs), (&a, &b));
        assert_eq!(check(&b, &a, Side::Acceptor).unwrap().theirs, a);
        assert_eq!(agreed.outbound().max_message_bytes, b.max_message_bytes);
    }
}

#[test]
fn what_may_differ_does() {
    let (a, mut b) = (setup(Role::Data, 0), setup(Role::Data, 1));
    b.cache_generation = 9;
    b.credits = 99;
    b.max_message_bytes *= 2;
    b.versions.software = "9.9.9".into();
    b.features = vec!["other".into()];
    check(&a, &b, Side::Dialler).unwrap();
}

/// The largest frame of [`setup`]: a header, sections to their limit, and 64 rows of 32 bytes and four floats.
const FULL: u64 = 32 + (4 << 20) + 64 * (32 + 16);

#[test]
fn the_largest_message_holds_every_frame() {
    let (mut a, mut b) = (setup(Role::Data, 0), setup(Role::Data, 1));
    (a.max_message_bytes, b.max_message_bytes) = (FULL, FULL);
    check(&a, &b, Side::Dialler).unwrap();
    for s in [&mut a, &mut b] {
        s.n_ubatch = 65;
    }
    let refusal = check(&a, &b, Side::Dialler).unwrap_err();
    let need = (FULL + 48).to_string();
    for part in ["max_message_bytes", "`n_ubatch` = 65", need.as_str()] {
        assert!(refusal.message.contains(part), "{part} is not in: {refusal}");
    }
    for s in [&mut a, &mut b] {
        // Two bytes a float and four a row.
        s.activations = ActivationDtype::F16;
        s.n_ubatch = 64 * 48 / 44;
    }
    check(&a, &b, Side::Dialler).unwrap();
    a.n_ubatch = u32::MAX;
    b.n_ubatch = u32::MAX;
    check(&a, &b, Side::Dialler).unwrap_err();
}

/// The peer's setup changed in one field: what both sides say of it.
#[test]
fn every_difference_is_named_with_both_values() {
    use RefusalCode::{Adjacency, Build, Chain, Formation, Model, Shape};
    type Change = fn(&mut Setup);
    let cases: [(RefusalCode, &str, &str, &str, Change); 21] = [
        (Chain, "chain", "smol", "other", |s| s.chain = "other".into()),
        (RefusalCode::Role, "role", "data", "return", |s| s.role = Role::Return),
        (Formation, "formation", "7", "6", |s| s.formation = 6),
        (Formation, "root", "0123456789abcdef0123456789abcdef", "00000000000000000000000000000005", |s| {
            s.root = InstanceId(5);
        }),
        (Shape, "stages", "3", "4", |s| s.stages = 4),
        (Model, "model", "abab", "cdcd", |s| s.model = "cd".repeat(32)),
        (Shape, "n_layers", "12", "13", |s| s.n_layers = 13),
        (Shape, "n_embd", "4", "8", |s| s.n_embd = 8),
        (Shape, "activations", "f32", "f16", |s| s.activations = ActivationDtype::F16),
        (Shape, "lanes", "4", "5", |s| s.lanes = 5),
        (Shape, "n_ctx", "1024", "2048", |s| s.n_ctx = 2048),
        (Shape, "n_ubatch", "64", "512", |s| s.n_ubatch = 512),
        (Build, "versions.llama_cpp", "b1234", "b1235", |s| s.versions.llama_cpp = "b1235".into()),
        (Adjacency, "stage", "stage 0 of 3", "stage 2 of 3", |s| s.stage = 2),
        (Adjacency, "stage", "stage 0 of 3", "stage 0 of 3", |s| s.stage = 0),
        (Adjacency, "layers", "[0, 4) of 12", "[5, 8) of 12", |s| s.layers[0] = 5),
        (Adjacency, "layers", "[0, 4) of 12", "[4, 4) of 12", |s| s.layers[1] = 4),
        (Adjacency, "layers", "[0, 4) of 12", "[4, 13) of 12", |s| s.layers[1] = 13),
        (Adjacency, "layers", "[0, 4) of 12", "[4294967295, 0) of 12", |s| s.layers = [u32::MAX, 0]),
        (Shape, "credits", "4", "0", |s| s.credits = 0),
        (Shape, "max_message_bytes", "16777216", "4197407", |s| s.max_message_bytes = FULL - 1),
    ];
    for (code, field, ours, theirs, change) in cases {
        let (a, mut b) = (setup(Role::Data, 0), setup(Role::Data, 1));
        change(&mut b);
        let there = check(&a, &b, Side::Dialler).expect_err(field);
        assert_eq!((there.code, there.field.as_str()), (code, field), "{there}");
        assert!(there.ours.starts_with(ours) && there.theirs.starts_with(theirs), "{there:?}");
        for part in [field, ours, theirs] {
            assert!(there.message.contains(part), "{part} is not in: {there}");
        }
        let back = check(&b, &a, Side::Acceptor).expect_err(field);
        assert_eq!((back.code, back.field), (there.code, there.field));
        assert_eq!((back.ours, back.theirs), (there.theirs, there.ours));
    }
}

#[test]
fn who_dialled_matters() {
    // The same two documents, and the wrong one called.
    let (a, b) = (setup(Role::Data, 0), setup(Role::Data, 1));
    assert_eq!(check(&b, &a, Side::Dialler).unwrap_err().code, RefusalCode::Adjacency);
    let (last, first) = (setup(Role::Return, 2), setup(Role::Return, 0));
    assert_eq!(check(&first, &last, Side::Dialler).unwrap_err().code, RefusalCode::Adjacency);
    let middle = setup(Role::Return, 1);
    assert_eq!(check(&middle, &first, Side::Dialler).unwrap_err().code, RefusalCode::Adjacency);
}

#[test]
fn the_ends_of_the_chain_hold_the_ends_of_the_model() {
    let (mut a, b) = (setup(Role::Data, 0), setup(Role::Data, 1));
    a.layers[0] = 1;
    assert_eq!(check(&a, &b, Side::Dialler).unwrap_err().field, "layers");
    let (mut last, first) = (setup(Role::Return, 2), setup(Role::Return, 0));
    last.layers[1] = 11;
    assert_eq!(check(&last, &first, Side::Dialler).unwrap_err().field, "layers");
}

#[test]
fn ghosts_of_old_formations_stay_out() {
    let mut seen = Formations::default();
    seen.admit(ROOT, 5).unwrap();
    for old in [5, 4, 0] {
        let refusal = seen.admit(ROOT, old).unwrap_err();
        assert_eq!(refusal.code, RefusalCode::Formation);
        assert_eq!((refusal.ours.as_str(), refusal.theirs), ("5", old.to_string()));
    }
    seen.admit(ROOT, 6).unwrap();
    // A restarted stage 0 begins anew, and its predecessor's connections stay out.
    seen.admit(InstanceId(1), 0).unwrap();
    seen.admit(ROOT, 6).unwrap_err();
    // Many instances do not make it grow, and the latest are the ones remembered.
    for i in 100..10_000 {
        seen.admit(InstanceId(i), 1).unwrap();
    }
    seen.admit(InstanceId(9_999), 1).unwrap_err();
    assert!(format!("{seen:?}").len() < 8192);
}

#[test]
fn an_older_stage_0_does_not_displace_a_newer_one_while_that_holds_the_stage() {
    let mut seen = Formations::default();
    let (older, newer) = (InstanceId(1 << 80), InstanceId(2 << 80));
    seen.admit(older, 1).unwrap();
    seen.hold(Some(older));
    seen.admit(newer, 1).unwrap();
    seen.hold(Some(newer));
    let refusal = seen.admit(older, 2).unwrap_err();
    assert_eq!((refusal.code, refusal.field.as_str()), (RefusalCode::Formation, "root"));
    assert_eq!((refusal.ours, refusal.theirs), (newer.to_string(), older.to_string()));
    seen.admit(newer, 2).unwrap();
    seen.hold(None);
    seen.admit(older, 2).unwrap();
}

#[test]
fn ids_are_in_the_order_of_their_making() {
    let earlier = InstanceId::now().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(2));
    let later = InstanceId::now().unwrap();
    assert!(earlier < later, "{earlier} {later}");
    assert_ne!(earlier.0 << 48, later.0 << 48);
}

fn hello(bytes: &[u8]) -> Result<Hello, LinkError> {
    fuzz::ready(read_hello(&mut &*bytes))
}

#[track_caller]
fn refused(bytes: &[u8]) -> Refusal {
    match hello(bytes) {
        Err(LinkError::Refusing(refusal)) => refusal,
        other => panic!("{other:?}"),
    }
}

fn wire(setup: &Setup) -> Vec<u8> {
    let mut wire = Vec::new();
    fuzz::ready(write_setup(&mut wire, setup)).unwrap();
    wire
}

#[test]
fn prefaces() {
    let good = wire(&setup(Role::Data, 0));
    assert_eq!(hello(&good).unwrap(), Hello::Setup(Box::new(setup(Role::Data, 0)), 0));
    let with = |at: usize, new: u8| {
        let mut bytes = good.clone();
        bytes[at] = new;
        bytes
    };
    assert_eq!(refused(&with(0, b'X')).code, RefusalCode::Malformed);
    assert_eq!(refused(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").code, RefusalCode::Malformed);
    let version = refused(&with(8, 2));
    assert_eq!(version.code, RefusalCode::Version);
    assert_eq!((version.ours.as_str(), version.theirs.as_str()), ("1", "2"));
    // Nothing after the version is looked at.
    assert_eq!(refused(&with(8, 2)[..20]).code, RefusalCode::Version);
    assert!(matches!(hello(&with(10, 9)).unwrap(), Hello::Setup(_, 9)), "a higher minor is fine");
    for (at, new) in [(12, 2), (13, 1), (15, 1), (18, 1), (19, 0xff), (20, b'[')] {
        assert_eq!(refused(&with(at, new)).code, RefusalCode::Malformed, "byte {at}");
    }
    for n in 0..good.len() {
        assert!(matches!(hello(&good[..n]), Err(LinkError::Io { .. })), "cut to {n}");
    }
}

#[test]
fn documents_grow_by_fields() {
    let mut value = serde_json::to_value(setup(Role::Data, 0)).unwrap();
    value["later"] = serde_json::json!({"any": ["thing"]});
    value.as_object_mut().unwrap().remove("features");
    let parsed: Setup = serde_json::from_value(value.clone()).unwrap();
    assert_eq!(parsed, setup(Role::Data, 0));
    for field in ["root", "instance"] {
        for bad in ["", "12", "+123456789abcdef0123456789abcdef0", "g123456789abcdef0123456789abcdef"] {
            let mut value = value.clone();
            value[field] = bad.into();
            serde_json::from_value::<Setup>(value).expect_err(bad);
        }
    }
    let refusal: Refusal = serde_json::from_str(r#"{"code":"moon","message":"m","more":1}"#).unwrap();
    assert_eq!((refusal.code, refusal.message.as_str()), (RefusalCode::Other, "m"));
}

#[test]
fn documents_have_a_limit() {
    let long = Setup { features: vec!["x".repeat(16_384)], ..setup(Role::Data, 0) };
    assert!(fuzz::ready(write_setup(&mut Vec::new(), &long)).is_err());
    // A refusal of the longest values still fits.
    let chain = |c: &str| Setup { chain: c.repeat(16_000), ..setup(Role::Data, 0) };
    let refusal = check(&chain("\u{1}"), &chain("é"), Side::Dialler).unwrap_err();
    let mut wire = Vec::new();
    fuzz::ready(write_refusal(&mut wire, &refusal)).unwrap();
    assert_eq!(hello(&wire).unwrap(), Hello::Refusal(Box::new(refusal)));
}

#[test]
fn instances_are_random() {
    let (a, b) = (InstanceId::now().unwrap(), InstanceId::now().unwrap());
    assert_ne!(a, b);
    assert_eq!(a.to_string().len(), 32);
}

proptest! {
    #[test]
    fn mutated_setups_never_panic(
        stage in 0u16..4,
        edits in proptest::collection::vec((any::<u16>(), any::<u8>()), 0..6),
    ) {
        let mut bytes = wire(&setup(Role::Data, stage));
        for (at, new) in edits {
            let at = usize::from(at) % bytes.len();
            bytes[at] = new;
        }
        fuzz::setup(&bytes);
    }
}
