//! Slices of tiny models: right tensors, right metadata, right bytes, for every legal cut.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // helpers of tests are tests too

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use splitmodel_gguf::slice::keys;
use splitmodel_gguf::tiny::{Arch, N_EMBD, N_VOCAB, Tiny};
use splitmodel_gguf::{EmbeddingFile, Error, Model, ModelFacts, Package, SlicePlan, TensorRef, TensorType};

fn tiny(dir: &Path, arch: Arch) -> Model {
    let path = dir.join(format!("{}.gguf", arch.name()));
    Tiny::new(arch).write(&path).unwrap();
    Model::open(path).unwrap()
}

fn data(model: &Model, t: TensorRef<'_>) -> Vec<u8> {
    let mut buf = vec![0; t.info.bytes as usize];
    model.read_at(t.shard, t.info.offset, &mut buf).unwrap();
    buf
}

fn write(model: &Model, package: Package, path: &Path) -> Model {
    let plan = SlicePlan::new(model, package).unwrap();
    let mut last = (0, 0);
    let written = plan.write(path, &mut |done, total| last = (done, total)).unwrap();
    assert_eq!(last, (plan.total_bytes(), plan.total_bytes()));
    assert_eq!(written.bytes, plan.total_bytes());
    assert_eq!(std::fs::metadata(path).unwrap().len(), plan.total_bytes());
    let hash = blake3::hash(&std::fs::read(path).unwrap());
    assert_eq!(hash.to_hex().as_str(), written.blake3);
    Model::open(path).unwrap()
}

fn check_stage(model: &Model, slice: &Model, first: u32, end: u32) {
    let facts = model.facts().unwrap();
    let h = slice.header();
    let last = end == facts.n_layers;
    assert_eq!(h.u32(&slice.arch_key("block_count")).unwrap(), Some(end - first));
    assert_eq!(h.u32(&slice.arch_key("vocab_size")).unwrap(), Some(if last { N_VOCAB } else { 1 }));
    assert_eq!(h.str("tokenizer.ggml.model").unwrap(), Some("no_vocab"));
    assert!(h.get("tokenizer.ggml.tokens").is_none() && h.get("tokenizer.chat_template").is_none());
    assert_eq!(h.str(keys::MODEL).unwrap(), Some(model.digest()));
    assert_eq!((h.u32(keys::FIRST).unwrap(), h.u32(keys::END).unwrap()), (Some(first), Some(end)));
    let mut expected = 1;
    for t in model.tensors() {
        let name = match t.info.name.strip_prefix("blk.").and_then(|r| r.split_once('.')) {
            Some((i, rest)) => match i.parse::<u32>().unwrap() {
                i if (first..end).contains(&i) => format!("blk.{}.{rest}", i - first),
                _ => continue,
            },
            None if ["token_embd.weight", "output.weight"].contains(&t.info.name.as_str()) => continue,
            None => t.info.name.clone(),
        };
        let copy = slice.tensor(&name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!((&copy.info.dims, copy.info.ty), (&t.info.dims, t.info.ty), "{name}");
        assert_eq!(data(slice, copy), data(model, t), "{name}");
        expected += 1;
    }
    assert_eq!(slice.tensors().count(), expected, "no tensor that llama.cpp would not ask for");
    let table = slice.tensor("token_embd.weight").unwrap();
    if last {
        let head = model.tensor("output.weight").or_else(|| model.tensor("token_embd.weight")).unwrap();
        assert_eq!(table.info.ty, head.info.ty);
        assert_eq!(data(slice, table), data(model, head));
    } else {
        assert_eq!((table.info.dims.as_slice(), table.info.ty), (&[N_EMBD, 1][..], TensorType::F32));
        assert!(data(slice, table).iter().all(|&b| b == 0));
    }
    // what the layers are, seen from the slice, is what they were in the whole
    let range = first as usize..end as usize;
    assert_eq!(slice.facts().unwrap().layers, facts.layers[range]);
}

#[test]
fn every_legal_cut_of_every_family_gives_the_right_slices() {
    for &arch in Arch::ALL {
        let dir = tempfile::tempdir().unwrap();
        let model = tiny(dir.path(), arch);
        let facts = model.facts().unwrap();
        assert!(facts.legal_cuts.len() >= 4, "{}: {:?}", arch.name(), facts.legal_cuts);
        assert_eq!(facts.legal_cuts.len() + facts.illegal_cuts.len(), facts.n_layers as usize - 1);
        let n = facts.n_layers;
        let mut ranges = vec![(0, n)];
        for &cut in &facts.legal_cuts {
            ranges.extend([(0, cut), (cut, n)]);
        }
        ranges.push((facts.legal_cuts[0], *facts.legal_cuts.last().unwrap()));
        for (first, end) in ranges {
            let slice = write(&model, Package::Stage { first, end }, &dir.path().join("slice.gguf"));
            check_stage(&model, &slice, first, end);
        }
    }
}

#[test]
fn illegal_ranges_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let refuse = |arch, first, end| {
        let model = tiny(dir.path(), arch);
        SlicePlan::new(&model, Package::Stage { first, end }).unwrap_err().to_string()
    };
    assert!(refuse(Arch::Gemma3, 5, 6).contains("sliding-window"));
    assert!(refuse(Arch::Lfm2, 0, 1).contains("an attention layer"));
    assert!(refuse(Arch::GraniteHybrid, 4, 5).contains("a recurrent layer"));
    assert!(refuse(Arch::Llama, 3, 3).contains("no range"));
    assert!(refuse(Arch::Llama, 4, 3).contains("no range"));
    assert!(refuse(Arch::Llama, 0, 9).contains("model with 8"));
}

