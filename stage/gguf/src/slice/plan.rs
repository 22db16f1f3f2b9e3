use super::{FORMAT_VERSION, Package, keys};
use crate::encode::{Encoded, Layout, TensorSpec};
use crate::facts::Place;
use crate::families::Windows;
use crate::header::DEFAULT_ALIGNMENT;
use crate::types::TensorType;
use crate::value::{OwnedValue, Value, ValueType};
use crate::{Error, Model, ModelFacts, Result, TensorRef};

/// Arrays of an architecture that are no values per layer, whatever their length.
const NOT_PER_LAYER: &[&str] = &["rope.dimension_sections", "classifier.output_labels"];

/// Where the bytes of a tensor come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// Copied from this shard, from this offset.
    Copy {
        /// Index of the shard.
        shard: usize,
        /// Offset in it.
        offset: u64,
    },
    /// Zeros.
    Zeros,
}

/// Some bytes of the file to be written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) at: u64,
    pub(super) bytes: u64,
    pub(super) origin: Origin,
}

/// What a package will hold, before anything is written.
#[derive(Debug)]
pub struct SlicePlan<'a> {
    pub(super) model: &'a Model,
    package: Package,
    pub(super) encoded: Encoded,
    pub(super) parts: Vec<Part>,
}

/// A layout and the origins of its tensors.
struct Draft {
    layout: Layout,
    origins: Vec<Origin>,
}

impl Draft {
    fn copy(&mut self, name: impl Into<String>, t: TensorRef<'_>) {
        self.layout.push(TensorSpec { name: name.into(), dims: t.info.dims.clone(), ty: t.info.ty });
        self.origins.push(Origin::Copy { shard: t.shard, offset: t.info.offset });
    }

    fn zeros(&mut self, name: &str, dims: Vec<u64>) {
        self.layout.push(TensorSpec { name: name.to_owned(), dims, ty: TensorType::F32 });
        self.origins.push(Origin::Zeros);
    }
}

impl<'a> SlicePlan<'a> {
    /// Plans `package` of `model`.
    ///
    /// # Errors
    /// [`Error::Range`] for layers no stage may hold, and as [`Model::facts`].
    pub fn new(model: &'a Model, package: Package) -> Result<Self> {
        let draft = match package {
            Package::Stage { first, end } => {
                let facts = model.facts()?;
                facts.check_range(first, end)?;
                stage(model, &facts, first, end)?
            }
            Package::Tokenizer => {
                model.tokenizer()?;
                let mut draft = start(model);
                copy_keys(model, &mut draft.layout, |_| true);
                draft
            }
            Package::Embedding => {
                let mut draft = start(model);
                copy_keys(model, &mut draft.layout, |key| !key.starts_with("tokenizer."));
                let table = model.tensor("token_embd.weight");
                let table = table.ok_or_else(|| Error::tensor(model.file(), "token_embd.weight", "is missing"))?;
                draft.copy("token_embd.weight", table);
                draft
            }
        };
        Self::finish(model, package, draft)
    }

    fn finish(model: &'a Model, package: Package, mut draft: Draft) -> Result<Self> {
        let layout = &mut draft.layout;
        layout.set(keys::FORMAT, OwnedValue::u32(FORMAT_VERSION));
        layout.set(keys::MODEL, OwnedValue::str(model.digest()));
        layout.set(keys::KIND, OwnedValue::str(package.kind()));
        let encoded = layout.encode(model.file())?;
        let sizes = layout.tensors().iter().map(|t| t.bytes().unwrap_or(0));
        let parts = encoded.offsets.iter().zip(sizes).zip(&draft.origins);
        let parts = parts.map(|((&at, bytes), &origin)| Part { at, bytes, origin }).collect();
        Ok(Self { model, package, encoded, parts })
    }

    /// Model it is cut from.
    #[must_use]
    pub fn model(&self) -> &'a Model {
        self.model
    }

    /// What is planned.
    #[must_use]
    pub fn package(&self) -> Package {
        self.package
    }

    /// Bytes of the file.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.encoded.total_bytes
    }
}

