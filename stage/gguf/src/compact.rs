//! Facts as a short text: what an inspecting process can hand over where only 4096 bytes fit.
//!
//! ```text
//! splitmodel-facts-1:BASE64URL        of: varints and texts with their length, the layers by columns, 4 bytes of BLAKE3
//! ```

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::ModelFacts;
use crate::facts::{LayerFacts, MAX_LAYERS, SliceNeeds};

/// Longest text: what Kubernetes keeps of a termination message.
pub const MAX_TEXT: usize = 4096;
/// What every text of this version begins with.
const PREFIX: &str = "splitmodel-facts-1:";
const CHECKSUM: usize = 4;

/// Longest `general.name` that is kept, in bytes; it is for people only.
const MAX_NAME: usize = 128;
const MAX_ARCH: usize = 64;
const MAX_SPECIAL_COUNTS: u64 = 16;
/// Largest numbers, far above any model: sums over all layers stay far below 2^64.
const MAX_BYTES: u64 = 1 << 50;
const MAX_WIDTH: u64 = 1 << 24;
const MAX_COUNT: u64 = 1 << 31;

const RUNS: u8 = 0;
const DELTAS: u8 = 1;

/// Why facts cannot be written as, or read from, a short text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompactError {
    /// They do not fit.
    #[error(
        "the model's facts take {bytes} bytes as text, more than the limit of {MAX_TEXT}: its {layers} layers differ too much"
    )]
    TooLarge {
        /// Bytes of the text.
        bytes: usize,
        /// Layers of the model.
        layers: u32,
    },
    /// A number beyond what any model has.
    #[error("facts: `{field}` is {value}, outside 0 to {most}")]
    Value {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The largest accepted.
        most: u64,
    },
    /// Another version's text, or none of this kind.
    #[error(
        "no facts of a model: the text does not begin with `{PREFIX}`; operator and stage image must be of one version"
    )]
    Version,
    /// The text was changed or cut off on its way.
    #[error("facts: {0}: the text was damaged or cut off")]
    Damaged(&'static str),
}

type Result<T> = std::result::Result<T, CompactError>;

fn bounded(field: &'static str, value: u64, most: u64) -> Result<u64> {
    if value > most { Err(CompactError::Value { field, value, most }) } else { Ok(value) }
}

const fn damaged<T>(what: &'static str) -> Result<T> {
    Err(CompactError::Damaged(what))
}

/// The columns of the layers, each with its largest value.
const COLUMNS: [(&str, u64); 6] = [
    ("layers.weight_bytes", MAX_BYTES),
    ("layers.kv_k_elements", MAX_WIDTH),
    ("layers.kv_v_elements", MAX_WIDTH),
    ("layers.window", MAX_COUNT),
    ("layers.recurrent", 1),
    ("layers.recurrent_bytes", MAX_BYTES),
];

fn columns(layer: &LayerFacts) -> [u64; 6] {
    // A window of 0 tokens is no window: one more tells them apart.
    let window = layer.window.map_or(0, |w| u64::from(w) + 1);
    [
        layer.weight_bytes,
        layer.kv_k_elements,
        layer.kv_v_elements,
        window,
        layer.recurrent.into(),
        layer.recurrent_bytes,
    ]
}

fn layer(columns: [u64; 6]) -> LayerFacts {
    let [weight_bytes, kv_k_elements, kv_v_elements, window, recurrent, recurrent_bytes] = columns;
    LayerFacts {
        weight_bytes,
        kv_k_elements,
        kv_v_elements,
        window: window.checked_sub(1).and_then(|w| u32::try_from(w).ok()),
        recurrent: recurrent != 0,
        recurrent_bytes,
    }
}

