//! Models whose metadata contradict themselves: refused by key or tensor, never a panic.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests are tests too

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use proptest::prelude::*;
use splitmodel_gguf::encode::{Layout, TensorSpec};
use splitmodel_gguf::tiny::{Arch, Tiny};
use splitmodel_gguf::value::OwnedValue;
use splitmodel_gguf::{Model, Package, SlicePlan};

/// The tiny model of `arch`, made once.
fn bytes_of(arch: Arch) -> Vec<u8> {
    static MADE: LazyLock<Mutex<HashMap<Arch, Vec<u8>>>> = LazyLock::new(Mutex::default);
    let make = || {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        Tiny { layers: 6, ..Tiny::new(arch) }.write(&path).unwrap();
        std::fs::read(path).unwrap()
    };
    MADE.lock().unwrap_or_else(PoisonError::into_inner).entry(arch).or_insert_with(make).clone()
}

fn open(bytes: Vec<u8>) -> splitmodel_gguf::Result<Model> {
    Model::from_sources(vec![Arc::new(bytes)])
}

/// The model with `changes` to its metadata and without the tensor `drop`.
fn changed(arch: Arch, changes: &[(&str, OwnedValue)], drop: Option<&str>) -> Model {
    let base = open(bytes_of(arch)).unwrap();
    let mut layout = Layout::default();
    for key in base.header().keys() {
        layout.set(key, base.header().owned(key).unwrap());
    }
    for (key, value) in changes {
        let key = if key.contains("general.") || key.starts_with("tokenizer.") {
            (*key).to_owned()
        } else {
            base.arch_key(key)
        };
        layout.set(key, value.clone());
    }
    for t in base.tensors().filter(|t| Some(t.info.name.as_str()) != drop) {
        layout.push(TensorSpec { name: t.info.name.clone(), dims: t.info.dims.clone(), ty: t.info.ty });
    }
    let encoded = layout.encode("changed").unwrap();
    let mut bytes = encoded.header;
    bytes.resize(encoded.total_bytes as usize, 0);
    open(bytes).unwrap()
}

fn refused(arch: Arch, key: &str, value: OwnedValue) -> String {
    changed(arch, &[(key, value)], None).facts().unwrap_err().to_string()
}

#[test]
fn what_llama_cpp_would_abort_on_is_refused_by_key() {
    changed(Arch::Llama, &[], None).facts().unwrap();
    let u = OwnedValue::u32;
    // the key that is changed, and the one that the refusal names where another is contradicted
    let same = "";
    for (arch, key, value, named) in [
        (Arch::Llama, "block_count", u(0), same),
        (Arch::Llama, "block_count", u(513), same),
        (Arch::Llama, "embedding_length", u(0), same),
        (Arch::Llama, "context_length", u(0), same),
        (Arch::Llama, "attention.head_count", u(0), same),
        (Arch::Llama, "attention.head_count", OwnedValue::u32s(&[4, 4, 4, 4, 4, 2]), same),
        (Arch::Llama, "attention.head_count", OwnedValue::str("4"), same),
        (Arch::Llama, "attention.head_count_kv", u(3), same),
        (Arch::Llama, "attention.head_count_kv", u(0), same),
        (Arch::Llama, "attention.head_count_kv", OwnedValue::u32s(&[2; 5]), same),
        (Arch::Llama, "attention.key_length", u(0), same),
        (Arch::Llama, "attention.key_length", u(31), same),
        (Arch::Llama, "attention.value_length", u(16), "attention.key_length"),
        (Arch::Gemma3, "attention.key_length_swa", u(16), same),
        (Arch::Llama, "rope.dimension_count", u(16), same),
        (Arch::FalconH1, "rope.dimension_count", u(64), same),
        (Arch::Llama, "rope.scaling.type", OwnedValue::str("nonsense"), same),
        (Arch::Llama, "expert_count", u(8), "expert_used_count"),
        (Arch::Llama, "expert_count", u(2000), same),
        (Arch::Llama, "expert_used_count", u(1), same),
        (Arch::Gemma3, "attention.sliding_window_pattern", OwnedValue::bools(&[true; 3]), same),
        (Arch::FalconH1, "ssm.inner_size", u(100), same),
        (Arch::FalconH1, "ssm.group_count", u(3), "ssm.inner_size"),
        (Arch::FalconH1, "ssm.time_step_rank", u(0), "ssm.inner_size"),
        (Arch::FalconH1, "ssm.conv_kernel", u(1), same),
        (Arch::GraniteHybrid, "ssm.inner_size", u(128), same),
        (Arch::Lfm2, "shortconv.l_cache", u(1), same),
    ] {
        let message = refused(arch, key, value.clone());
        let named = format!("'{}.{}'", arch.name(), if named.is_empty() { key } else { named });
        assert!(message.contains(&named), "{key} {value:?}: wanted {named}, got: {message}");
    }
}

