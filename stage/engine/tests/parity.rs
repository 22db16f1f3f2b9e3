//! Slices against the unsplit model: the same schedule must give the same bits.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Chain, LAYERS, Row, argmax, assert_same, config, prompt, run, whole};
use splitmodel_chain::runtime::Runtime;

const CUTS: [&[u32]; 4] = [&[0, 30], &[0, 22, 30], &[0, 15, 28, 30], &[0, 3, 10, 11, 25, 30]];

/// Chunked prefill, greedy decoding, several sequences in a batch, shared prefixes, trims. Every step's logits.
fn schedule(chain: &mut Chain) -> Vec<Vec<f32>> {
    let tokens = prompt();
    let mut out = Vec::new();
    let step = |chain: &mut Chain, rows: &[Row], out: &mut Vec<Vec<f32>>| {
        let got = chain.decode(rows).unwrap();
        let next = got.last().map(|l| argmax(l));
        out.extend(got);
        next
    };
    // Chunks of 7; only the last row of each is wanted.
    let mut at = 0;
    let mut next = 0;
    for chunk in tokens.chunks(7) {
        next = step(chain, &run(0, at, chunk), &mut out).unwrap();
        at += chunk.len() as i32;
    }
    for _ in 0..4 {
        next = step(chain, &[(0, at, next, true)], &mut out).unwrap();
        at += 1;
    }
    // A chunk nobody wants logits of.
    let unwanted: Vec<Row> = run(1, 0, &tokens[..9]).into_iter().map(|r| (r.0, r.1, r.2, false)).collect();
    step(chain, &unwanted, &mut out);
    // Lane 2 shares half the prompt of lane 0 and goes on elsewhere.
    let half = tokens.len() as i32 / 2;
    chain.each(|s| s.seq_cp(0, 2, 0, half));
    step(chain, &run(2, half, &tokens[3..8]), &mut out);
    // Three sequences of unlike lengths in a batch, interleaved, several rows of one wanted.
    let rows =
        [(0, at, next, true), (1, 9, tokens[9], true), (2, half + 5, tokens[1], false), (1, 10, tokens[10], true)];
    step(chain, &rows, &mut out);
    // Trim lane 0 to a third and decode differently from there; free lane 1.
    let third = tokens.len() as i32 / 3;
    chain.each(|s| {
        assert!(s.seq_rm(0, third, -1));
        assert!(s.seq_rm(1, -1, -1));
        assert_eq!((s.pos_max(0), s.pos_max(1), s.pos_min(0)), (third - 1, -1, 0));
    });
    step(chain, &[(0, third, tokens[0], true), (2, half + 6, tokens[2], true)], &mut out);
    // Everything again from an empty cache, in one chunk.
    chain.each(|s| {
        s.clear();
        assert_eq!(s.pos_max(2), -1);
    });
    step(chain, &run(3, 0, &tokens), &mut out);
    out
}

#[test]
fn stages_give_the_bits_of_the_unsplit_model() {
    let config = config();
    let reference = schedule(&mut Chain(vec![whole(&config)]));
    for cuts in CUTS {
        let mut chain = Chain::load(cuts, &config);
        let got: Vec<_> = chain.0.iter().map(|s| s.layers()).collect();
        let want: Vec<_> = cuts.windows(2).map(|c| (c[0], c[1])).collect();
        assert_eq!(got, want);
        assert_eq!(chain.0.last().unwrap().layers().1, LAYERS);
        assert_same(&schedule(&mut chain), &reference, &format!("cuts {cuts:?}"));
    }
}

#[test]
fn two_threads_and_other_cache_types_keep_parity() {
    use splitmodel_engine::{CacheType, FlashAttention};
    for (threads, threads_batch, k, v, flash) in [
        (2, 0, CacheType::F16, CacheType::F16, FlashAttention::Auto),
        (1, 2, CacheType::Q8_0, CacheType::Q8_0, FlashAttention::On),
        (1, 1, CacheType::F32, CacheType::F32, FlashAttention::Off),
    ] {
        let config = splitmodel_engine::EngineConfig {
            threads,
            threads_batch,
            cache_type_k: k,
            cache_type_v: v,
            flash_attn: flash,
            ..config()
        };
        let reference = schedule(&mut Chain(vec![whole(&config)]));
        let got = schedule(&mut Chain::load(&[0, 13, 30], &config));
        assert_same(&got, &reference, &format!("{threads} threads, {k:?} {v:?} {flash:?}"));
    }
}
