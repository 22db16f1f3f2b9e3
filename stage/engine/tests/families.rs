//! The table of families in `splitmodel-gguf`, proven: slices of tiny random models of every architecture against the
//! whole, at every legal cut, bit for bit. Windows, recurrent states, scaled embeddings and tied heads included.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Chain, Row, assert_same, config, run};
use splitmodel_chain::runtime::Runtime;
use splitmodel_engine::{EngineConfig, Slice};
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
    out
}

fn proven(arch: Arch) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    Tiny::new(arch).write(&path).unwrap();
    let model = Model::open(&path).unwrap();
    let facts = model.facts().unwrap();
    let config = EngineConfig { n_ctx: 512, n_ubatch: 64, n_batch: 64, ..config() };
    let whole = Slice::load_whole(&path, &config, &mut |_| true).unwrap();
    let reference = schedule(&mut Chain(vec![whole]));
    assert!(!facts.legal_cuts.is_empty());
    let n = facts.n_layers;
    let mut all: Vec<Vec<u32>> = facts.legal_cuts.iter().map(|&c| vec![0, c, n]).collect();
    all.push(vec![0, n]);
    let fits = |c: &Vec<u32>| c.windows(2).all(|r| facts.check_range(r[0], r[1]).is_ok());
    all.push(facts.legal_cuts.iter().flat_map(|&a| (a + 1..n).map(move |b| vec![0, a, b, n])).find(fits).unwrap());
    for cuts in all {
        let got = schedule(&mut Chain::of(&model, &cuts, &config));
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
