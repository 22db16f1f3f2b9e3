//! The table of families in `splitmodel-gguf`, proven: slices of tiny random models of every architecture against the
//! whole, at every legal cut, bit for bit. Windows, recurrent states, scaled embeddings and tied heads included.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Chain, Row, argmax, assert_same, config, run};
use splitmodel_chain::runtime::Runtime;
use splitmodel_engine::{EngineConfig, FlashAttention, Slice};
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

/// Longer than the windows of the tiny models, several sequences, unlike lengths.
fn schedule(chain: &mut Chain) -> Vec<Vec<f32>> {
    let token = |i: i32| 20 + (i * 37) % 200;
    let tokens: Vec<i32> = (0..90).map(token).collect();
    let mut out = Vec::new();
    for (i, chunk) in tokens.chunks(30).enumerate() {
        out.extend(chain.decode(&run(0, 30 * i as i32, chunk)).unwrap());
    }
    // Two prompts in one frame, one row between them, then one row of each lane, in no order.
    let mut rows: Vec<Row> = run(2, 0, &tokens[5..25]);
    rows.push((0, 90, token(3), true));
    rows.extend(run(1, 0, &tokens[40..47]));
    out.extend(chain.decode(&rows).unwrap());
    for step in 0..3 {
        let rows = [
            (1, 7 + step, token(step), true),
            (0, 91 + step, token(step + 1), step > 0),
            (2, 20 + step, token(step + 2), true),
        ];
        out.extend(chain.decode(&rows).unwrap());
    }
    // A lane is freed and taken by another sequence.
    chain.each(|s| assert!(s.seq_rm(1, -1, -1)));
    out.extend(chain.decode(&run(1, 0, &tokens[60..80])).unwrap());
    // Its state goes on in a lane that held another, beside others and once it is gone itself.
    let mut states = Vec::new();
    chain.each(|s| {
        let mut state = vec![7];
        s.state(1, &mut state).unwrap();
        states.push(state);
    });
    out.extend(chain.decode(&run(1, 20, &tokens[3..20])).unwrap());
    let mut kept = states.iter();
    chain.each(|s| s.set_state(2, kept.next().unwrap()).unwrap());
    out.extend(chain.decode(&[(0, 94, token(9), true), (2, 20, tokens[3], true), (1, 37, token(7), true)]).unwrap());
    chain.each(|s| assert!(s.seq_rm(1, -1, -1)));
    let mut kept = states.iter();
    chain.each(|s| s.set_state(1, kept.next().unwrap()).unwrap());
    let mut rows = run(1, 20, &tokens[3..20]);
    rows[0].3 = true;
    out.extend(chain.decode(&rows).unwrap());
    // A lane between two that compute is left as it was.
    out.extend(chain.decode(&[(2, 21, token(1), true), (0, 95, token(2), true)]).unwrap());
    out.extend(chain.decode(&[(1, 37, token(3), true), (3, 0, token(4), true)]).unwrap());
    out
}

/// What the model says of itself, greedily: a chunked prompt, then its own tokens.
fn greedy(chain: &mut Chain) -> Vec<Vec<f32>> {
    let tokens: Vec<i32> = (0..45).map(|i| 30 + (i * 53) % 190).collect();
    chain.each(Runtime::clear);
    let mut out = Vec::new();
    let mut at = 0;
    for chunk in tokens.chunks(7) {
        let mut rows = run(0, at, chunk);
        // of the middle of the chunk too
        rows[chunk.len() / 2].3 = true;
        out.extend(chain.decode(&rows).unwrap());
        at += chunk.len() as i32;
    }
    for _ in 0..16 {
        let next = argmax(out.last().unwrap());
        out.extend(chain.decode(&[(0, at, next, true)]).unwrap());
        at += 1;
    }
    out
}

/// A model that says NaN, or the same whatever it is told, proves nothing.
fn assert_alive(logits: &[Vec<f32>], what: &str) {
    assert!(logits.iter().flatten().all(|x| x.is_finite()), "{what}: logits that are no numbers");
    let said: std::collections::BTreeSet<_> = logits.iter().map(|l| argmax(l)).collect();
    assert!(said.len() > 5, "{what}: says only {said:?}");
}

fn both(chain: &mut Chain) -> Vec<Vec<f32>> {
    let mut all = schedule(chain);
    all.extend(greedy(chain));
    all
}

fn proven(arch: Arch) {
    proven_with(Tiny::new(arch), &EngineConfig { n_ctx: 512, n_ubatch: 64, n_batch: 64, ..config() });
}

