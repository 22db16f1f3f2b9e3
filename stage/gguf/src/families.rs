//! Which architectures may be cut, and by what rules: the one table.
//!
//! An architecture that is not in [`FAMILIES`] is refused. Each entry was checked against the pinned llama.cpp: slices of
//! tiny random models give the unsplit model's logits bit for bit at every legal cut.

/// A factor that depends on the width of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// No scaling.
    One,
    /// √`n_embd`, in `f32`.
    SqrtWidth,
}

impl Scale {
    #[allow(clippy::cast_precision_loss)] // llama.cpp does the same
    fn factor(self, n_embd: u32) -> f32 {
        match self {
            Self::One => 1.0,
            Self::SqrtWidth => (n_embd as f32).sqrt(),
        }
    }
}

/// Which layers attend to a window only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// None.
    No,
    /// Of every `period` layers the last is full, where `attention.sliding_window_pattern` says nothing else. Slices
    /// carry the pattern as an array, and need a windowed layer each.
    Pattern {
        /// llama.cpp's period where the file names none.
        period: u32,
    },
    /// Every attention layer, where `attention.sliding_window` is set.
    EveryAttention,
}

/// What a recurrent layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Convolution and state-space state of Mamba 2 (`ssm.*` keys).
    Mamba2,
    /// The last inputs of a short convolution (`shortconv.l_cache`).
    ShortConv,
}

/// What layers remember.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Keys and values in every layer.
    Attention,
    /// Keys, values and a recurrent state in every layer.
    Both(State),
    /// A layer without KV heads is recurrent, the others attend; a slice needs one of each.
    Either(State),
}

/// Rules of one architecture.
#[derive(Debug, Clone, Copy)]
pub struct Family {
    /// `general.architecture`.
    pub arch: &'static str,
    /// Name of the tensor that leaves layer `{last}`.
    pub output_tensor: &'static str,
    /// What llama.cpp multiplies looked-up token rows with, but not rows given as `embd`: stage 0 does it.
    pub embedding_scale: Scale,
    /// What llama.cpp multiplies every row given as `embd` with: incoming activations are divided by it.
    pub input_scale: Scale,
    /// `{arch}.embedding_scale` applies to rows given as `embd`: it becomes 1 after stage 0.
    pub scales_every_input: bool,
    /// llama.cpp asserts that `rope.dimension_count` is the size of a head.
    pub rotates_whole_heads: bool,
    /// llama.cpp asserts that `ssm.inner_size` is twice the width.
    pub inner_is_twice_width: bool,
    /// Sliding windows.
    pub windows: Windows,
    /// What layers remember.
    pub memory: Memory,
    /// Layer counts from which llama.cpp derives other values: such a model is not cut, and no slice has that count.
    pub special_layer_counts: &'static [u32],
}

const PLAIN: Family = Family {
    arch: "",
    output_tensor: "l_out-{last}",
    embedding_scale: Scale::One,
    input_scale: Scale::One,
    scales_every_input: false,
    rotates_whole_heads: false,
    inner_is_twice_width: false,
    windows: Windows::No,
    memory: Memory::Attention,
    special_layer_counts: &[],
};

/// Every architecture that may be cut.
pub const FAMILIES: &[Family] = &[
    Family { arch: "llama", rotates_whole_heads: true, ..PLAIN },
    Family { arch: "qwen2", rotates_whole_heads: true, ..PLAIN },
    Family { arch: "qwen3", rotates_whole_heads: true, ..PLAIN },
    Family {
        arch: "gemma3",
        embedding_scale: Scale::SqrtWidth,
        windows: Windows::Pattern { period: 6 },
        // 62 layers: the 27B model, whose attention is scaled otherwise
        special_layer_counts: &[62],
        ..PLAIN
    },
    Family { arch: "falcon-h1", memory: Memory::Both(State::Mamba2), ..PLAIN },
    Family { arch: "lfm2", memory: Memory::Either(State::ShortConv), windows: Windows::EveryAttention, ..PLAIN },
    Family {
        arch: "granitehybrid",
        memory: Memory::Either(State::Mamba2),
        scales_every_input: true,
        inner_is_twice_width: true,
        ..PLAIN
    },
];

