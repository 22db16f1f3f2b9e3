//! The kept corpus of the fuzz target and a fixed number of mutations of it, on the stable toolchain. The same every run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/fuzz.rs"]
mod fuzz;

use std::path::PathBuf;

use splitmodel_gguf::encode::{Layout, TensorSpec};
use splitmodel_gguf::tiny::{Arch, Tiny};
use splitmodel_gguf::value::OwnedValue;
use splitmodel_gguf::{Model, Package};

const MUTATIONS: usize = 100_000;
/// Tokens of the seeds' vocabularies.
const TOKENS: usize = 6;

fn folder() -> PathBuf {
    // At run time: two checkouts that share a target folder share test binaries.
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap()).join("../../fuzz/corpus/gguf_header")
}

fn corpus() -> Vec<Vec<u8>> {
    let list = std::fs::read_dir(folder()).unwrap_or_else(|e| panic!("{}: {e}", folder().display()));
    let mut paths: Vec<_> = list.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at the edges of what counts, lengths, dimensions and offsets hold.
const EDGES: [u64; 12] =
    [0, 1, 3, 31, 0xff, 0xffff, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff, 1 << 32, i64::MAX as u64, u64::MAX];

fn mutate(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut input = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(input.len());
        match random.below(8) {
            _ if input.is_empty() => input.push(random.next() as u8),
            0 => input[at] ^= 1 << random.below(8),
            1 => input[at] = random.next() as u8,
            2 => input.truncate(at),
            // Small numbers change what is meant, not how it is read.
            3 => input[at] = random.below(16) as u8,
            4 | 5 => {
                let width = [1, 2, 4, 8][random.below(4)];
                let edge = EDGES[random.below(EDGES.len())].to_le_bytes();
                input.iter_mut().skip(at).zip(&edge[..width]).for_each(|(byte, new)| *byte = *new);
            }
            6 => {
                let other = &seeds[random.below(seeds.len())];
                input.truncate(at);
                input.extend_from_slice(&other[random.below(other.len())..]);
            }
            _ => {
                let end = (at + random.below(24)).min(input.len());
                input.drain(at..end);
            }
        }
    }
    input
}

#[test]
fn the_corpus_and_its_mutations() {
    let seeds = corpus();
    assert!(seeds.len() >= Arch::ALL.len(), "{} seeds", seeds.len());
    seeds.iter().for_each(|seed| fuzz::header(seed));
    let mut random = Random(11);
    for _ in 0..MUTATIONS {
        let input = mutate(&seeds, &mut random);
        // A failing input is shown by what panics; this makes it reproducible as a file.
        let outcome = std::panic::catch_unwind(|| fuzz::header(&input));
        assert!(outcome.is_ok(), "fails for {input:02x?}");
    }
}

/// As few as make a short header and a model of the family: every third layer of some hybrids attends.
fn layers(arch: Arch) -> u32 {
    if arch == Arch::FalconH1 { 2 } else { 3 }
}

/// Header of a tiny model of `arch` with a vocabulary of [`TOKENS`]: the whole file but its zeros.
fn seed(arch: Arch) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let layers = layers(arch);
    Tiny { layers, ..Tiny::new(arch) }.write(&path).unwrap();
    let model = Model::open(&path).unwrap();
    let header = model.header();
    let mut layout = Layout::default();
    for key in header.keys() {
        let value = match key.rsplit('.').next().unwrap() {
            "tokens" => OwnedValue::strs(&["a", "b", "ab", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
            "merges" => OwnedValue::strs(&["a b"]),
            "token_type" => OwnedValue::i32s(&[1, 1, 1, 3, 3, 3]),
            "vocab_size" => OwnedValue::u32(TOKENS as u32),
            "chat_template" => OwnedValue::str("{{ messages }}"),
            id if id.ends_with("_token_id") => OwnedValue::u32(TOKENS as u32 - 1),
            _ => header.owned(key).unwrap(),
        };
        layout.set(key, value);
    }
    for t in model.tensors() {
        let mut dims = t.info.dims.clone();
        if ["token_embd.weight", "output.weight"].contains(&t.info.name.as_str()) {
            dims[1] = TOKENS as u64;
        }
        layout.push(TensorSpec { name: t.info.name.clone(), dims, ty: t.info.ty });
    }
    layout.encode("seed").unwrap().header
}

/// The corpus begins with models that can be cut.
#[test]
fn every_architecture_is_in_the_corpus() {
    let seeds = corpus();
    for &arch in Arch::ALL {
        let bytes = seed(arch);
        assert!(bytes.len() <= 4096, "{} bytes for {}", bytes.len(), arch.name());
        assert!(seeds.contains(&bytes), "no seed for {}: run the ignored test `write_seeds`", arch.name());
        let model = fuzz::open(&bytes).unwrap();
        let facts = model.facts().unwrap();
        facts.check_range(0, layers(arch)).unwrap();
        assert_eq!(model.tokenizer().unwrap().n_tokens, TOKENS as u32);
        splitmodel_gguf::SlicePlan::new(&model, Package::Stage { first: 0, end: layers(arch) }).unwrap();
    }
}

#[test]
#[ignore = "writes the seeds; for after a change of the tiny models"]
fn write_seeds() {
    std::fs::create_dir_all(folder()).unwrap();
    for &arch in Arch::ALL {
        std::fs::write(folder().join(arch.name()), seed(arch)).unwrap();
    }
}
