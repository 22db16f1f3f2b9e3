//! What the tests share: the sample model, its packages, and a chain of slices driven like one model.
#![allow(dead_code, unreachable_pub, reason = "every test file uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test code")]

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};

use splitmodel_chain::runtime::{Batch, Runtime, RuntimeError};
use splitmodel_engine::{EngineConfig, Slice, SliceFiles, Tokenizer};
use splitmodel_gguf::{Model, Package, SlicePlan};

pub const LAYERS: u32 = 30;
pub const PROMPT: &str = "The river moves slowly past the old mill, and every morning the baker opens his shop before \
    the sun is up. Nobody in the village remembers who built the bridge, but everyone has crossed it.";

/// SmolLM2-135M-Instruct, Q4_1.
pub fn sample_model() -> PathBuf {
    let path = std::env::var_os("SPLITMODEL_SAMPLE_MODEL").map_or_else(
        || {
            let home = std::env::var_os("HOME").expect("HOME is set");
            PathBuf::from(home).join(".cache/splitmodel/models/SmolLM2-135M-Instruct.Q4_1.gguf")
        },
        PathBuf::from,
    );
    assert!(path.is_file(), "no sample model at {}; set SPLITMODEL_SAMPLE_MODEL", path.display());
    path
}

/// A package of `model`, written once per test process.
pub fn package_of(model: &Model, package: Package) -> PathBuf {
    static WRITTEN: LazyLock<Mutex<HashMap<(String, Package), PathBuf>>> = LazyLock::new(Mutex::default);
    let mut written = WRITTEN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let key = (model.digest().to_owned(), package);
    if let Some(path) = written.get(&key) {
        return path.clone();
    }
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("engine-packages");
    std::fs::create_dir_all(&dir).unwrap();
    let name = match package {
        Package::Stage { first, end } => format!("{first}-{end}"),
        other => other.to_string(),
    };
    let path = dir.join(format!("{}-{name}.gguf", &key.0[..16]));
    SlicePlan::new(model, package).unwrap().write(&path, &mut |_, _| {}).unwrap();
    written.insert(key, path.clone());
    path
}

pub fn package(package: Package) -> PathBuf {
    package_of(&Model::open(sample_model()).unwrap(), package)
}

/// Files of the stage that holds `first..end`.
pub fn files(first: u32, end: u32) -> SliceFiles {
    SliceFiles {
        slice: package(Package::Stage { first, end }),
        embedding: (first == 0).then(|| package(Package::Embedding)),
    }
}

pub fn config() -> EngineConfig {
    EngineConfig { n_ctx: 1024, threads: 1, n_gpu_layers: Some(0), ..EngineConfig::default() }
}

pub fn slice(first: u32, end: u32, config: &EngineConfig) -> Slice {
    Slice::load(&files(first, end), config, &mut |_| true).unwrap()
}

pub fn whole(config: &EngineConfig) -> Slice {
    Slice::load_whole(&sample_model(), config, &mut |_| true).unwrap()
}

pub fn prompt() -> Vec<i32> {
    Tokenizer::load(&sample_model()).unwrap().tokenize(PROMPT, false, false).unwrap()
}

/// One row: lane, position, token, want.
pub type Row = (u16, i32, i32, bool);

/// Rows of consecutive positions of one lane; logits of the last one are wanted.
pub fn run(lane: u16, at: i32, tokens: &[i32]) -> Vec<Row> {
    let last = tokens.len() - 1;
    tokens.iter().enumerate().map(|(i, &t)| (lane, at + i as i32, t, i == last)).collect()
}

/// Slices in a row.
pub struct Chain(pub Vec<Slice>);

impl Chain {
    /// `model` cut at `cuts`.
    pub fn of(model: &Model, cuts: &[u32], config: &EngineConfig) -> Self {
        let slice = |c: &[u32]| {
            let files = SliceFiles {
                slice: package_of(model, Package::Stage { first: c[0], end: c[1] }),
                embedding: (c[0] == 0).then(|| package_of(model, Package::Embedding)),
            };
            Slice::load(&files, config, &mut |_| true).unwrap()
        };
        Self(cuts.windows(2).map(slice).collect())
    }

    /// The sample model cut at `cuts`: `[0, 22, 30]` is two stages.
    pub fn load(cuts: &[u32], config: &EngineConfig) -> Self {
        Self(cuts.windows(2).map(|c| slice(c[0], c[1], config)).collect())
    }

    /// Runs rows through all stages; logits of the wanted rows.
    pub fn decode(&mut self, rows: &[Row]) -> Result<Vec<Vec<f32>>, RuntimeError> {
        let lanes: Vec<_> = rows.iter().map(|r| r.0).collect();
        let positions: Vec<_> = rows.iter().map(|r| r.1).collect();
        let tokens: Vec<_> = rows.iter().map(|r| r.2).collect();
        let want: Vec<_> = rows.iter().map(|r| r.3).collect();
        let mut input = Vec::new();
        self.0[0].embed(&tokens, &mut input)?;
        for stage in &mut self.0 {
            stage.decode(Batch { lanes: &lanes, positions: &positions, want: &want, input: &input })?;
            if !stage.is_last() {
                input.clear();
                input.extend_from_slice(stage.activations());
            }
        }
        let last = self.0.last().unwrap();
        assert!(last.is_last());
        (0..rows.len()).filter(|&i| want[i]).map(|i| last.logits(i).map(<[f32]>::to_vec)).collect()
    }

    pub fn each(&mut self, mut f: impl FnMut(&mut Slice)) {
        self.0.iter_mut().for_each(&mut f);
    }
}

/// Bit identity; NaN is never equal to anything.
pub fn assert_same(a: &[Vec<f32>], b: &[Vec<f32>], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}: rows");
    assert!(!a.is_empty(), "{what}: nothing to compare");
    for (row, (x, y)) in a.iter().zip(b).enumerate() {
        assert_eq!(x.len(), y.len(), "{what}: row {row}");
        let differ = x.iter().zip(y).filter(|(x, y)| x.is_nan() || x.to_bits() != y.to_bits()).count();
        assert_eq!(differ, 0, "{what}: row {row}: {differ} of {} logits differ", x.len());
        assert!(x.iter().any(|v| *v != x[0]), "{what}: row {row}: all logits are equal");
    }
}

pub fn argmax(logits: &[f32]) -> i32 {
    let best = |a: usize, b: usize| if logits[b] > logits[a] { b } else { a };
    (1..logits.len()).fold(0, best) as i32
}