#[test]
fn metadata_that_depends_on_the_place_of_a_slice_is_rewritten() {
    let dir = tempfile::tempdir().unwrap();
    let cut = |arch, first, end| {
        let model = tiny(dir.path(), arch);
        write(&model, Package::Stage { first, end }, &dir.path().join("slice.gguf"))
    };
    let pattern = |m: &Model| m.header().per_layer_u32("gemma3.attention.sliding_window_pattern", 3).unwrap().unwrap();
    assert_eq!(pattern(&cut(Arch::Gemma3, 0, 3)), [1, 1, 1]);
    assert_eq!(pattern(&cut(Arch::Gemma3, 4, 7)), [1, 0, 1]);
    let heads =
        |m: &Model, arch: &str| m.header().per_layer_u32(&format!("{arch}.attention.head_count_kv"), 3).unwrap();
    assert_eq!(heads(&cut(Arch::Lfm2, 3, 6), "lfm2"), Some(vec![0, 2, 0]));
    let scale = |m: &Model| m.header().f32("granitehybrid.embedding_scale").unwrap();
    assert_eq!(scale(&cut(Arch::GraniteHybrid, 0, 3)), Some(3.0));
    assert_eq!(scale(&cut(Arch::GraniteHybrid, 3, 6)), Some(1.0));
}