/// Architectures known not to work, and why.
const REFUSED: &[(&[&str], &str)] = &[
    (
        &[
            "gemma3n",
            "gemma4",
            "deepseek4",
            "rwkv7",
            "arwkv7",
            "minimax-01",
            "cogvlm",
            "bloom",
            "qwen4exp",
            "hy_v4",
            "glm5-next",
            "kimi-k3",
            "hrm_text",
            "nanbeige",
            "graniteswitch",
            "smallthinker",
        ],
        "more than one tensor crosses a cut, or later layers need the tokens",
    ),
    (
        &[
            "t5",
            "t5encoder",
            "bert",
            "modern-bert",
            "nomic-bert",
            "nomic-bert-moe",
            "neo-bert",
            "jina-bert-v2",
            "jina-bert-v3",
            "eurobert",
        ],
        "encoders have no cut that one tensor crosses",
    ),
    (&["glm-dsa", "deepseek32"], "it can only be cut where the indexer is full, which has not been tried"),
    (
        &["gemma2", "baichuan", "exaone4", "llama4"],
        "values depend on the layer count of the whole model, which slices do not have",
    ),
];

/// The rules for `arch`.
///
/// # Errors
/// The reason when it cannot be cut.
pub fn find(arch: &str) -> Result<&'static Family, String> {
    if let Some(family) = FAMILIES.iter().find(|f| f.arch == arch) {
        return Ok(family);
    }
    let known = REFUSED.iter().find(|(archs, _)| archs.contains(&arch)).map(|(_, reason)| (*reason).to_owned());
    Err(known.unwrap_or_else(|| {
        let names: Vec<_> = FAMILIES.iter().map(|f| f.arch).collect();
        format!("its slices have not been proven equal to the whole model; supported are {}", names.join(", "))
    }))
}

/// How rows enter and leave a slice.
#[derive(Debug, Clone, PartialEq)]
pub struct Boundary {
    output_tensor: &'static str,
    /// Factor that stage 0 applies to embedding rows before they are computed (1 in most families).
    pub embedding_scale: f32,
    /// Factor that every later stage applies to incoming rows (1 in most families).
    pub input_scale: f32,
}

impl Boundary {
    /// Name of the tensor whose rows leave a slice of `layers` layers (numbered from 0 in the slice).
    #[must_use]
    pub fn output_tensor(&self, layers: u32) -> String {
        self.output_tensor.replace("{last}", &layers.saturating_sub(1).to_string())
    }
}

impl Family {
    /// How rows enter and leave slices of a model of width `n_embd`.
    #[must_use]
    pub fn boundary(&self, n_embd: u32) -> Boundary {
        Boundary {
            output_tensor: self.output_tensor,
            embedding_scale: self.embedding_scale.factor(n_embd),
            input_scale: 1.0 / self.input_scale.factor(n_embd),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_consistent() {
        for (i, f) in FAMILIES.iter().enumerate() {
            assert!(FAMILIES.iter().skip(i + 1).all(|g| g.arch != f.arch), "{} twice", f.arch);
            assert!(REFUSED.iter().all(|(archs, _)| !archs.contains(&f.arch)), "{} supported and refused", f.arch);
            assert!(f.output_tensor.contains("{last}"));
        }
    }

    #[test]
    fn unknown_and_impossible_architectures_are_refused_with_a_reason() {
        assert!(find("gemma3n").unwrap_err().contains("more than one tensor"));
        assert!(find("no-such-arch").unwrap_err().contains("llama, qwen2"));
    }

    #[test]
    fn gemma3_scales_token_rows_only() {
        let b = find("gemma3").unwrap().boundary(1152);
        assert_eq!((b.embedding_scale, b.input_scale), (1152f32.sqrt(), 1.0));
        assert_eq!(b.output_tensor(6), "l_out-5");
    }
}