fn proven_with(tiny: Tiny, config: &EngineConfig) {
    let arch = tiny.arch;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    tiny.write(&path).unwrap();
    let model = Model::open(&path).unwrap();
    let facts = model.facts().unwrap();
    let whole = Slice::load_whole(&path, config, &mut |_| true).unwrap();
    let reference = both(&mut Chain(vec![whole]));
    assert_alive(&reference, arch.name());
    assert!(!facts.legal_cuts.is_empty());
    let n = facts.n_layers;
    let mut all: Vec<Vec<u32>> = facts.legal_cuts.iter().map(|&c| vec![0, c, n]).collect();
    all.push(vec![0, n]);
    let fits = |c: &Vec<u32>| c.windows(2).all(|r| facts.check_range(r[0], r[1]).is_ok());
    all.push(facts.legal_cuts.iter().flat_map(|&a| (a + 1..n).map(move |b| vec![0, a, b, n])).find(fits).unwrap());
    for cuts in all {
        let got = both(&mut Chain::of(&model, &cuts, config));
        assert_same(&got, &reference, &format!("{} cut at {cuts:?}", arch.name()));
    }
}

macro_rules! families {
    ($($name:ident: $arch:ident;)*) => {
        $(#[test] fn $name() { proven(Arch::$arch); })*

        #[test]
        fn every_family_has_its_test() {
            let tested = [$(Arch::$arch),*];
            assert!(Arch::ALL.iter().all(|a| tested.contains(a)));
            for family in splitmodel_gguf::families::FAMILIES {
                assert!(tested.iter().any(|a| a.name() == family.arch), "{} is not proven", family.arch);
            }
        }
    };
}

families! {
    llama: Llama;
    qwen2: Qwen2;
    qwen3: Qwen3;
    gemma3: Gemma3;
    falcon_h1: FalconH1;
    lfm2: Lfm2;
    granite_hybrid: GraniteHybrid;
}

#[test]
fn every_family_with_a_cache_for_each_lane() {
    for (&arch, widest_gap) in Arch::ALL.iter().flat_map(|arch| [(arch, None), (arch, Some(4))]) {
        let config = EngineConfig { n_ctx: 1024, n_ubatch: 64, n_batch: 64, kv_unified: false, widest_gap, ..config() };
        proven_with(Tiny::new(arch), &config);
    }
}

/// Untied heads where they are tied and the other way round, other weights, other kernels, whole windows.
#[test]
fn every_family_with_other_heads_and_without_flash_attention() {
    let config = EngineConfig {
        n_ctx: 512,
        n_ubatch: 64,
        n_batch: 64,
        flash_attn: FlashAttention::Off,
        swa_full: true,
        ..config()
    };
    for &arch in Arch::ALL {
        let tiny = Tiny::new(arch);
        proven_with(Tiny { tied: !tiny.tied, seed: 2, ..tiny }, &config);
    }
}

/// Weights that the CPU repacks while it loads them: heads too, which are tied in slices and need not be in the whole.
#[test]
fn every_family_with_repacked_weights() {
    let config = EngineConfig { n_ctx: 512, n_ubatch: 64, n_batch: 64, repack: true, ..config() };
    for &arch in Arch::ALL {
        for tied in [false, true] {
            proven_with(Tiny { q4_0: true, tied, ..Tiny::new(arch) }, &config);
        }
    }
    if is_avx2() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tiny.gguf");
        Tiny { q4_0: true, ..Tiny::new(Arch::Llama) }.write(&path).unwrap();
        let memory = Slice::load_whole(&path, &config, &mut |_| true).unwrap().memory().clone();
        assert!(memory.buffers.iter().any(|b| b.place == "CPU_REPACK" && b.weights > 0), "{memory:?}");
    }
}

/// Whether ggml has repacked layouts for this processor.
fn is_avx2() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Past the second layer with full attention; the pattern of a later slice begins elsewhere.
#[test]
fn gemma3_of_thirteen_layers() {
    let config = EngineConfig { n_ctx: 512, n_ubatch: 64, n_batch: 64, ..config() };
    proven_with(Tiny { layers: 13, ..Tiny::new(Arch::Gemma3) }, &config);
}

#[test]
fn slices_of_shards_are_those_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    let tiny = Tiny::new(Arch::Qwen3);
    let shards = tiny.write_shards(&dir.path().join("tiny"), 3).unwrap();
    let config = EngineConfig { n_ctx: 512, n_ubatch: 64, n_batch: 64, ..config() };
    let whole = Slice::load_whole(&shards[0], &config, &mut |_| true).unwrap();
    let reference = both(&mut Chain(vec![whole]));
    let model = Model::open(&shards[0]).unwrap();
    let got = both(&mut Chain::of(&model, &[0, 2, 7, 8], &config));
    assert_same(&got, &reference, "shards");
}
