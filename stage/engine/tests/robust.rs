//! Batches that cannot be computed, from peers one does not trust: an error each, nothing of them left, and the slice goes
//! on with the bits of one that never saw them.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Chain, Row, assert_same, config, prompt, run, slice, whole};
use proptest::prelude::*;
use splitmodel_chain::runtime::{Batch, Runtime, RuntimeError};
use splitmodel_engine::{EngineConfig, Slice};

fn small() -> EngineConfig {
    EngineConfig { n_ctx: 256, n_batch: 32, n_ubatch: 32, lanes: 3, ..config() }
}

fn decode(s: &mut Slice, lanes: &[u16], positions: &[i32], input: &[f32]) -> Result<(), RuntimeError> {
    let want = vec![true; lanes.len()];
    s.decode(Batch { lanes, positions, want: &want, input })
}

#[test]
fn wrong_shapes_are_errors_and_leave_nothing() {
    for mut s in [slice(0, 2, &small()), slice(28, 30, &small())] {
        let w = s.width();
        assert_eq!((w, s.max_rows()), (576, 32));
        let good = vec![0.5; 2 * w];
        decode(&mut s, &[0, 1], &[0, 0], &good).unwrap();
        if s.is_last() {
            assert_eq!(s.logits(1).unwrap().len(), 49152);
            assert!(s.activations().is_empty());
        } else {
            assert_eq!(s.activations().len(), 2 * w);
            assert!(s.logits(0).is_err());
        }
        let shape = |r: Result<(), RuntimeError>| assert!(matches!(r, Err(RuntimeError::Shape { .. })), "{r:?}");
        shape(decode(&mut s, &[0, 1], &[1], &good));
        shape(decode(&mut s, &[0], &[1], &good));
        shape(decode(&mut s, &[0, 1], &[1, 1], &good[1..]));
        shape(decode(&mut s, &[0, 3], &[1, 0], &good));
        shape(decode(&mut s, &[0, u16::MAX], &[1, 0], &good));
        shape(decode(&mut s, &[0; 33], &std::array::from_fn::<_, 33, _>(|i| 1 + i as i32), &vec![0.5; 33 * w]));
        let flags = [true];
        shape(s.decode(Batch { lanes: &[0, 1], positions: &[1, 1], want: &flags, input: &good }));
        let refused = |r: Result<(), RuntimeError>| assert!(matches!(r, Err(RuntimeError::Decode { .. })), "{r:?}");
        for position in [-1, i32::MIN, i32::MAX, 0, 2, 1_000_000] {
            refused(decode(&mut s, &[0], &[position], &good[..w]));
        }
        refused(decode(&mut s, &[2, 2], &[0, 2], &good));
        // Nothing of a failed batch is given out, and the cache is as before.
        assert!(s.activations().is_empty());
        assert!((0..3).all(|row| s.logits(row).is_err()));
        assert_eq!([s.pos_max(0), s.pos_max(1), s.pos_max(2), s.pos_max(9)], [0, 0, -1, -1]);
        // Lanes that do not exist hold nothing and take nothing.
        assert!(s.seq_rm(9, -1, -1));
        s.seq_cp(0, 9, 0, 1);
        s.seq_cp(9, 0, 0, 1);
        assert_eq!(s.pos_min(9), -1);
        decode(&mut s, &[], &[], &[]).unwrap();
        // Rows that nobody wants have no logits.
        s.decode(Batch { lanes: &[0, 1], positions: &[1, 1], want: &[false, true], input: &good }).unwrap();
        if s.is_last() {
            assert!(s.logits(0).is_err() && s.logits(1).is_ok() && s.logits(2).is_err());
        }
    }
}

#[test]
fn tokens_out_of_range_are_errors() {
    let mut first = slice(0, 2, &small());
    let mut out = vec![1.0];
    for bad in [-1, 49152, i32::MAX, i32::MIN] {
        assert!(matches!(first.embed(&[1, bad], &mut out), Err(RuntimeError::Embedding(_))));
        assert_eq!(out, [1.0]);
    }
    assert!(matches!(slice(28, 30, &small()).embed(&[1], &mut out), Err(RuntimeError::Embedding(_))));
    let mut whole = whole(&small());
    for bad in [-1.0, 0.5, 49152.0, f32::NAN, f32::INFINITY, 3e9] {
        assert!(matches!(decode(&mut whole, &[0], &[0], &[bad]), Err(RuntimeError::Embedding(_))), "{bad}");
    }
    assert_eq!(whole.pos_max(0), -1);
}