#[test]
fn missing_tensors_and_layers_are_refused_by_name() {
    let without = |arch, tensor| changed(arch, &[], Some(tensor)).facts().unwrap_err().to_string();
    assert!(without(Arch::Llama, "token_embd.weight").contains("'token_embd.weight': is missing"));
    assert!(without(Arch::FalconH1, "blk.3.ssm_conv1d.bias").contains("blk.3.ssm_conv1d.bias"));
    assert!(refused(Arch::Llama, "block_count", OwnedValue::u32(7)).contains("blk.6.*"));
    assert!(refused(Arch::Llama, "block_count", OwnedValue::u32(5)).contains("belongs to layer 5"));
    assert!(refused(Arch::Llama, "tokenizer.ggml.tokens", OwnedValue::strs(&["a"])).contains("320 rows"));
}

#[test]
fn unsupported_models_are_refused_with_the_reason() {
    let arch = |name: &str| changed(Arch::Llama, &[("general.architecture", OwnedValue::str(name))], None);
    let e = arch("gemma3n").facts().unwrap_err().to_string();
    assert!(e.contains("'gemma3n' cannot be split: more than one tensor"), "{e}");
    assert!(arch("newest").facts().unwrap_err().to_string().contains("supported are llama"));
    assert!(SlicePlan::new(&arch("newest"), Package::Stage { first: 0, end: 1 }).is_err());
    let e = refused(Arch::Qwen3, "nextn_predict_layers", OwnedValue::u32(1));
    assert!(e.contains("predict several tokens"), "{e}");
}

#[test]
fn special_layer_counts_are_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for (layers, cuts) in [(62, 0), (63, 60)] {
        Tiny { layers, ..Tiny::new(Arch::Gemma3) }.write(&path).unwrap();
        let facts = Model::open(&path).unwrap().facts().unwrap();
        assert_eq!(facts.legal_cuts.len(), cuts, "{layers}: {:?}", facts.illegal_cuts);
        facts.check_range(0, layers).unwrap();
        assert!(facts.check_range(0, 62.min(layers - 1)).is_err());
    }
}

fn any_value() -> impl Strategy<Value = OwnedValue> {
    prop_oneof![
        any::<u32>().prop_map(OwnedValue::u32),
        (0u32..10).prop_map(OwnedValue::u32),
        any::<u64>().prop_map(OwnedValue::u64),
        any::<i32>().prop_map(OwnedValue::i32),
        any::<f32>().prop_map(OwnedValue::f32),
        any::<bool>().prop_map(OwnedValue::bool),
        prop::collection::vec(any::<u8>(), 0..9).prop_map(OwnedValue::str),
        prop::collection::vec(any::<u32>(), 6).prop_map(|v| OwnedValue::u32s(&v)),
        prop::collection::vec(0u32..5, 0..9).prop_map(|v| OwnedValue::u32s(&v)),
        prop::collection::vec(prop::collection::vec(any::<u8>(), 0..4), 6).prop_map(|v| OwnedValue::strs(&v)),
    ]
}

const KEYS: &[&str] = &[
    "block_count",
    "embedding_length",
    "context_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.key_length_swa",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "ssm.conv_kernel",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.group_count",
    "ssm.time_step_rank",
    "shortconv.l_cache",
    "embedding_scale",
    "expert_count",
    "expert_used_count",
    "vocab_size",
    "general.name",
    "general.alignment",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.chat_template",
    "rope.scaling.type",
    "rope.dimension_sections",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_metadata_gives_facts_or_an_error(
        arch in prop::sample::select(Arch::ALL),
        changes in prop::collection::vec((prop::sample::select(KEYS), any_value()), 1..4),
    ) {
        // alignment is refused when the file is opened
        let changes: Vec<_> = changes.into_iter().filter(|(k, _)| *k != "general.alignment").collect();
        let model = changed(arch, &changes, None);
        let _ = model.tokenizer();
        for package in [Package::Tokenizer, Package::Embedding] {
            let _ = SlicePlan::new(&model, package);
        }
        if let Ok(facts) = model.facts() {
            for &cut in &facts.legal_cuts {
                for (first, end) in [(0, cut), (cut, facts.n_layers)] {
                    let plan = SlicePlan::new(&model, Package::Stage { first, end }).unwrap();
                    prop_assert!(plan.total_bytes() < 2 * model.total_bytes());
                }
            }
        }
    }
}
