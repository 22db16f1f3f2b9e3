//! What planning and serving need to know about a model.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::families::{Memory, State, Windows};
use crate::types::TensorType;
use crate::{Error, Family, Model, Result};

/// Layers that llama.cpp can hold.
pub(crate) const MAX_LAYERS: u32 = 512;

/// One layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFacts {
    /// Bytes of its tensors.
    pub weight_bytes: u64,
    /// Elements of keys that a token adds to the KV cache; 0 where the layer does not attend.
    pub kv_k_elements: u64,
    /// Elements of values that a token adds.
    pub kv_v_elements: u64,
    /// Tokens it can look back, where its attention is windowed.
    pub window: Option<u32>,
    /// Whether it keeps a recurrent state.
    pub recurrent: bool,
    /// Bytes of that state for each sequence (`f32`, as llama.cpp keeps it).
    pub recurrent_bytes: u64,
}

impl LayerFacts {
    /// Whether it attends to earlier tokens.
    #[must_use]
    pub fn attends(&self) -> bool {
        self.kv_k_elements > 0
    }

    /// Bytes of KV cache for each token, with keys of type `k` and values of type `v`.
    #[must_use]
    pub fn kv_bytes_per_token(&self, k: TensorType, v: TensorType) -> u64 {
        let bytes = |n: u64, t: TensorType| n.div_ceil(t.block_elements()).saturating_mul(t.block_bytes());
        bytes(self.kv_k_elements, k).saturating_add(bytes(self.kv_v_elements, v))
    }
}

/// What every slice must contain, or llama.cpp aborts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceNeeds {
    /// A windowed layer.
    pub windowed: bool,
    /// A layer that attends.
    pub attention: bool,
    /// A recurrent layer.
    pub recurrent: bool,
}

/// A cut that no chain may have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IllegalCut {
    /// First layer after the cut.
    pub layer: u32,
    /// Why not.
    pub reason: String,
}

/// Everything planning needs to know about a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// `general.architecture`.
    pub arch: String,
    /// `general.name`, or empty.
    pub name: String,
    /// Identity, see [`Model::digest`].
    pub digest: String,
    /// Number of layers.
    pub n_layers: u32,
    /// Width of a row of activations.
    pub n_embd: u32,
    /// Tokens in the vocabulary, as the embedding table has them.
    pub n_vocab: u32,
    /// Context length it was trained with, in tokens.
    pub context_train: u32,
    /// Attention heads of the first layer that attends.
    pub n_head: u32,
    /// Elements of a key head.
    pub head_dim_k: u32,
    /// Elements of a value head.
    pub head_dim_v: u32,
    /// Whether the output head is the embedding table.
    pub tied_head: bool,
    /// Bytes of the embedding table, which lies outside the slices, at stage 0.
    pub embedding_bytes: u64,
    /// Bytes of the output head, in the last slice.
    pub head_bytes: u64,
    /// Bytes of what every slice holds (output norm, rope factors).
    pub other_bytes: u64,
    /// The layers.
    pub layers: Vec<LayerFacts>,
    /// What every slice must contain.
    pub needs: SliceNeeds,
    /// Layer counts that no slice may have (unless it is the whole model).
    pub special_layer_counts: Vec<u32>,
    /// Layers before which the chain may be cut. Two of these may still be too close: see [`ModelFacts::check_range`].
    pub legal_cuts: Vec<u32>,
    /// The others, with the reason.
    pub illegal_cuts: Vec<IllegalCut>,
}

