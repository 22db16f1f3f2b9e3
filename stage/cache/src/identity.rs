//! What must be equal for a prefix to be the same prefix, and who may share it.

/// Everything besides tokens that decides what a prefix's state is. A change of any of it is a miss.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identity {
    /// Digest of the model: its tensors, its tokenizer and its rope settings.
    pub model: String,
    /// Version of llama.cpp: the layout of states.
    pub llama_cpp: String,
    /// Number of stages.
    pub stages: u32,
    /// Chat template; it makes the tokens of a conversation.
    pub template: Option<String>,
    /// KV cells of the context.
    pub n_ctx: u32,
    /// Types of the K and V caches.
    pub cache_types: [String; 2],
    /// Type of activations between stages.
    pub activations: String,
}

/// Prefixes are shared within a namespace only. The default is nobody's but tests' and probes'.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace([u8; 32]);

impl Namespace {
    /// For keys of more than tokens.
    pub(crate) const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The one with these bytes.
    pub(crate) const fn of(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl Identity {
    /// The namespace of a client's cache key and of a tenant; without either, the one of all who have neither.
    #[must_use]
    pub fn namespace(&self, key: Option<&str>, tenant: Option<&str>) -> Namespace {
        // No `..`: a new field must be taken in here.
        let Self { model, llama_cpp, stages, template, n_ctx, cache_types: [k, v], activations } = self;
        let mut hasher = blake3::Hasher::new();
        for text in [Some(model), Some(llama_cpp), template.as_ref(), Some(k), Some(v), Some(activations)] {
            part(&mut hasher, text.map(String::as_bytes));
        }
        for number in [stages, n_ctx] {
            part(&mut hasher, Some(&number.to_le_bytes()));
        }
        part(&mut hasher, key.map(str::as_bytes));
        part(&mut hasher, tenant.map(str::as_bytes));
        Namespace(*hasher.finalize().as_bytes())
    }
}

/// Takes in a part so that neither its end nor its absence can be mistaken.
fn part(hasher: &mut blake3::Hasher, bytes: Option<&[u8]>) {
    let length = bytes.map_or(u64::MAX, |b| b.len() as u64);
    hasher.update(&length.to_le_bytes());
    hasher.update(bytes.unwrap_or_default());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_is_another_namespace() {
        let base = Identity { model: "m".into(), template: Some(String::new()), ..Identity::default() };
        let all = |i: &Identity| i.namespace(None, None);
        let changes: [fn(&mut Identity); 8] = [
            |i| i.model = "n".into(),
            |i| i.llama_cpp = "1".into(),
            |i| i.stages = 2,
            |i| i.template = None,
            |i| i.n_ctx = 1,
            |i| i.cache_types[0] = "f16".into(),
            |i| i.cache_types[1] = "f16".into(),
            |i| i.activations = "f16".into(),
        ];
        let mut seen = vec![all(&base)];
        for change in changes {
            let mut other = base.clone();
            change(&mut other);
            seen.push(all(&other));
        }
        for (key, tenant) in
            [(Some(""), None), (None, Some("")), (Some("a"), Some("bc")), (Some("ab"), Some("c")), (None, Some("abc"))]
        {
            seen.push(base.namespace(key, tenant));
        }
        let distinct: std::collections::HashSet<_> = seen.iter().collect();
        assert_eq!(distinct.len(), seen.len());
        assert_eq!(base.namespace(Some("a"), None), base.clone().namespace(Some("a"), None));
    }
}