/// The single numbers, in the order of the text.
fn numbers(facts: &ModelFacts) -> [(&'static str, u64, u64); 11] {
    let SliceNeeds { windowed, attention, recurrent } = facts.needs;
    let flags = [facts.tied_head, windowed, attention, recurrent];
    let flags = flags.iter().rev().fold(0, |bits, &flag| (bits << 1) | u64::from(flag));
    [
        ("n_layers", facts.layers.len() as u64, MAX_LAYERS.into()),
        ("n_embd", facts.n_embd.into(), MAX_WIDTH),
        ("n_vocab", facts.n_vocab.into(), MAX_COUNT),
        ("context_train", facts.context_train.into(), MAX_COUNT),
        ("n_head", facts.n_head.into(), MAX_WIDTH),
        ("head_dim_k", facts.head_dim_k.into(), MAX_WIDTH),
        ("head_dim_v", facts.head_dim_v.into(), MAX_WIDTH),
        ("flags", flags, 15),
        ("embedding_bytes", facts.embedding_bytes, MAX_BYTES),
        ("head_bytes", facts.head_bytes, MAX_BYTES),
        ("other_bytes", facts.other_bytes, MAX_BYTES),
    ]
}

fn put_varint(out: &mut Vec<u8>, mut v: u64) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

fn put_text(out: &mut Vec<u8>, text: &str, most: usize) {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    put_varint(out, end as u64);
    out.extend(text.bytes().take(end));
}

/// Runs of equal values, or the differences of neighbours, whichever is shorter.
fn put_column(out: &mut Vec<u8>, values: &[u64]) {
    let mut runs = vec![RUNS];
    for run in values.chunk_by(|a, b| a == b) {
        put_varint(&mut runs, run.len() as u64);
        put_varint(&mut runs, run.first().copied().unwrap_or(0));
    }
    let mut deltas = vec![DELTAS];
    let mut before = 0;
    for &value in values {
        // Bounded far below 2^63.
        let delta = value as i64 - before;
        put_varint(&mut deltas, ((delta << 1) ^ (delta >> 63)) as u64);
        before = value as i64;
    }
    out.append(if runs.len() <= deltas.len() { &mut runs } else { &mut deltas });
}

/// What is left to read.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.0.split_at_checked(n) else {
            return damaged("it ends early");
        };
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?.first().copied().unwrap_or(0))
    }

    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        damaged("a number is too long")
    }

    fn number(&mut self, field: &'static str, most: u64) -> Result<u64> {
        bounded(field, self.varint()?, most)
    }

    fn text(&mut self, field: &'static str, most: usize) -> Result<String> {
        let len = self.number(field, most as u64)? as usize;
        match std::str::from_utf8(self.take(len)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => damaged("a name is not UTF-8"),
        }
    }

    fn column(&mut self, n: usize, (field, most): (&'static str, u64)) -> Result<Vec<u64>> {
        let mut values = Vec::with_capacity(n);
        match self.byte()? {
            RUNS => {
                while values.len() < n {
                    let count = self.varint()? as usize;
                    if count == 0 || count > n - values.len() {
                        return damaged("a run has no or too many layers");
                    }
                    let value = self.number(field, most)?;
                    values.resize(values.len() + count, value);
                }
            }
            DELTAS => {
                let mut value = 0i64;
                for _ in 0..n {
                    let zigzag = self.varint()?;
                    let delta = (zigzag >> 1) as i64 ^ -((zigzag & 1) as i64);
                    let Some(next) = value.checked_add(delta).and_then(|v| u64::try_from(v).ok()) else {
                        return damaged("a difference leads below 0");
                    };
                    values.push(bounded(field, next, most)?);
                    value = next as i64;
                }
            }
            _ => return damaged("a column is of an unknown kind"),
        }
        Ok(values)
    }
}

fn checksum(payload: &[u8]) -> [u8; CHECKSUM] {
    let hash = blake3::hash(payload);
    std::array::from_fn(|i| hash.as_bytes().get(i).copied().unwrap_or(0))
}