fn start(model: &Model) -> Draft {
    let alignment = model.header().alignment().max(DEFAULT_ALIGNMENT);
    let mut layout = Layout::with_alignment(alignment);
    if alignment != DEFAULT_ALIGNMENT {
        // a header may ask for 65536 at most
        layout.set("general.alignment", OwnedValue::u32(alignment as u32));
    }
    Draft { layout, origins: Vec::new() }
}

/// Copies metadata, without what describes the files it came from.
fn copy_keys(model: &Model, layout: &mut Layout, keep: impl Fn(&str) -> bool) {
    let h = model.header();
    for key in h.keys().filter(|k| !k.starts_with("split.") && *k != "general.alignment" && keep(k)) {
        if let Some(value) = h.owned(key) {
            layout.set(key, value);
        }
    }
}

fn stage(model: &Model, facts: &ModelFacts, first: u32, end: u32) -> Result<Draft> {
    let mut draft = start(model);
    stage_keys(model, facts, &mut draft.layout, first, end)?;
    let last = end == facts.n_layers;
    if last {
        let head = model.tensor("output.weight").or_else(|| model.tensor("token_embd.weight"));
        let head = head.ok_or_else(|| Error::tensor(model.file(), "token_embd.weight", "is missing"))?;
        draft.copy("token_embd.weight", head);
    } else {
        draft.zeros("token_embd.weight", vec![u64::from(facts.n_embd), 1]);
    }
    for t in model.tensors() {
        match Place::of(&t.info.name) {
            Place::Layer(i, rest) if (first..end).contains(&i) => draft.copy(format!("blk.{}.{rest}", i - first), t),
            Place::Layer(..) | Place::Embedding => {}
            Place::Head if last && t.info.name != "output.weight" => draft.copy(t.info.name.clone(), t),
            Place::Head => {}
            Place::Everywhere => draft.copy(t.info.name.clone(), t),
        }
    }
    Ok(draft)
}

fn stage_keys(model: &Model, facts: &ModelFacts, layout: &mut Layout, first: u32, end: u32) -> Result<()> {
    let family = model.family()?;
    copy_keys(model, layout, |key| !key.starts_with("tokenizer."));
    let prefix = model.arch_key("");
    for key in model.header().keys().filter(|k| k.starts_with(&prefix)) {
        if let Some(cut) = cut_array(model, key, facts.n_layers, first, end)? {
            layout.set(key, cut);
        }
    }
    if matches!(family.windows, Windows::Pattern { .. }) && facts.needs.windowed {
        let windowed = facts.layers.iter().map(|l| u32::from(l.window.is_some()));
        let windowed: Vec<_> = windowed.skip(first as usize).take((end - first) as usize).collect();
        layout.set(model.arch_key("attention.sliding_window_pattern"), OwnedValue::u32s(&windowed));
    }
    let scale = model.arch_key("embedding_scale");
    if family.scales_every_input && first > 0 && model.header().get(&scale).is_some() {
        layout.set(scale, OwnedValue::f32(1.0));
    }
    layout.set(model.arch_key("block_count"), OwnedValue::u32(end - first));
    let n_vocab = if end == facts.n_layers { facts.n_vocab } else { 1 };
    layout.set(model.arch_key("vocab_size"), OwnedValue::u32(n_vocab));
    layout.set("tokenizer.ggml.model", OwnedValue::str("no_vocab"));
    layout.set(keys::FIRST, OwnedValue::u32(first));
    layout.set(keys::END, OwnedValue::u32(end));
    layout.set(keys::LAYERS, OwnedValue::u32(facts.n_layers));
    Ok(())
}

/// The layers' part of an array of values per layer; `None` for anything else.
fn cut_array(model: &Model, key: &str, n_layers: u32, first: u32, end: u32) -> Result<Option<OwnedValue>> {
    let Some(Value::Array(array)) = model.header().get(key) else {
        return Ok(None);
    };
    let name = key.strip_prefix(model.arch()).and_then(|k| k.strip_prefix('.')).unwrap_or(key);
    if array.element_type() == ValueType::Str || array.len() != n_layers as usize || NOT_PER_LAYER.contains(&name) {
        return Ok(None);
    }
    let cut = OwnedValue::cut(array, first as usize, end as usize);
    cut.map(Some).ok_or_else(|| Error::key(model.file(), key, "is too short"))
}
