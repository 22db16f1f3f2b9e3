//! Metadata that llama.cpp would end the process on, refused with the key instead.

use crate::families::{Memory, State};
use crate::{Error, Family, Model, ModelFacts, Result};

/// llama.cpp's `LLAMA_MAX_EXPERTS`.
const MAX_EXPERTS: u32 = 1024;
const ROPE_SCALINGS: &[&str] = &["none", "linear", "yarn", "longrope"];

impl Model {
    fn refuse<T>(&self, name: &str, what: impl Into<String>) -> Result<T> {
        Err(Error::key(self.file(), self.arch_key(name), what))
    }

    /// What llama.cpp asserts when it loads a model or builds its graph.
    pub(crate) fn check_loadable(&self, family: &Family, facts: &ModelFacts) -> Result<()> {
        self.check_heads(family, facts)?;
        self.check_experts(facts.n_layers)?;
        let scaling = self.arch_key("rope.scaling.type");
        if let Some(name) = self.header().str(&scaling)?
            && !ROPE_SCALINGS.contains(&name)
        {
            return self.refuse("rope.scaling.type", format!("is '{name}'; known are {}", ROPE_SCALINGS.join(", ")));
        }
        match family.memory {
            Memory::Attention => Ok(()),
            Memory::Both(State::Mamba2) | Memory::Either(State::Mamba2) => self.check_mamba(family, facts),
            Memory::Both(State::ShortConv) | Memory::Either(State::ShortConv) => {
                match self.header().required_u32(&self.arch_key("shortconv.l_cache"))? {
                    0 | 1 => self.refuse("shortconv.l_cache", "must be above 1"),
                    _ => Ok(()),
                }
            }
        }
    }

    fn check_heads(&self, family: &Family, facts: &ModelFacts) -> Result<()> {
        if facts.head_dim_k == 0 || facts.head_dim_k != facts.head_dim_v || !facts.head_dim_k.is_multiple_of(2) {
            let (k, v) = (facts.head_dim_k, facts.head_dim_v);
            return self.refuse(
                "attention.key_length",
                format!("heads of {k} and {v} elements; equal, even ones are supported"),
            );
        }
        for (i, layer) in facts.layers.iter().enumerate().filter(|(_, l)| l.attends()) {
            let (k, v) = (layer.kv_k_elements, layer.kv_v_elements);
            let heads = k / u64::from(facts.head_dim_k);
            if k != v || heads == 0 || !u64::from(facts.n_head).is_multiple_of(heads) {
                let what = format!("layer {i}: {} heads are no multiple of its KV heads", facts.n_head);
                return self.refuse("attention.head_count_kv", what);
            }
        }
        match self.header().u32(&self.arch_key("rope.dimension_count"))? {
            Some(n) if n > facts.head_dim_k || (family.rotates_whole_heads && n != facts.head_dim_k) => {
                self.refuse("rope.dimension_count", format!("is {n}, but heads have {} elements", facts.head_dim_k))
            }
            _ => Ok(()),
        }
    }

    fn check_experts(&self, n_layers: u32) -> Result<()> {
        let experts = self.header().u32(&self.arch_key("expert_count"))?.unwrap_or(0);
        let used = self.header().per_layer_u32(&self.arch_key("expert_used_count"), n_layers as usize)?;
        let used = used.into_iter().flatten().max().unwrap_or(0);
        if experts > MAX_EXPERTS {
            return self.refuse("expert_count", format!("is {experts}; llama.cpp holds at most {MAX_EXPERTS}"));
        }
        if used > experts || (experts > 0 && used == 0) {
            return self.refuse("expert_used_count", format!("is {used} of {experts} experts"));
        }
        Ok(())
    }

    fn check_mamba(&self, family: &Family, facts: &ModelFacts) -> Result<()> {
        let get = |name: &str| self.header().required_u32(&self.arch_key(name));
        let (inner, heads, groups) = (get("ssm.inner_size")?, get("ssm.time_step_rank")?, get("ssm.group_count")?);
        if heads == 0 || groups == 0 || !inner.is_multiple_of(heads) || !inner.is_multiple_of(groups) {
            let what = format!("{inner} is no multiple of {heads} heads and {groups} groups");
            return self.refuse("ssm.inner_size", what);
        }
        if get("ssm.conv_kernel")? < 2 {
            return self.refuse("ssm.conv_kernel", "must be above 1");
        }
        if family.inner_is_twice_width && u64::from(inner) != 2 * u64::from(facts.n_embd) {
            return self.refuse("ssm.inner_size", format!("is {inner}; llama.cpp supports twice the width only"));
        }
        // optional to the loader, but the graph adds it without asking
        for (i, _) in facts.layers.iter().enumerate().filter(|(_, l)| l.recurrent) {
            let name = format!("blk.{i}.ssm_conv1d.bias");
            if self.tensor(&name).is_none() {
                return Err(Error::tensor(self.file(), name, "is missing"));
            }
        }
        Ok(())
    }
}