impl ModelFacts {
    /// The facts as ASCII text of at most [`MAX_TEXT`] bytes. A long [`ModelFacts::name`] is shortened to 128 bytes; cuts are
    /// left out, as they follow from the rest.
    ///
    /// # Errors
    /// [`CompactError::TooLarge`] when they do not fit, [`CompactError::Value`] for numbers that no model has.
    pub fn to_compact(&self) -> Result<String> {
        let mut out = Vec::new();
        put_text(&mut out, &self.arch, MAX_ARCH);
        put_text(&mut out, &self.name, MAX_NAME);
        match blake3::Hash::from_hex(&self.digest) {
            Ok(digest) => out.extend_from_slice(digest.as_bytes()),
            Err(_) => return damaged("the digest is no BLAKE3 in hex"),
        }
        for (field, value, most) in numbers(self) {
            put_varint(&mut out, bounded(field, value, most)?);
        }
        put_varint(
            &mut out,
            bounded("special_layer_counts", self.special_layer_counts.len() as u64, MAX_SPECIAL_COUNTS)?,
        );
        for &count in &self.special_layer_counts {
            put_varint(&mut out, bounded("special_layer_counts", count.into(), MAX_COUNT)?);
        }
        let layers: Vec<_> = self.layers.iter().map(columns).collect();
        for (i, (field, most)) in COLUMNS.into_iter().enumerate() {
            let values: Vec<u64> = layers.iter().filter_map(|l| l.get(i).copied()).collect();
            for &value in &values {
                bounded(field, value, most)?;
            }
            put_column(&mut out, &values);
        }
        let sum = checksum(&out);
        out.extend(sum);
        let text = format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(out));
        if text.len() > MAX_TEXT {
            return Err(CompactError::TooLarge { bytes: text.len(), layers: self.n_layers });
        }
        Ok(text)
    }

    /// Reads what [`ModelFacts::to_compact`] wrote; white space around it is ignored. Any text is safe: numbers are bounded,
    /// and the legal cuts are found anew.
    ///
    /// # Errors
    /// [`CompactError`] for anything else.
    pub fn from_compact(text: &str) -> Result<Self> {
        let Some(text) = text.trim().strip_prefix(PREFIX) else {
            return Err(CompactError::Version);
        };
        if text.len() > MAX_TEXT {
            return Err(CompactError::TooLarge { bytes: text.len(), layers: 0 });
        }
        let Ok(bytes) = URL_SAFE_NO_PAD.decode(text) else {
            return damaged("it is no base64");
        };
        let Some((payload, sum)) = bytes.split_last_chunk::<CHECKSUM>() else {
            return damaged("it ends early");
        };
        if checksum(payload) != *sum {
            return damaged("its checksum is another");
        }
        let mut r = Reader(payload);
        let (arch, name) = (r.text("arch", MAX_ARCH)?, r.text("name", MAX_NAME)?);
        let digest = blake3::Hash::from_slice(r.take(32)?).map_or_else(|_| String::new(), |h| h.to_hex().to_string());
        let mut number = |field, most| r.number(field, most);
        let n_layers = number("n_layers", MAX_LAYERS.into())? as u32;
        let [n_embd, n_vocab, context_train, n_head, head_dim_k, head_dim_v] = [
            number("n_embd", MAX_WIDTH)? as u32,
            number("n_vocab", MAX_COUNT)? as u32,
            number("context_train", MAX_COUNT)? as u32,
            number("n_head", MAX_WIDTH)? as u32,
            number("head_dim_k", MAX_WIDTH)? as u32,
            number("head_dim_v", MAX_WIDTH)? as u32,
        ];
        let flags = number("flags", 15)?;
        let bytes = [
            number("embedding_bytes", MAX_BYTES)?,
            number("head_bytes", MAX_BYTES)?,
            number("other_bytes", MAX_BYTES)?,
        ];
        let mut special_layer_counts = Vec::new();
        for _ in 0..number("special_layer_counts", MAX_SPECIAL_COUNTS)? {
            special_layer_counts.push(number("special_layer_counts", MAX_COUNT)? as u32);
        }
        let layers = Self::layers(&mut r, n_layers)?;
        if !r.0.is_empty() {
            return damaged("something follows its end");
        }
        let mut facts = Self {
            arch,
            name,
            digest,
            n_layers,
            n_embd,
            n_vocab,
            context_train,
            n_head,
            head_dim_k,
            head_dim_v,
            tied_head: flags & 1 != 0,
            embedding_bytes: bytes[0],
            head_bytes: bytes[1],
            other_bytes: bytes[2],
            layers,
            needs: SliceNeeds { windowed: flags & 2 != 0, attention: flags & 4 != 0, recurrent: flags & 8 != 0 },
            special_layer_counts,
            legal_cuts: Vec::new(),
            illegal_cuts: Vec::new(),
        };
        facts.find_cuts();
        Ok(facts)
    }

    fn layers(r: &mut Reader<'_>, n_layers: u32) -> Result<Vec<LayerFacts>> {
        if n_layers == 0 {
            return damaged("it has no layers");
        }
        let mut layers = vec![[0; COLUMNS.len()]; n_layers as usize];
        for (i, column) in COLUMNS.into_iter().enumerate() {
            for (layer, value) in layers.iter_mut().zip(r.column(n_layers as usize, column)?) {
                if let Some(place) = layer.get_mut(i) {
                    *place = value;
                }
            }
        }
        Ok(layers.into_iter().map(layer).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn facts(layers: Vec<LayerFacts>) -> ModelFacts {
        let mut facts = ModelFacts {
            arch: "llama".to_owned(),
            name: "A model of 70B".to_owned(),
            digest: blake3::hash(b"x").to_hex().to_string(),
            n_layers: layers.len() as u32,
            n_embd: 8192,
            n_vocab: 128_256,
            context_train: 131_072,
            n_head: 64,
            head_dim_k: 128,
            head_dim_v: 128,
            tied_head: false,
            embedding_bytes: 591_003_648,
            head_bytes: 861_912_000,
            other_bytes: 33_024,
            layers,
            needs: SliceNeeds::default(),
            special_layer_counts: Vec::new(),
            legal_cuts: Vec::new(),
            illegal_cuts: Vec::new(),
        };
        facts.find_cuts();
        facts
    }

    fn arbitrary_layer() -> impl Strategy<Value = LayerFacts> {
        (0..=MAX_BYTES, 0..=MAX_WIDTH, 0..=MAX_WIDTH, any::<Option<u32>>(), any::<bool>(), 0..=MAX_BYTES).prop_map(
            |(weight_bytes, k, v, window, recurrent, recurrent_bytes)| LayerFacts {
                weight_bytes,
                kv_k_elements: k,
                kv_v_elements: v,
                window: window.map(|w| w % (MAX_COUNT as u32 - 1)),
                recurrent,
                recurrent_bytes,
            },
        )
    }

    /// Layers as models have them: some equal to the one before, some not.
    fn arbitrary_layers() -> impl Strategy<Value = Vec<LayerFacts>> {
        prop::collection::vec((arbitrary_layer(), 1usize..6), 1..24)
            .prop_map(|runs| runs.into_iter().flat_map(|(layer, n)| vec![layer; n]).collect())
    }

    #[test]
    fn layers_that_are_alike_take_next_to_nothing() {
        let layer = LayerFacts {
            weight_bytes: 484_000_000,
            kv_k_elements: 1024,
            kv_v_elements: 1024,
            window: None,
            recurrent: false,
            recurrent_bytes: 0,
        };
        let facts = facts(vec![layer; 80]);
        let text = facts.to_compact().unwrap();
        assert!(text.len() < 200 && text.is_ascii(), "{} bytes", text.len());
        assert_eq!(ModelFacts::from_compact(&format!("  {text}\n")).unwrap(), facts);
    }

    #[test]
    fn a_model_of_128_layers_that_all_differ_fits() {
        let layers = (0..128u32).map(|i| LayerFacts {
            weight_bytes: 900_000_000 + u64::from(i.wrapping_mul(2_654_435_761) >> 2),
            kv_k_elements: 1024 * u64::from(1 + i % 7),
            kv_v_elements: 1024 * u64::from(1 + i % 5),
            window: (i % 3 > 0).then_some(4096 + i),
            recurrent: i % 2 == 0,
            recurrent_bytes: u64::from(i.wrapping_mul(40_503) % 9_000_000),
        });
        let facts = facts(layers.collect());
        let text = facts.to_compact().unwrap();
        println!("{} bytes", text.len());
        assert!(text.len() <= MAX_TEXT);
        assert_eq!(ModelFacts::from_compact(&text).unwrap(), facts);
    }

    #[test]
    fn what_does_not_fit_or_no_model_has_is_refused_by_name() {
        let layer = |i: u64| LayerFacts {
            weight_bytes: (i * 0x9E37_79B9_7F4A) % MAX_BYTES,
            kv_k_elements: (i * 7_654_321) % MAX_WIDTH,
            kv_v_elements: (i * 1_234_567) % MAX_WIDTH,
            window: None,
            recurrent: i.is_multiple_of(2),
            recurrent_bytes: (i * 0x79B9_7F4A_9E37) % MAX_BYTES,
        };
        let too_large = facts((0..512).map(layer).collect()).to_compact().unwrap_err();
        assert!(matches!(too_large, CompactError::TooLarge { layers: 512, .. }));
        assert!(too_large.to_string().contains("4096"), "{too_large}");
        let mut strange = facts(vec![layer(1)]);
        strange.head_bytes = u64::MAX;
        assert!(matches!(strange.to_compact(), Err(CompactError::Value { field: "head_bytes", .. })));
        strange.head_bytes = 0;
        strange.digest = "none".to_owned();
        assert!(matches!(strange.to_compact(), Err(CompactError::Damaged(_))));
    }

    #[test]
    fn long_names_are_shortened_between_characters() {
        let mut long = facts(vec![layer([1; 6])]);
        long.name = "ä".repeat(100) + "x";
        let read = ModelFacts::from_compact(&long.to_compact().unwrap()).unwrap();
        assert_eq!(read.name, "ä".repeat(64));
    }

    #[test]
    fn every_cut_off_and_every_changed_character_is_found_out() {
        let text = facts((0..9).map(|i| layer([i; 6].map(|v| v % 2))).collect()).to_compact().unwrap();
        for end in 0..text.len() {
            assert!(ModelFacts::from_compact(&text[..end]).is_err(), "{end}");
        }
        for at in 0..text.len() {
            let mut bytes = text.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            assert!(ModelFacts::from_compact(&String::from_utf8(bytes).unwrap()).is_err(), "{at}");
        }
        assert_eq!(ModelFacts::from_compact("splitmodel-facts-2:AAAA"), Err(CompactError::Version));
    }

    proptest! {
        #[test]
        fn facts_come_back_as_they_were(
            layers in arbitrary_layers(),
            numbers in prop::array::uniform6(0..=MAX_WIDTH as u32),
            bytes in prop::array::uniform3(0..=MAX_BYTES),
            flags in prop::array::uniform4(any::<bool>()),
            special in prop::collection::vec(0..=MAX_COUNT as u32, 0..=16),
            (arch, name) in (".{0,16}", ".{0,30}"),
        ) {
            let mut facts = facts(layers);
            [facts.n_embd, facts.n_vocab, facts.context_train, facts.n_head, facts.head_dim_k, facts.head_dim_v] = numbers;
            [facts.embedding_bytes, facts.head_bytes, facts.other_bytes] = bytes;
            facts.tied_head = flags[0];
            facts.needs = SliceNeeds { windowed: flags[1], attention: flags[2], recurrent: flags[3] };
            (facts.special_layer_counts, facts.arch, facts.name) = (special, arch, name);
            (facts.legal_cuts, facts.illegal_cuts) = (Vec::new(), Vec::new());
            facts.find_cuts();
            match facts.to_compact() {
                Ok(text) => {
                    prop_assert!(text.len() <= MAX_TEXT && text.is_ascii());
                    prop_assert_eq!(ModelFacts::from_compact(&text).unwrap(), facts);
                }
                Err(e) => prop_assert!(matches!(e, CompactError::TooLarge { .. }), "{}", e),
            }
        }

        /// Behind a right checksum, too: nothing panics, and whatever is read stays within the bounds.
        #[test]
        fn any_bytes_are_safe(mut payload in prop::collection::vec(any::<u8>(), 0..200), text in ".{0,60}") {
            let _ = ModelFacts::from_compact(&text);
            let _ = ModelFacts::from_compact(&format!("{PREFIX}{text}"));
            let mut started = vec![0, 0];
            started.extend([7; 32]);
            for mut bytes in [payload.clone(), { started.append(&mut payload); started }] {
                let sum = checksum(&bytes);
                bytes.extend(sum);
                if let Ok(facts) = ModelFacts::from_compact(&format!("{PREFIX}{}", URL_SAFE_NO_PAD.encode(bytes))) {
                    prop_assert!((1..=MAX_LAYERS as usize).contains(&facts.layers.len()));
                    prop_assert!(facts.layers.iter().all(|l| l.weight_bytes <= MAX_BYTES));
                }
            }
        }
    }
}
