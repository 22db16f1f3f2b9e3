//! Tiny random models of every supported architecture, for tests: llama.cpp loads them, text round-trips through their
//! tokenizer, and the same description gives the same bytes everywhere.

mod layers;
mod random;
mod vocab;

use std::fs;
use std::path::{Path, PathBuf};

pub use vocab::{CHAT_TEMPLATE, N_VOCAB};

use crate::encode::{Layout, TensorSpec};
use crate::types::TensorType;
use crate::value::OwnedValue;
use crate::{Error, Result};
use random::Random;

/// Architectures that can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arch {
    /// `llama`.
    Llama,
    /// `qwen2`: biases.
    Qwen2,
    /// `qwen3`: norms of queries and keys, embedding table in BF16.
    Qwen3,
    /// `gemma3`: sliding windows of 32 tokens, scaled embeddings.
    Gemma3,
    /// `falcon-h1`: attention and Mamba 2 in every layer.
    FalconH1,
    /// `lfm2`: short convolutions, attention in every third layer.
    Lfm2,
    /// `granitehybrid`: Mamba 2, attention in every third layer.
    GraniteHybrid,
}

impl Arch {
    /// All of them.
    pub const ALL: &'static [Self] =
        &[Self::Llama, Self::Qwen2, Self::Qwen3, Self::Gemma3, Self::FalconH1, Self::Lfm2, Self::GraniteHybrid];

    /// `general.architecture`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
            Self::FalconH1 => "falcon-h1",
            Self::Lfm2 => "lfm2",
            Self::GraniteHybrid => "granitehybrid",
        }
    }

    /// Layers without KV heads, where layers differ.
    const fn is_recurrent(self, layer: u32) -> bool {
        matches!(self, Self::Lfm2 | Self::GraniteHybrid) && layer % 3 != 1
    }
}

/// Width of the models.
pub const N_EMBD: u64 = 128;
const N_HEAD: u64 = 4;
const N_HEAD_KV: u64 = 2;
const HEAD: u64 = 32;
const N_FF: u64 = 192;

/// A tiny model, not yet written.
#[derive(Debug, Clone, Copy)]
pub struct Tiny {
    /// Architecture.
    pub arch: Arch,
    /// Layers: at least 3, so that hybrids attend somewhere.
    pub layers: u32,
    /// Seed of the weights.
    pub seed: u64,
    /// Whether the embedding table is the output head too.
    pub tied: bool,
    /// Context length it claims, in tokens.
    pub context: u32,
    /// Whether matrices, embedding table and head are in Q4_0, where their rows allow it.
    pub q4_0: bool,
}

/// A tensor and its contents.
pub(crate) struct Tensor {
    spec: TensorSpec,
    data: Vec<u8>,
}

/// Collects tensors.
pub(crate) struct Builder {
    random: Random,
    tensors: Vec<Tensor>,
    q4_0: bool,
}

/// Weights of a block of Q4_0.
const BLOCK: usize = 32;

/// A block of Q4_0: a scale, a power of two here, and values of four bits, the halves of the block interleaved.
fn q4_0(values: &[f32]) -> Vec<u8> {
    let largest = values.iter().fold(0f32, |m, v| m.max(v.abs()));
    // what an f16 holds as a normal number
    let exponent = (largest / 7.0).log2().ceil().clamp(-14.0, 15.0) as i32;
    let quant = |v: f32| ((v / (exponent as f32).exp2()).round() + 8.0).clamp(0.0, 15.0) as u8;
    let mut block = (((exponent + 15) as u16) << 10).to_le_bytes().to_vec();
    let (low, high) = values.split_at(values.len() / 2);
    block.extend(low.iter().zip(high).map(|(&l, &h)| quant(l) | quant(h) << 4));
    block
}

impl Builder {
    fn push(&mut self, name: String, dims: &[u64], ty: TensorType, mut value: impl FnMut(&mut Random) -> f32) {
        let values: Vec<f32> = (0..dims.iter().product::<u64>()).map(|_| value(&mut self.random)).collect();
        let data = match ty {
            // a bf16 is the upper half of an f32
            TensorType::BF16 => values.iter().flat_map(|v| v.to_le_bytes().into_iter().skip(2)).collect(),
            TensorType::Q4_0 => values.chunks(BLOCK).flat_map(q4_0).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        self.tensors.push(Tensor { spec: TensorSpec { name, dims: dims.to_vec(), ty }, data });
    }

    /// A matrix from `input` to `output` elements that keeps the size of what goes through.
    fn matrix(&mut self, name: String, input: u64, output: u64) {
        #[allow(clippy::cast_precision_loss)] // small integers
        let scale = 1.0 / (input as f32).sqrt();
        let ty = if self.q4_0 && input.is_multiple_of(BLOCK as u64) { TensorType::Q4_0 } else { TensorType::F32 };
        self.push(name, &[input, output], ty, |r| r.normal() * scale);
    }

    /// Elements around `middle`.
    fn around(&mut self, name: String, dims: &[u64], middle: f32, spread: f32) {
        self.push(name, dims, TensorType::F32, |r| middle + r.normal() * spread);
    }

    fn norm(&mut self, name: String, n: u64) {
        self.around(name, &[n], 1.0, 0.1);
    }
}

impl Tiny {
    /// A model of `arch` with 8 layers (9 where attention and recurrent layers alternate) and context 4096; the head is tied in
    /// some architectures.
    #[must_use]
    pub const fn new(arch: Arch) -> Self {
        let layers = if matches!(arch, Arch::Lfm2 | Arch::GraniteHybrid) { 9 } else { 8 };
        let tied = matches!(arch, Arch::Qwen2 | Arch::Gemma3 | Arch::Lfm2 | Arch::GraniteHybrid);
        Self { arch, layers, seed: 1, tied, context: 4096, q4_0: false }
    }

