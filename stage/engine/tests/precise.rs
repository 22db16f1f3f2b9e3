//! The precise setting: F32 weights and caches, no flash attention. There, batch shapes hardly move logits.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{Chain, argmax, assert_same, config, prompt, run, sample_model};
use splitmodel_engine::{CacheType, EngineConfig, FlashAttention, Slice, to_f32};
use splitmodel_gguf::Model;

#[test]
fn f32_slices_are_exact_and_chunks_hardly_matter() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("f32.gguf");
    to_f32(&sample_model(), &path).unwrap();
    let model = Model::open(&path).unwrap();
    assert!(model.tensors().all(|t| t.info.ty == splitmodel_gguf::TensorType::F32));
    let config = EngineConfig {
        flash_attn: FlashAttention::Off,
        cache_type_k: CacheType::F32,
        cache_type_v: CacheType::F32,
        ..config()
    };
    let tokens = prompt();
    let mut whole = Chain(vec![Slice::load_whole(&path, &config, &mut |_| true).unwrap()]);
    let at_once = whole.decode(&run(0, 0, &tokens)).unwrap();
    let mut stages = Chain::of(&model, &[0, 17, 30], &config);
    assert_same(&stages.decode(&run(0, 0, &tokens)).unwrap(), &at_once, "F32 stages");
    let mut chunked = Vec::new();
    for (i, chunk) in tokens.chunks(5).enumerate() {
        chunked = stages.decode(&run(1, 5 * i as i32, chunk)).unwrap();
    }
    assert_eq!(argmax(&chunked[0]), argmax(&at_once[0]));
    let worst = chunked[0].iter().zip(&at_once[0]).map(|(a, b)| (a - b).abs()).fold(0.0, |m: f32, d| {
        assert!(!d.is_nan());
        m.max(d)
    });
    assert!(worst < 1e-3, "chunks move logits by {worst}");
    for file in std::fs::read_dir(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("engine-packages")).unwrap() {
        let file = file.unwrap();
        if file.file_name().to_string_lossy().starts_with(&model.digest()[..16]) {
            std::fs::remove_file(file.path()).unwrap();
        }
    }
}