#[test]
fn facts_of_the_families() {
    let dir = tempfile::tempdir().unwrap();
    let facts = |arch| tiny(dir.path(), arch).facts().unwrap();
    let llama = facts(Arch::Llama);
    assert!(!llama.tied_head);
    assert_eq!((llama.n_embd, llama.n_vocab, llama.n_layers, llama.context_train), (128, N_VOCAB, 8, 4096));
    assert_eq!(llama.embedding_bytes, 128 * 320 * 4);
    assert_eq!(llama.legal_cuts, (1..8).collect::<Vec<_>>());
    assert_eq!(llama.layers[0].kv_bytes_per_token(TensorType::F16, TensorType::Q8_0), 64 * 2 + 2 * 34);
    let gemma = facts(Arch::Gemma3);
    let windows: Vec<_> = gemma.layers.iter().map(|l| l.window).collect();
    assert_eq!(windows, [Some(32), Some(32), Some(32), Some(32), Some(32), None, Some(32), Some(32)]);
    let lfm2 = facts(Arch::Lfm2);
    assert_eq!(
        (lfm2.layers[0].recurrent, lfm2.layers[0].attends(), lfm2.layers[0].recurrent_bytes),
        (true, false, 2 * 128 * 4)
    );
    assert_eq!((lfm2.layers[1].recurrent, lfm2.layers[1].attends(), lfm2.layers[1].recurrent_bytes), (false, true, 0));
    let falcon = facts(Arch::FalconH1);
    assert!(falcon.layers.iter().all(|l| l.recurrent && l.attends()));
    assert_eq!(falcon.layers[0].recurrent_bytes, (3 * (128 + 64) + 32 * 128) * 4);
    let json = serde_json::to_string(&falcon).unwrap();
    assert_eq!(serde_json::from_str::<splitmodel_gguf::ModelFacts>(&json).unwrap(), falcon);
}

#[test]
fn all_bytes_of_a_model_are_accounted_for() {
    let dir = tempfile::tempdir().unwrap();
    for &arch in Arch::ALL {
        let model = tiny(dir.path(), arch);
        let f = model.facts().unwrap();
        let head = if f.tied_head { 0 } else { f.head_bytes };
        let sum = f.layers.iter().map(|l| l.weight_bytes).sum::<u64>() + f.embedding_bytes + head + f.other_bytes;
        assert_eq!(sum, model.tensors().map(|t| t.info.bytes).sum::<u64>());
    }
}

#[test]
fn the_tokenizer_package_has_all_metadata_and_no_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny(dir.path(), Arch::Qwen2);
    let package = write(&model, Package::Tokenizer, &dir.path().join("tok.gguf"));
    assert_eq!(package.tensors().count(), 0);
    for key in model.header().keys() {
        assert_eq!(package.header().owned(key), model.header().owned(key), "{key}");
    }
    let facts = package.tokenizer().unwrap();
    assert_eq!(facts, model.tokenizer().unwrap());
    assert_eq!((facts.model.as_str(), facts.n_tokens), ("gpt2", N_VOCAB));
    assert!(facts.chat_template.unwrap().contains("im_start"));
    assert!(facts.eos.is_some());
}

#[test]
fn embedding_rows_are_those_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    for arch in [Arch::Llama, Arch::Qwen3] {
        let model = tiny(dir.path(), arch);
        let path = dir.path().join("embd.gguf");
        let package = write(&model, Package::Embedding, &path);
        assert_eq!(package.tensors().count(), 1);
        let table = data(&model, model.tensor("token_embd.weight").unwrap());
        let rows = EmbeddingFile::open(&path).unwrap();
        assert_eq!((rows.n_embd(), rows.rows()), (128, N_VOCAB));
        let mut out = Vec::new();
        rows.read_rows(&[0, 319, 7], &mut out).unwrap();
        let size = rows.row_bytes();
        let expected: Vec<_> = [0, 319, 7].iter().flat_map(|&i| table[i * size..(i + 1) * size].to_vec()).collect();
        assert_eq!(out, expected);
        for outside in [-1, 320, i32::MAX, i32::MIN] {
            let e = rows.read_rows(&[3, outside], &mut out).unwrap_err();
            assert!(matches!(e, Error::Token { token, .. } if token == i64::from(outside)));
        }
        assert_eq!(out.len(), 3 * size, "nothing is appended by a refused call");
        let same = EmbeddingFile::from_model(Arc::new(model)).unwrap();
        let mut direct = Vec::new();
        same.read_rows(&[0, 319, 7], &mut direct).unwrap();
        assert_eq!(direct, out);
    }
}