impl ModelFacts {
    /// Whether one stage may hold layers `first..end`.
    ///
    /// # Errors
    /// [`Error::Range`] with the reason.
    pub fn check_range(&self, first: u32, end: u32) -> Result<()> {
        let bad = |reason: String| Err(Error::Range { first, end, reason });
        let Some(layers) = self.layers.get(first as usize..end as usize).filter(|l| !l.is_empty()) else {
            return bad(format!("no range of layers of a model with {}", self.n_layers));
        };
        if layers.len() == self.layers.len() {
            return Ok(());
        }
        for &count in &self.special_layer_counts {
            if self.n_layers == count {
                return bad(format!("models of {count} layers of this architecture work in one piece only"));
            }
            if layers.len() == count as usize {
                return bad(format!("a slice of exactly {count} layers would be taken for another model"));
            }
        }
        let needs = [
            (self.needs.windowed, layers.iter().any(|l| l.window.is_some()), "a layer with sliding-window attention"),
            (self.needs.attention, layers.iter().any(LayerFacts::attends), "an attention layer"),
            (self.needs.recurrent, layers.iter().any(|l| l.recurrent), "a recurrent layer"),
        ];
        match needs.iter().find(|(needed, present, _)| *needed && !present) {
            Some((_, _, what)) => bad(format!("every stage of this model needs {what}; move the cut")),
            None => Ok(()),
        }
    }

    pub(crate) fn find_cuts(&mut self) {
        for layer in 1..self.n_layers {
            match self.check_range(0, layer).and_then(|()| self.check_range(layer, self.n_layers)) {
                Ok(()) => self.legal_cuts.push(layer),
                Err(e) => self.illegal_cuts.push(IllegalCut { layer, reason: e.to_string() }),
            }
        }
    }
}

/// What stage 0 needs to know about the tokenizer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizerFacts {
    /// `tokenizer.ggml.model`, for example `gpt2`.
    pub model: String,
    /// `tokenizer.ggml.pre`, or empty.
    pub pre: String,
    /// Number of tokens.
    pub n_tokens: u32,
    /// Begin of text.
    pub bos: Option<u32>,
    /// End of text.
    pub eos: Option<u32>,
    /// End of turn.
    pub eot: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Whether prompts begin with [`TokenizerFacts::bos`], where the file says.
    pub add_bos: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// `tokenizer.chat_template.NAME`, by name.
    pub named_templates: BTreeMap<String, String>,
}

/// Sizes that turn metadata into bytes of cache.
struct Shape {
    head_k: u32,
    head_v: u32,
    state_bytes: u64,
    window: Option<u32>,
    windowed: Vec<bool>,
}

impl Model {
    fn key_u32(&self, name: &str) -> Result<Option<u32>> {
        self.header().u32(&self.arch_key(name))
    }

    fn positive(&self, name: &str) -> Result<u32> {
        let key = self.arch_key(name);
        match self.header().required_u32(&key)? {
            0 => Err(Error::key(self.file(), key, "is 0")),
            n => Ok(n),
        }
    }

    /// Number of layers, checked against what can be loaded.
    pub(crate) fn n_layers(&self) -> Result<u32> {
        let key = self.arch_key("block_count");
        let n = self.positive("block_count")?;
        if n > MAX_LAYERS {
            return Err(Error::key(self.file(), key, format!("is {n}; llama.cpp holds at most {MAX_LAYERS} layers")));
        }
        if self.key_u32("nextn_predict_layers")?.unwrap_or(0) > 0 {
            let reason = "it has layers that predict several tokens, which are not supported yet".to_owned();
            return Err(Error::Unsupported { arch: self.arch().to_owned(), reason });
        }
        Ok(n)
    }

    /// Which layers attend to a window only, and how far they look back.
    pub(crate) fn windows(&self, family: &Family, n_layers: u32) -> Result<(Option<u32>, Vec<bool>)> {
        let n = n_layers as usize;
        let window = match family.windows {
            Windows::No => None,
            _ => self.key_u32("attention.sliding_window")?.filter(|&w| w > 0),
        };
        let windowed = match (window, family.windows) {
            (None, _) | (_, Windows::No) => vec![false; n],
            (_, Windows::EveryAttention) => self.heads_kv(n_layers)?.iter().map(|&heads| heads > 0).collect(),
            (_, Windows::Pattern { period }) => {
                let key = self.arch_key("attention.sliding_window_pattern");
                if self.header().get(&key).is_some_and(|v| v.array().is_some()) {
                    let pattern = self.header().per_layer_u32(&key, n)?.unwrap_or_default();
                    pattern.iter().map(|&w| w != 0).collect()
                } else {
                    let period = self.header().u32(&key)?.unwrap_or(period);
                    (0..n_layers).map(|i| period == 0 || i % period < period - 1).collect()
                }
            }
        };
        Ok((window, windowed))
    }

