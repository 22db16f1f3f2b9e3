//! CPU dispatch: one build serves every x86-64 processor. The baseline backend alone gives whole and cut models the same
//! bits, and neither it nor the libraries that are always loaded hold an instruction that an old processor lacks.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Chain, argmax, assert_same, config, run};
use iced_x86::{Decoder, DecoderOptions, Mnemonic};
use splitmodel_engine::{CacheType, EngineConfig, FlashAttention, Slice, backends_dir};
use splitmodel_gguf::Model;
use splitmodel_gguf::tiny::{Arch, Tiny};

const OUT: &str = "SPLITMODEL_TEST_LOGITS";
const BASELINE: &str = "libggml-cpu-x64.so";

/// A tiny model, whole and in three slices: logits of a prompt and of five tokens of its own.
fn logits(arch: Arch) -> Vec<Vec<f32>> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    Tiny::new(arch).write(&path).unwrap();
    // What moves logits least between kernels.
    let config = EngineConfig {
        n_ctx: 256,
        flash_attn: FlashAttention::Off,
        cache_type_k: CacheType::F32,
        cache_type_v: CacheType::F32,
        ..config()
    };
    let whole = Slice::load_whole(&path, &config, &mut |_| true).unwrap();
    let model = Model::open(&path).unwrap();
    let layers = model.facts().unwrap().n_layers;
    let tokens: Vec<i32> = (0..40).map(|i| 20 + (i * 37) % 200).collect();
    let drive = |chain: &mut Chain| {
        let mut out = chain.decode(&run(0, 0, &tokens)).unwrap();
        for at in 40..45 {
            let next = argmax(out.last().unwrap());
            out.extend(chain.decode(&[(0, at, next, true)]).unwrap());
        }
        out
    };
    let reference = drive(&mut Chain(vec![whole]));
    assert_same(&drive(&mut Chain::of(&model, &[0, 3, 6, layers], &config)), &reference, arch.name());
    reference
}

const ARCHS: [Arch; 3] = [Arch::Llama, Arch::Qwen3, Arch::FalconH1];

fn all_logits() -> Vec<f32> {
    ARCHS.into_iter().flat_map(logits).flatten().collect()
}

/// Libraries of ggml and llama.cpp that this process has loaded.
fn loaded() -> BTreeSet<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).map(PathBuf::from);
    let ours = |p: &PathBuf| {
        let name = p.file_name().and_then(|n| n.to_str()).unwrap_or_default();
        name.starts_with("libggml") || name.starts_with("libllama")
    };
    paths.filter(ours).collect()
}

fn cpu_backends() -> Vec<String> {
    let name = |p: PathBuf| p.file_name().unwrap().to_str().unwrap().to_owned();
    loaded().into_iter().map(name).filter(|n| n.starts_with("libggml-cpu")).collect()
}

#[test]
#[ignore = "the process of the test below that has the baseline backend alone"]
fn baseline() {
    let Some(out) = std::env::var_os(OUT) else { return };
    let logits = all_logits();
    assert_eq!(cpu_backends(), [BASELINE]);
    let bytes: Vec<u8> = logits.iter().flat_map(|l| l.to_le_bytes()).collect();
    std::fs::write(out, bytes).unwrap();
}

#[test]
fn the_baseline_backend_alone_computes_the_same_model() {
    let here = backends_dir().unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(here.join(BASELINE), dir.path().join(BASELINE)).unwrap();
    let file = dir.path().join("logits");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "baseline"])
        .env("SPLITMODEL_BACKENDS", dir.path())
        .env(OUT, &file)
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    let bytes = std::fs::read(file).unwrap();
    let there: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();

    // Here the best backend was chosen.
    let best = all_logits();
    let chosen = cpu_backends();
    assert_eq!(chosen.len(), 1, "{chosen:?}");
    assert!(chosen != [BASELINE] || !std::is_x86_feature_detected!("avx2"), "{chosen:?} on a processor with AVX2");
    assert!(chosen != ["libggml-cpu-sapphirerapids.so"], "AMX, which rules out repacked weights");
    assert_eq!(there.len(), best.len());
    let near = |a: f32, b: f32| (a - b).abs() <= 1e-2 + 1e-2 * b.abs();
    let far = there.iter().zip(&best).filter(|&(&a, &b)| !near(a, b)).count();
    assert_eq!(far, 0, "of {} logits of {BASELINE}, {far} are far from those of {chosen:?}", best.len());
}

/// Parts of an ELF file that are mapped to be executed.
fn executable(file: &[u8]) -> Vec<&[u8]> {
    let int = |at: usize, n: usize| file[at..at + n].iter().rev().fold(0usize, |v, &b| v << 8 | usize::from(b));
    assert!(file.starts_with(b"\x7fELF\x02\x01"), "a 64-bit little-endian ELF file");
    let (table, size, count) = (int(0x20, 8), int(0x36, 2), int(0x38, 2));
    let headers = (0..count).map(|i| table + i * size);
    // PT_LOAD with PF_X
    let wanted = headers.filter(|&h| int(h, 4) == 1 && int(h + 4, 4) & 1 == 1);
    wanted.map(|h| &file[int(h + 8, 8)..][..int(h + 32, 8)]).collect()
}

/// Extensions beyond x86-64's baseline (SSE2) that the instructions of a library need.
fn extensions(library: &Path) -> BTreeSet<String> {
    let file = std::fs::read(library).unwrap();
    let mut found = BTreeSet::new();
    for code in executable(&file) {
        assert!(!code.is_empty());
        for instruction in Decoder::new(64, code, DecoderOptions::NONE) {
            // An old processor reads TZCNT as BSF; compilers use it as such.
            if instruction.mnemonic() == Mnemonic::Tzcnt {
                continue;
            }
            let needs = instruction.cpuid_features().iter().map(|f| format!("{f:?}"));
            let beyond = |f: &String| {
                let families =
                    ["AVX", "FMA", "F16C", "BMI", "LZCNT", "POPCNT", "MOVBE", "AMX", "SSE3", "SSSE3", "SSE4"];
                families.iter().any(|family| f.starts_with(family))
            };
            found.extend(needs.filter(beyond));
        }
    }
    found
}

#[test]
fn what_every_processor_loads_needs_no_extension() {
    let dir = backends_dir().unwrap();
    let mut always: Vec<PathBuf> =
        loaded().into_iter().filter(|p| !p.file_name().unwrap().to_str().unwrap().starts_with("libggml-cpu")).collect();
    for wanted in ["libllama.so", "libggml-base.so", "libggml.so"] {
        assert!(always.iter().any(|p| p.to_str().unwrap().contains(wanted)), "{wanted}: {always:?}");
    }
    always.push(dir.join(BASELINE));
    for library in always {
        assert_eq!(extensions(&library), BTreeSet::new(), "{}", library.display());
    }
    // The look itself sees them where they are.
    let found = extensions(&dir.join("libggml-cpu-haswell.so"));
    assert!(found.contains("AVX2") && found.contains("FMA"), "{found:?}");
}