#[test]
fn a_full_cache_is_an_error_and_room_helps() {
    let config = small();
    let tokens = prompt();
    let mut chain = Chain::load(&[0, 10, 30], &config);
    let mut calm = Chain(vec![whole(&config)]);
    for c in [&mut chain, &mut calm] {
        for at in 0..8 {
            c.decode(&run(0, 32 * at, &tokens[..32])).unwrap();
        }
    }
    let before: Vec<_> = chain.0.iter().map(|s| (s.pos_min(0), s.pos_max(0))).collect();
    for rows in [1, 7, 32] {
        let full = chain.decode(&run(1, 0, &tokens[..rows]));
        assert_eq!(full.unwrap_err(), RuntimeError::CacheFull { rows });
    }
    assert_eq!(before, chain.0.iter().map(|s| (s.pos_min(0), s.pos_max(0))).collect::<Vec<_>>());
    assert!(chain.0.iter().all(|s| s.pos_max(1) == -1));
    let mut out = Vec::new();
    for c in [&mut chain, &mut calm] {
        c.each(|s| assert!(s.seq_rm(0, 100, -1)));
        let mut rows = run(1, 0, &tokens[..20]);
        rows.push((0, 100, tokens[0], true));
        out.push(c.decode(&rows).unwrap());
    }
    assert_same(&out[0], &out[1], "after a full cache");
}

#[test]
fn an_interrupted_chain_goes_on_after_the_trim() {
    // Stage 0 computed a frame, stage 1 could not: both trim it, as a worker does, and go on.
    let tokens = prompt();
    let mut chain = Chain::load(&[0, 10, 30], &small());
    let mut calm = Chain(vec![whole(&small())]);
    let mut out = Vec::new();
    for (c, disturbed) in [(&mut chain, true), (&mut calm, false)] {
        c.decode(&run(0, 0, &tokens[..20])).unwrap();
        if disturbed {
            let mut input = Vec::new();
            c.0[0].embed(&tokens[20..24], &mut input).unwrap();
            decode(&mut c.0[0], &[0; 4], &[20, 21, 22, 23], &input).unwrap();
            let bad = c.0[0].activations()[..576 * 3].to_vec();
            assert!(decode(&mut c.0[1], &[0; 4], &[20, 21, 22, 23], &bad).is_err());
            c.each(|s| assert!(s.seq_rm(0, 20, -1)));
        }
        out.push(c.decode(&run(0, 20, &tokens[24..30])).unwrap());
    }
    assert_same(&out[0], &out[1], "after an interrupted frame");
}

/// What a peer may do: batches and memory operations, most of them wrong.
#[derive(Clone, Debug)]
enum Step {
    Decode(Vec<Row>),
    Continue(u16, Vec<i32>),
    Remove(u16, i32, i32),
    Copy(u16, u16, i32, i32),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lane = || prop_oneof![8 => 0u16..3, 1 => 3u16..300];
    let row = (lane(), -1i32..6, prop_oneof![9 => 0i32..49152, 1 => Just(-1)], any::<bool>());
    let step = prop_oneof![
        2 => proptest::collection::vec(row, 0..5).prop_map(Step::Decode),
        4 => (lane(), proptest::collection::vec(0i32..49152, 1..5)).prop_map(|(l, t)| Step::Continue(l, t)),
        1 => (lane(), -1i32..8, -1i32..8).prop_map(|(l, a, b)| Step::Remove(l, a, b)),
        1 => (lane(), lane(), -1i32..8, -1i32..8).prop_map(|(a, b, x, y)| Step::Copy(a, b, x, y)),
    ];
    proptest::collection::vec(step, 1..12)
}

fn apply(chain: &mut Chain, step: &Step) -> Result<Vec<Vec<f32>>, String> {
    match step {
        Step::Decode(rows) => chain.decode(rows).map_err(|e| e.to_string()),
        Step::Continue(lane, tokens) => {
            let at = chain.0[0].pos_max(*lane) + 1;
            chain.decode(&run(*lane, at, tokens)).map_err(|e| e.to_string())
        }
        Step::Remove(lane, from, to) => {
            chain.each(|s| {
                s.seq_rm(*lane, *from, *to);
            });
            Ok(Vec::new())
        }
        Step::Copy(from, to, begin, end) => {
            chain.each(|s| s.seq_cp(*from, *to, *begin, *end));
            Ok(Vec::new())
        }
    }
}

#[test]
fn whatever_comes_a_chain_and_the_whole_model_agree() {
    use std::cell::RefCell;
    let tiny = small();
    let chains = RefCell::new((Chain::load(&[0, 1, 2, 30], &tiny), Chain(vec![whole(&tiny)])));
    let config = ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(steps in steps())| {
        let (chain, whole) = &mut *chains.borrow_mut();
        chain.each(Runtime::clear);
        whole.each(Runtime::clear);
        for step in &steps {
            let (a, b) = (apply(chain, step), apply(whole, step));
            match (&a, &b) {
                (Ok(a), Ok(b)) if a.is_empty() => prop_assert!(b.is_empty()),
                (Ok(a), Ok(b)) => assert_same(a, b, "chain and whole"),
                (Err(_), Err(_)) => {}
                _ => prop_assert!(false, "chain {:?}, whole {:?}", a.map(|x| x.len()), b.map(|x| x.len())),
            }
            for lane in 0..3 {
                for s in &chain.0 {
                    let held = |s: &Slice| (s.pos_min(lane), s.pos_max(lane));
                    prop_assert_eq!(held(s), held(&whole.0[0]));
                }
            }
        }
    });
}