    fn heads_kv(&self, n_layers: u32) -> Result<Vec<u32>> {
        let n = n_layers as usize;
        let heads = self.header().per_layer_u32(&self.arch_key("attention.head_count"), n)?;
        let kv = self.header().per_layer_u32(&self.arch_key("attention.head_count_kv"), n)?;
        kv.or(heads).ok_or_else(|| Error::key(self.file(), self.arch_key("attention.head_count"), "is missing"))
    }

    /// Heads: one number for all layers, since slices would derive other sizes from another first layer.
    fn heads(&self, n_layers: u32) -> Result<u32> {
        let key = self.arch_key("attention.head_count");
        let heads = self.header().per_layer_u32(&key, n_layers as usize)?.unwrap_or_default();
        match heads.first() {
            Some(&n) if n > 0 && heads.iter().all(|&h| h == n) => Ok(n),
            Some(_) => Err(Error::key(self.file(), key, "must be one number above 0, the same for all layers")),
            None => Err(Error::key(self.file(), key, "is missing")),
        }
    }

    fn state_bytes(&self, family: &Family, n_embd: u32) -> Result<u64> {
        let elements = match family.memory {
            Memory::Attention => return Ok(0),
            Memory::Both(State::Mamba2) | Memory::Either(State::Mamba2) => {
                let [conv, inner, state, groups] = [
                    self.positive("ssm.conv_kernel")?,
                    self.positive("ssm.inner_size")?,
                    self.positive("ssm.state_size")?,
                    self.positive("ssm.group_count")?,
                ]
                .map(u64::from);
                let width = groups.checked_mul(state).and_then(|n| n.checked_mul(2)?.checked_add(inner));
                let conv = width.and_then(|w| w.checked_mul(conv - 1));
                conv.zip(inner.checked_mul(state)).and_then(|(conv, scan)| conv.checked_add(scan))
            }
            Memory::Both(State::ShortConv) | Memory::Either(State::ShortConv) => {
                let cache = self.positive("shortconv.l_cache")?;
                u64::from(n_embd).checked_mul(u64::from(cache - 1))
            }
        };
        let bytes = elements.and_then(|n| n.checked_mul(4));
        bytes.ok_or_else(|| {
            Error::key(self.file(), self.arch_key("ssm.*"), "the recurrent state would exceed 2^64 bytes")
        })
    }

    fn shape(&self, family: &Family, n_layers: u32, n_embd: u32, n_head: u32) -> Result<Shape> {
        let head_k = self.key_u32("attention.key_length")?.unwrap_or(n_embd / n_head);
        let head_v = self.key_u32("attention.value_length")?.unwrap_or(n_embd / n_head);
        let sizes = [
            ("key_length", head_k),
            ("value_length", head_v),
            ("key_length_swa", head_k),
            ("value_length_swa", head_v),
        ];
        for (name, expected) in sizes {
            let name = format!("attention.{name}");
            let size = self.key_u32(&name)?.unwrap_or(expected);
            if size == 0 || size != expected {
                let what = format!("is {size}; heads must have elements, and windowed layers as many as the others");
                return Err(Error::key(self.file(), self.arch_key(&name), what));
            }
        }
        let (window, windowed) = self.windows(family, n_layers)?;
        Ok(Shape { head_k, head_v, state_bytes: self.state_bytes(family, n_embd)?, window, windowed })
    }