#[test]
fn shards_are_one_model() {
    let dir = tempfile::tempdir().unwrap();
    let whole = tiny(dir.path(), Arch::Gemma3);
    let paths = Tiny::new(Arch::Gemma3).write_shards(&dir.path().join("m"), 3).unwrap();
    let sharded = Model::open(&paths[1]).unwrap();
    assert_eq!(sharded.headers().count(), 3);
    let [mut a, mut b] = [whole.facts().unwrap(), sharded.facts().unwrap()];
    assert_ne!(a.digest, b.digest);
    a.digest.clear();
    b.digest.clear();
    assert_eq!(a, b);
    let slice = write(&sharded, Package::Stage { first: 2, end: 8 }, &dir.path().join("slice.gguf"));
    assert!(slice.header().keys().all(|k| !k.starts_with("split.")));
    check_stage(&sharded, &slice, 2, 8);
    write(&sharded, Package::Tokenizer, &dir.path().join("tok.gguf"));

    std::fs::remove_file(&paths[2]).unwrap();
    assert!(Model::open(&paths[0]).unwrap_err().to_string().contains("00003-of-00003"));
    std::fs::copy(&paths[1], &paths[2]).unwrap();
    assert!(Model::open(&paths[0]).unwrap_err().to_string().contains("split.no is not 2"));
    std::fs::copy(&paths[0], dir.path().join("alone.gguf")).unwrap();
    assert!(Model::open(dir.path().join("alone.gguf")).unwrap_err().to_string().contains("has 3 shards, but 1"));
}

#[test]
fn the_same_weights_have_the_same_digest_and_others_another() {
    let dir = tempfile::tempdir().unwrap();
    let digest = |seed, name: &str| {
        let path = dir.path().join(name);
        Tiny { seed, ..Tiny::new(Arch::Llama) }.write(&path).unwrap();
        Model::open(path).unwrap().digest().to_owned()
    };
    let first = digest(1, "a.gguf");
    assert_eq!(first, digest(1, "b.gguf"));
    assert_ne!(first, digest(2, "c.gguf"));
    // as a fine-tune does: equal header, other weights
    let path = dir.path().join("a.gguf");
    let mut bytes = std::fs::read(&path).unwrap();
    let model = Model::open(&path).unwrap();
    for t in model.tensors() {
        bytes[t.info.offset as usize..][..t.info.bytes as usize].iter_mut().for_each(|b| *b ^= 1);
    }
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(first, Model::open(&path).unwrap().digest());
}

#[test]
fn a_full_disk_is_named_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny(dir.path(), Arch::Llama);
    let plan = SlicePlan::new(&model, Package::Stage { first: 0, end: 4 }).unwrap();
    let mut full = File::options().write(true).open("/dev/full").unwrap();
    let e = plan.write_to("target", &mut full, &mut |_, _| {}).unwrap_err();
    assert!(matches!(e, Error::DiskFull { needed, .. } if needed == plan.total_bytes()), "{e}");
    let missing = dir.path().join("no/such/dir/x.gguf");
    assert!(matches!(plan.write(&missing, &mut |_, _| {}), Err(Error::Io { .. })));
}

#[test]
fn a_package_of_a_file_that_shrank_is_refused_and_not_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let model = tiny(dir.path(), Arch::Llama);
    File::options().write(true).open(model.file()).unwrap().set_len(model.header().data_offset() + 5000).unwrap();
    let plan = SlicePlan::new(&model, Package::Stage { first: 0, end: 4 }).unwrap();
    let out = tempfile::tempdir().unwrap();
    let e = plan.write(&out.path().join("x.gguf"), &mut |_, _| {}).unwrap_err();
    assert!(e.to_string().contains("llama.gguf"), "{e}");
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0);
}

#[test]
fn facts_of_every_architecture_survive_as_short_text() {
    for &arch in Arch::ALL {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        Tiny::new(arch).write(&path).unwrap();
        let facts = Model::open(&path).unwrap().facts().unwrap();
        let text = facts.to_compact().unwrap();
        assert!(text.len() < 400, "{}: {} bytes", arch.name(), text.len());
        assert_eq!(ModelFacts::from_compact(&text).unwrap(), facts, "{}", arch.name());
    }
}
