//! What is asked for and cannot be had is an error that says what there is.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::path::{Path, PathBuf};

use common::{config, files, package, sample_model};
use splitmodel_engine::{
    CacheType, DeviceKind, EngineConfig, EngineError, FlashAttention, Slice, SliceFiles, Tokenizer, backends_dir,
    devices, llama_version, to_f32,
};
use splitmodel_gguf::Package;

fn refused(config: &EngineConfig) -> EngineError {
    Slice::load(&files(22, 30), config, &mut |_| true).err().unwrap()
}

fn refused_file(slice: &Path) -> String {
    let files = SliceFiles { slice: slice.to_owned(), embedding: None };
    let error = Slice::load(&files, &config(), &mut |_| true).err().unwrap();
    assert!(matches!(error, EngineError::File { .. }), "{error}");
    error.to_string()
}

#[test]
fn the_devices_of_this_machine_are_listed() {
    let devices = devices().unwrap();
    let cpu = devices.iter().find(|d| d.kind == DeviceKind::Cpu).unwrap();
    assert_eq!(cpu.name, "CPU");
    assert!(cpu.memory_total > 0 && cpu.memory_free <= cpu.memory_total);
    assert!(backends_dir().unwrap().is_dir());
    assert!(!llama_version().is_empty());
}

#[test]
fn missing_devices_are_errors() {
    let error = refused(&EngineConfig { n_gpu_layers: None, devices: vec!["CUDA7".into()], ..config() });
    assert!(matches!(&error, EngineError::NoDevice { name, .. } if name == "CUDA7"), "{error}");
    // The CPU is not a device to put layers on.
    let error = refused(&EngineConfig { n_gpu_layers: None, devices: vec!["CPU".into()], ..config() });
    assert!(matches!(&error, EngineError::NoDevice { .. }), "{error}");
    if devices().unwrap().iter().all(|d| d.kind == DeviceKind::Cpu || d.kind == DeviceKind::Accelerator) {
        let error = refused(&EngineConfig { n_gpu_layers: Some(99), ..config() });
        assert!(matches!(&error, EngineError::NoGpu { layers: 99, available } if available.contains("CPU")), "{error}");
        // Nothing was asked for: the CPU serves.
        Slice::load(&files(22, 30), &EngineConfig { n_gpu_layers: None, ..config() }, &mut |_| true).unwrap();
    }
}

#[test]
fn unreachable_rpc_servers_are_errors() {
    for endpoint in ["127.0.0.1:1", "no-such-host.invalid:7000", "nonsense", "127.0.0.1:7000\0"] {
        let config = EngineConfig { n_gpu_layers: None, rpc: vec![endpoint.into()], ..config() };
        let error = refused(&config);
        assert!(matches!(&error, EngineError::Rpc { endpoint: e, .. } if e == endpoint), "{error}");
    }
}

#[test]
fn impossible_configurations_are_errors() {
    let error = refused(&EngineConfig { cache_type_v: CacheType::Q4_0, flash_attn: FlashAttention::Off, ..config() });
    assert!(matches!(&error, EngineError::Config { field: "cache_type_v", .. }), "{error}");
}

#[test]
fn bad_files_never_reach_llama_cpp() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { dir.path().join(name) };
    assert!(refused_file(&path("missing.gguf")).contains("missing.gguf"));
    std::fs::write(path("garbage.gguf"), [0x5a; 4096]).unwrap();
    refused_file(&path("garbage.gguf"));
    std::fs::write(path("empty.gguf"), []).unwrap();
    refused_file(&path("empty.gguf"));
    let good = std::fs::read(package(Package::Stage { first: 22, end: 30 })).unwrap();
    for keep in [64, 10_000, good.len() / 2, good.len() - 1] {
        std::fs::write(path("short.gguf"), &good[..keep]).unwrap();
        refused_file(&path("short.gguf"));
    }
    // A whole model is not a stage, neither are the other packages.
    for other in [sample_model(), package(Package::Tokenizer), package(Package::Embedding)] {
        refused_file(&other);
    }
    assert!(refused_file(&package(Package::Stage { first: 0, end: 22 })).contains("embedding package"));
    let stray = SliceFiles { slice: files(0, 22).slice, embedding: Some(path("garbage.gguf")) };
    assert!(matches!(Slice::load(&stray, &config(), &mut |_| true), Err(EngineError::File { .. })));
    let no_table = SliceFiles { slice: files(0, 22).slice, embedding: Some(package(Package::Tokenizer)) };
    assert!(matches!(Slice::load(&no_table, &config(), &mut |_| true), Err(EngineError::File { .. })));
    assert!(matches!(Tokenizer::load(&path("garbage.gguf")), Err(EngineError::File { .. })));
    assert!(matches!(to_f32(&path("garbage.gguf"), &path("out.gguf")), Err(EngineError::File { .. })));
    assert!(!path("out.gguf").exists());
}

#[test]
fn a_tensor_of_a_wrong_shape_is_named_and_no_other_try_helps() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("turned.gguf");
    let mut bytes = std::fs::read(package(Package::Stage { first: 22, end: 30 })).unwrap();
    // The type of the name's end is followed by the number of dimensions and by them; as many bytes the other way around.
    let name = b"ffn_up.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4;
    let (rows, columns) = (bytes[at..at + 8].to_vec(), bytes[at + 8..at + 16].to_vec());
    assert_ne!(rows, columns);
    bytes[at..at + 16].copy_from_slice(&[columns, rows].concat());
    std::fs::write(&path, bytes).unwrap();
    let error = Slice::load(&SliceFiles { slice: path, embedding: None }, &config(), &mut |_| true).err().unwrap();
    assert!(matches!(error, EngineError::Load { .. }) && error.is_permanent(), "{error}");
    assert!(error.to_string().contains("ffn_up.weight") && error.to_string().contains("wrong shape"), "{error}");

    let reason = "error loading model: unable to allocate CPU buffer".to_owned();
    assert!(!EngineError::Load { path: PathBuf::new(), reason }.is_permanent(), "memory may be there later");
}

#[test]
fn loading_reports_progress_and_can_be_cancelled() {
    let mut seen = Vec::new();
    let slice = Slice::load(&files(22, 30), &config(), &mut |share| {
        seen.push(share);
        true
    })
    .unwrap();
    assert!(seen.windows(2).all(|w| w[0] <= w[1]), "{seen:?}");
    assert_eq!(seen.last(), Some(&1.0));
    let memory = slice.memory();
    assert!(memory.weights > 10_000_000 && memory.kv > 0 && memory.compute > 0, "{memory:?}");
    assert_eq!((slice.layers(), slice.n_vocab(), slice.lanes(), slice.cells()), ((22, 30), 49152, 4, 1024));
    let cancelled = Slice::load(&files(22, 30), &config(), &mut |share| share < 0.5);
    assert!(matches!(cancelled, Err(EngineError::Cancelled { .. })));
}