    fn layer_facts(&self, family: &Family, n_layers: u32, shape: &Shape) -> Result<Vec<LayerFacts>> {
        let mut layers = Vec::new();
        for (&heads, &windowed) in self.heads_kv(n_layers)?.iter().zip(&shape.windowed) {
            let recurrent = match family.memory {
                Memory::Attention => false,
                Memory::Both(_) => true,
                Memory::Either(_) => heads == 0,
            };
            if !recurrent && heads == 0 {
                let key = self.arch_key("attention.head_count_kv");
                return Err(Error::key(self.file(), key, format!("layer {} has no heads", layers.len())));
            }
            layers.push(LayerFacts {
                weight_bytes: 0,
                kv_k_elements: u64::from(heads) * u64::from(shape.head_k),
                kv_v_elements: u64::from(heads) * u64::from(shape.head_v),
                window: shape.window.filter(|_| windowed),
                recurrent,
                recurrent_bytes: if recurrent { shape.state_bytes } else { 0 },
            });
        }
        Ok(layers)
    }

    /// Width, vocabulary and bytes of the embedding table, checked against the metadata.
    fn table(&self) -> Result<(u32, u32, u64)> {
        let n_embd = self.positive("embedding_length")?;
        let bad = |what: String| Err(Error::tensor(self.file(), "token_embd.weight", what));
        let Some(t) = self.tensor("token_embd.weight") else {
            return bad("is missing".to_owned());
        };
        let &[width, rows] = t.info.dims.as_slice() else {
            return bad("must have two dimensions".to_owned());
        };
        if width != u64::from(n_embd) {
            return bad(format!("has rows of {width}, but {} is {n_embd}", self.arch_key("embedding_length")));
        }
        let tokens = self.header().array("tokenizer.ggml.tokens")?.map(|a| a.len() as u64);
        match (u32::try_from(rows), tokens) {
            (Ok(n_vocab), None) => Ok((n_embd, n_vocab, t.info.bytes)),
            (Ok(n_vocab), Some(n)) if n == rows => Ok((n_embd, n_vocab, t.info.bytes)),
            (_, n) => bad(format!("has {rows} rows, but the tokenizer has {} tokens", n.unwrap_or(0))),
        }
    }

    /// What planning needs.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the architecture cannot be cut; [`Error::Key`] and [`Error::Tensor`] for metadata and
    /// tensors that contradict each other or that llama.cpp would abort on.
    pub fn facts(&self) -> Result<ModelFacts> {
        let family = self.family()?;
        let n_layers = self.n_layers()?;
        let (n_embd, n_vocab, embedding_bytes) = self.table()?;
        let n_head = self.heads(n_layers)?;
        let shape = self.shape(family, n_layers, n_embd, n_head)?;
        let mut facts = ModelFacts {
            arch: self.arch().to_owned(),
            name: self.header().str("general.name")?.unwrap_or_default().to_owned(),
            digest: self.digest().to_owned(),
            n_layers,
            n_embd,
            n_vocab,
            context_train: self.positive("context_length")?,
            n_head,
            head_dim_k: shape.head_k,
            head_dim_v: shape.head_v,
            tied_head: self.tensor("output.weight").is_none(),
            embedding_bytes,
            head_bytes: 0,
            other_bytes: 0,
            layers: self.layer_facts(family, n_layers, &shape)?,
            needs: SliceNeeds {
                windowed: shape.window.is_some(),
                attention: matches!(family.memory, Memory::Either(_)),
                recurrent: matches!(family.memory, Memory::Either(_)),
            },
            special_layer_counts: family.special_layer_counts.to_vec(),
            legal_cuts: Vec::new(),
            illegal_cuts: Vec::new(),
        };
        self.weigh(&mut facts)?;
        self.check_head(&facts)?;
        self.check_loadable(family, &facts)?;
        facts.find_cuts();
        Ok(facts)
    }

