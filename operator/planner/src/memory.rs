//! What a stage needs in memory.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use splitmodel_gguf::ModelFacts;

use crate::PlanOptions;

/// llama.cpp rounds caches up to this many cells.
const CELL_PAD: u64 = 256;
/// Rows of width `n_embd` alive at once in a layer: residual stream, its norm, query, attention output.
const STREAM_ROWS: u64 = 4;
/// Width of the feed-forward rows alive at once, in `n_embd`: gate and up, at most 4 wide each in the supported families.
const FEED_FORWARD_ROWS: u64 = 8;

/// Bytes of one stage.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageBytes {
    /// Tensors of the slice, the output head included.
    pub weights: u64,
    /// The output head's part of `weights`; 0 but on the last stage.
    pub head: u64,
    /// Embedding table beside the slice, in host memory; 0 but on stage 0.
    pub embedding: u64,
    /// KV cells of all lanes and residents, and recurrent states.
    pub kv: u64,
    /// Scratch memory of the computation.
    pub compute: u64,
}

impl StageBytes {
    /// Bytes on the stage's device; `host` says whether the embedding table is there too.
    #[must_use]
    pub fn on_device(&self, host: bool) -> u64 {
        let slice = self.weights.saturating_add(self.kv).saturating_add(self.compute);
        if host { slice.saturating_add(self.embedding) } else { slice }
    }
}

/// Estimates [`StageBytes`] of any layer range in constant time.
///
/// - *Weights*: the layers' tensors, what every slice holds, and on the last stage the output head.
/// - *KV*: a cache of `context_length` cells for each lane. Layers with a sliding window hold `window + n_ubatch` cells, at most
///   the former. With residents or recurrent layers it is one cache of all sequences (lanes, residents) instead:
///   `lanes × context_length + resident_tokens` cells, in a window `window × sequences + n_ubatch`. Each is rounded up to 256.
///   Recurrent layers hold one state per sequence.
/// - *Compute*, for `u = n_ubatch` rows of `f32`: mask `u × cells of a cache` (and its 16-bit copy with flash attention), plus
///   `4 × n_embd × u` for the residual stream, plus the largest of: attention scores `n_head × u × cells of a cache` (without
///   flash attention), feed-forward rows `8 × n_embd × u`, and on the last stage logits `n_vocab × u`.
#[derive(Debug, Clone)]
pub struct MemoryModel {
    weights: Vec<u64>,
    kv: Vec<u64>,
    /// Layers before each index that attend to everything, or to a window.
    full: Vec<u32>,
    windowed: Vec<u32>,
    /// Of all caches.
    cells: u64,
    /// Of one cache: what a row attends to.
    cache: u64,
    window: u64,
    embedding: u64,
    head: u64,
    other: u64,
    rows: u64,
    n_embd: u64,
    n_vocab: u64,
    score_heads: u64,
    mask_bytes: u64,
}

impl MemoryModel {
    /// The model of `facts` under `options`.
    #[must_use]
    pub fn new(facts: &ModelFacts, options: &PlanOptions) -> Self {
        let rows = u64::from(options.n_ubatch);
        let padded = |cells: u64| cells.checked_next_multiple_of(CELL_PAD).unwrap_or(u64::MAX);
        let one = options.residents > 0 || facts.layers.iter().any(|l| l.recurrent);
        let (caches, sequences) = if one { (1, options.sequences()) } else { (u64::from(options.lanes), 1) };
        let own = u64::from(options.context_length);
        let all = own.saturating_mul(u64::from(options.lanes)).saturating_add(options.resident_tokens);
        let cache = padded(if one { all } else { own });
        let in_window = |window: u32| {
            if options.swa_full {
                return cache;
            }
            padded(u64::from(window).saturating_mul(sequences).saturating_add(rows)).min(cache)
        };
        let mut model = Self {
            weights: vec![0],
            kv: vec![0],
            full: vec![0],
            windowed: vec![0],
            cells: cache.saturating_mul(caches),
            cache,
            window: facts.layers.iter().filter_map(|l| l.window).map(in_window).max().unwrap_or(0),
            embedding: facts.embedding_bytes,
            head: facts.head_bytes,
            other: facts.other_bytes,
            rows,
            n_embd: u64::from(facts.n_embd),
            n_vocab: u64::from(facts.n_vocab),
            score_heads: if options.flash_attn { 0 } else { u64::from(facts.n_head) },
            mask_bytes: if options.flash_attn { 6 } else { 4 },
        };
        let (mut weights, mut kv, mut full, mut windowed) = (0u64, 0u64, 0, 0);
        for layer in &facts.layers {
            let held = layer.window.map_or(cache, in_window).saturating_mul(caches);
            let cache = layer.kv_bytes_per_token(options.cache_type_k, options.cache_type_v).saturating_mul(held);
            let state = layer.recurrent_bytes.saturating_mul(options.sequences());
            weights = weights.saturating_add(layer.weight_bytes);
            kv = kv.saturating_add(cache).saturating_add(state);
            full += u32::from(layer.attends() && layer.window.is_none());
            windowed += u32::from(layer.attends() && layer.window.is_some());
            model.weights.push(weights);
            model.kv.push(kv);
            model.full.push(full);
            model.windowed.push(windowed);
        }
        model
    }

    /// Layers of the model.
    #[must_use]
    pub fn layers(&self) -> u32 {
        (self.weights.len() - 1) as u32
    }

    /// Cells of the KV cache.
    #[must_use]
    pub fn cells(&self) -> u64 {
        self.cells
    }

    /// Bytes of a stage with `range`; zeros where that is no range of the model's layers.
    #[must_use]
    pub fn stage(&self, range: Range<u32>) -> StageBytes {
        let (first, end) = (range.start as usize, range.end as usize);
        if first >= end || end >= self.weights.len() {
            return StageBytes::default();
        }
        let last = end + 1 == self.weights.len();
        let head = if last { self.head } else { 0 };
        let span = |sums: &[u64]| sums[end].saturating_sub(sums[first]);
        StageBytes {
            weights: span(&self.weights).saturating_add(self.other).saturating_add(head),
            head,
            embedding: if first == 0 { self.embedding } else { 0 },
            kv: span(&self.kv),
            compute: self.compute(first, end, last),
        }
    }

    fn compute(&self, first: usize, end: usize, last: bool) -> u64 {
        let full = if self.full[end] > self.full[first] { self.cache } else { 0 };
        let windowed = if self.windowed[end] > self.windowed[first] { self.window } else { 0 };
        let mask = full.saturating_add(windowed).saturating_mul(self.mask_bytes);
        let stream = 4 * STREAM_ROWS * self.n_embd;
        let scores = (4 * self.score_heads).saturating_mul(full.max(windowed));
        let feed_forward = 4 * FEED_FORWARD_ROWS * self.n_embd;
        let logits = if last { 4 * self.n_vocab } else { 0 };
        let row = mask.saturating_add(stream).saturating_add(scores.max(feed_forward).max(logits));
        row.saturating_mul(self.rows)
    }
}