    fn metadata(&self, layout: &mut Layout) {
        let arch = self.arch;
        let mut set = |key: &str, v: OwnedValue| layout.set(key, v);
        set("general.architecture", OwnedValue::str(arch.name()));
        set("general.name", OwnedValue::str(format!("tiny {} {}", arch.name(), self.seed)));
        let mut set = |key: &str, v: OwnedValue| layout.set(format!("{}.{key}", arch.name()), v);
        let mut int = |key: &str, n: u64| set(key, OwnedValue::u32(n as u32));
        int("context_length", self.context.into());
        int("embedding_length", N_EMBD);
        int("block_count", self.layers.into());
        int("feed_forward_length", N_FF);
        int("attention.head_count", N_HEAD);
        int("attention.key_length", HEAD);
        int("attention.value_length", HEAD);
        let heads = |i| if arch.is_recurrent(i) { 0 } else { N_HEAD_KV as u32 };
        let heads: Vec<u32> = (0..self.layers).map(heads).collect();
        let varies = matches!(arch, Arch::Lfm2 | Arch::GraniteHybrid);
        set(
            "attention.head_count_kv",
            if varies { OwnedValue::u32s(&heads) } else { OwnedValue::u32(N_HEAD_KV as u32) },
        );
        set("attention.layer_norm_rms_epsilon", OwnedValue::f32(1e-6));
        set("rope.freq_base", OwnedValue::f32(10000.0));
        set("vocab_size", OwnedValue::u32(N_VOCAB));
        layers::metadata(arch, &mut set);
        vocab::metadata(layout);
    }

    fn tensors(&self) -> Vec<Tensor> {
        let mut b = Builder { random: Random::new(self.seed), tensors: Vec::new(), q4_0: self.q4_0 };
        let table = [N_EMBD, N_VOCAB.into()];
        let head = if self.q4_0 { TensorType::Q4_0 } else { TensorType::F32 };
        let ty = if self.arch == Arch::Qwen3 && !self.q4_0 { TensorType::BF16 } else { head };
        // small beside what the layers add, or a tied head would repeat its input for ever
        b.push("token_embd.weight".to_owned(), &table, ty, |r| r.normal() * 0.25);
        b.norm(
            if self.arch == Arch::Lfm2 { "token_embd_norm.weight" } else { "output_norm.weight" }.to_owned(),
            N_EMBD,
        );
        if !self.tied {
            b.push("output.weight".to_owned(), &table, head, |r| r.normal() * 0.25);
        }
        for i in 0..self.layers {
            layers::layer(&mut b, self.arch, i);
        }
        b.tensors
    }

    /// Writes the model to `path`.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut layout = Layout::default();
        self.metadata(&mut layout);
        write(path.as_ref(), layout, &self.tensors())
    }

    /// Writes the model as `count` shards `PREFIX-00001-of-0000N.gguf`; gives their paths.
    ///
    /// # Errors
    /// [`Error::Io`] when a file cannot be written.
    pub fn write_shards(&self, prefix: &Path, count: u16) -> Result<Vec<PathBuf>> {
        let tensors = self.tensors();
        let mut paths = Vec::new();
        for (no, part) in (0..count).zip(tensors.chunks(tensors.len().div_ceil(count.max(1).into()))) {
            let mut layout = Layout::default();
            if no == 0 {
                self.metadata(&mut layout);
            }
            layout.set("split.no", OwnedValue::u16(no));
            layout.set("split.count", OwnedValue::u16(count));
            layout.set("split.tensors.count", OwnedValue::i32(tensors.len() as i32));
            let path = PathBuf::from(format!("{}-{:05}-of-{count:05}.gguf", prefix.display(), no + 1));
            write(&path, layout, part)?;
            paths.push(path);
        }
        Ok(paths)
    }
}

fn write(path: &Path, mut layout: Layout, tensors: &[Tensor]) -> Result<()> {
    for t in tensors {
        layout.push(t.spec.clone());
    }
    let name = path.display().to_string();
    let encoded = layout.encode(&name)?;
    let mut bytes = encoded.header;
    for (&offset, t) in encoded.offsets.iter().zip(tensors) {
        bytes.resize(offset as usize, 0);
        bytes.extend_from_slice(&t.data);
    }
    bytes.resize(encoded.total_bytes as usize, 0);
    fs::write(path, bytes).map_err(|e| Error::Io { file: name, action: "write", source: e })
}