    fn weigh(&self, facts: &mut ModelFacts) -> Result<()> {
        if facts.tied_head {
            facts.head_bytes = facts.embedding_bytes;
        }
        for t in self.tensors() {
            match Place::of(&t.info.name) {
                Place::Layer(i, _) => match facts.layers.get_mut(i as usize) {
                    Some(layer) => layer.weight_bytes += t.info.bytes,
                    None => {
                        let what = format!("belongs to layer {i}, but the model has {}", facts.n_layers);
                        return Err(Error::tensor(self.file(), &t.info.name, what));
                    }
                },
                Place::Embedding => {}
                Place::Head => facts.head_bytes += t.info.bytes,
                Place::Everywhere => facts.other_bytes += t.info.bytes,
            }
        }
        match facts.layers.iter().position(|l| l.weight_bytes == 0) {
            Some(i) => Err(Error::tensor(self.file(), format!("blk.{i}.*"), "the layer has no tensors")),
            None => Ok(()),
        }
    }

    fn check_head(&self, facts: &ModelFacts) -> Result<()> {
        if let Some(head) = self.tensor("output.weight")
            && head.info.dims != [u64::from(facts.n_embd), u64::from(facts.n_vocab)]
        {
            return Err(Error::tensor(self.file(), "output.weight", "has another shape than token_embd.weight"));
        }
        if let Some(t) = self.tensors().find(|t| matches!(t.info.name.as_str(), "output.scale" | "output.input_scale"))
        {
            return Err(Error::tensor(self.file(), &t.info.name, "output heads with a scale are not supported yet"));
        }
        Ok(())
    }

    /// What stage 0 needs to know about the tokenizer.
    ///
    /// # Errors
    /// [`Error::Key`] when there is none, or a value has the wrong type.
    pub fn tokenizer(&self) -> Result<TokenizerFacts> {
        let h = self.header();
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let model =
            h.str(&key("model"))?.ok_or_else(|| Error::key(self.file(), key("model"), "is missing"))?.to_owned();
        let mut named_templates = BTreeMap::new();
        for name in h.keys().filter_map(|k| k.strip_prefix("tokenizer.chat_template.")) {
            let text = h.str(&format!("tokenizer.chat_template.{name}"))?.unwrap_or_default();
            named_templates.insert(name.to_owned(), text.to_owned());
        }
        let tokens = h.array(&key("tokens"))?.map_or(0, |a| a.len());
        Ok(TokenizerFacts {
            model,
            pre: h.str(&key("pre"))?.unwrap_or_default().to_owned(),
            n_tokens: u32::try_from(tokens).map_err(|_| Error::key(self.file(), key("tokens"), "has too many"))?,
            bos: h.u32(&key("bos_token_id"))?,
            eos: h.u32(&key("eos_token_id"))?,
            eot: h.u32(&key("eot_token_id"))?,
            pad: h.u32(&key("padding_token_id"))?,
            add_bos: h.bool(&key("add_bos_token"))?,
            chat_template: h.str("tokenizer.chat_template")?.map(str::to_owned),
            named_templates,
        })
    }
}

/// Where a tensor goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place<'a> {
    /// Layer and the rest of the name.
    Layer(u32, &'a str),
    /// The embedding table.
    Embedding,
    /// The output head.
    Head,
    /// Every slice.
    Everywhere,
}

impl<'a> Place<'a> {
    pub(crate) fn of(name: &'a str) -> Self {
        let layer = name.strip_prefix("blk.").and_then(|rest| {
            let (i, rest) = rest.split_once('.')?;
            Some((i.parse().ok()?, rest))
        });
        match (layer, name) {
            (Some((i, rest)), _) => Self::Layer(i, rest),
            (None, "token_embd.weight") => Self::Embedding,
            (None, _) if name.starts_with("output.") => Self::Head,
            (None, _) => Self::Everywhere,
        }
    }
}
