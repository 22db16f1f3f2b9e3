//! The rules that the CRD carries as CEL, for manifests that no API server has seen.

use std::collections::BTreeMap;

use crate::source::is_object_name;
use crate::{
    CacheType, EngineSpec, FlashAttention, LayerRange, MAX_NAME, ModelSource, PodSpec, Problem, Quantity, SourceError,
    SplitModel, SplitModelSpec, StageSpec,
};

/// Labels by which the operator, the Service and NetworkPolicies find pods; those of `splitmodel.dev/` are its own as well.
const OWN_LABELS: [&str; 3] = ["app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by"];

impl SplitModel {
    /// Every rule that this object breaks, with the path of the field. Ranges and lengths are the schema's business.
    #[must_use]
    pub fn validate(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let name = self.metadata.name.as_deref().unwrap_or_default();
        if name.len() > MAX_NAME {
            let message = format!(
                "must have at most {MAX_NAME} characters, not {}: the names of its stages are longer",
                name.len()
            );
            problems.push(Problem::new("metadata.name", message));
        }
        let ends = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let inner = |c: char| ends(c) || c == '-';
        if !(name.starts_with(|c: char| c.is_ascii_lowercase()) && name.ends_with(ends) && name.chars().all(inner)) {
            let message =
                "must start with a letter and have lower-case letters, digits and '-' only: a Service gets it";
            problems.push(Problem::new("metadata.name", message));
        }
        self.spec.check(&mut problems);
        problems
    }

    /// The source, parsed.
    ///
    /// # Errors
    /// [`SourceError`].
    pub fn source(&self) -> Result<ModelSource, SourceError> {
        self.spec.model.source.parse()
    }

    /// Name of the model in the API.
    #[must_use]
    pub fn model_name(&self) -> &str {
        self.spec.model_name.as_deref().or(self.metadata.name.as_deref()).unwrap_or_default()
    }
}

impl SplitModelSpec {
    fn check(&self, problems: &mut Vec<Problem>) {
        if let Err(e) = self.model.source.parse::<ModelSource>() {
            problems.push(Problem::new("spec.model.source", e.to_string()));
        }
        check_name("spec.model.credentialsSecret", "Secret", self.model.credentials_secret.as_ref(), problems);
        check_name("spec.model.caConfigMap", "ConfigMap", self.model.ca_config_map.as_ref(), problems);
        check_name("spec.api.keySecret", "Secret", self.api.key_secret.as_ref(), problems);
        check_image("spec.image", self.image.as_ref(), problems);
        let aliases = self.model_aliases.iter().map(|alias| ("spec.modelAliases", alias));
        for (field, name) in self.model_name.iter().map(|name| ("spec.modelName", name)).chain(aliases) {
            if name.contains(char::is_control) {
                problems.push(Problem::new(field, "must not contain control characters"));
            }
        }
        if let (Some(count), Some(list)) = (self.stages, &self.stage_list)
            && count as usize != list.len()
        {
            let message = format!("is {count}, but stageList has {} entries; leave one of them out", list.len());
            problems.push(Problem::new("spec.stages", message));
        }
        if let Some(defaults) = &self.stage_defaults {
            if defaults.layers.is_some() {
                problems.push(Problem::new("spec.stageDefaults.layers", "belong into stageList"));
            }
            defaults.check("spec.stageDefaults", problems);
        }
        if let Some(list) = &self.stage_list {
            for (i, stage) in list.iter().enumerate() {
                stage.check(&format!("spec.stageList[{i}]"), problems);
            }
            check_layers(list, problems);
        }
        self.pods.check(problems);
        check_quantity("spec.cacheVolume.size", self.cache_volume.size.as_ref(), problems);
        check_quantity("spec.kvCache.maxBytes", Some(&self.kv_cache.max_bytes), problems);
        check_quantity("spec.kvCache.diskBytes", self.kv_cache.disk_bytes.as_ref(), problems);
        check_quantity("spec.kvCache.activationBytes", self.kv_cache.activation_bytes.as_ref(), problems);
        if self.cache_volume.storage_class_name.is_some() && !self.cache_volume.persistent {
            problems.push(Problem::new("spec.cacheVolume.storageClassName", "needs persistent: true"));
        }
        let class = self.cache_volume.storage_class_name.as_ref();
        check_name("spec.cacheVolume.storageClassName", "StorageClass", class, problems);
    }
}

impl PodSpec {
    fn check(&self, problems: &mut Vec<Problem>) {
        check_labels("spec.pods.labels", &self.labels, problems);
        for key in self.annotations.keys().filter(|k| !is_label_name(k)) {
            problems
                .push(Problem::new("spec.pods.annotations", format!("has {key:?}, which is no name of an annotation")));
        }
        let own = |key: &&String| key.starts_with("splitmodel.dev/") || OWN_LABELS.contains(&key.as_str());
        for key in self.labels.keys().filter(own) {
            problems.push(Problem::new("spec.pods.labels", format!("has {key}, which the operator itself sets")));
        }
        for key in self.annotations.keys().filter(|k| k.starts_with("splitmodel.dev/")) {
            problems.push(Problem::new("spec.pods.annotations", format!("has {key}, which the operator itself sets")));
        }
        if self.image_pull_secrets.iter().any(|s| !is_object_name(s)) {
            problems.push(Problem::new("spec.pods.imagePullSecrets", "must be names of Secrets"));
        }
        check_name("spec.pods.priorityClassName", "PriorityClass", self.priority_class_name.as_ref(), problems);
        let mut seen = Vec::new();
        for (i, env) in self.env.iter().enumerate() {
            let path = format!("spec.pods.env[{i}].name");
            let ok = |c: char| c.is_ascii_alphanumeric() || c == '_';
            if env.name.starts_with(|c: char| c.is_ascii_digit()) || !env.name.chars().all(ok) {
                problems.push(Problem::new(&path, "must be the name of a variable"));
            } else if seen.contains(&&env.name) {
                problems.push(Problem::new(&path, format!("is {} for the second time", env.name)));
            }
            seen.push(&env.name);
        }
    }
}

impl StageSpec {
    fn check(&self, path: &str, problems: &mut Vec<Problem>) {
        check_quantity(&format!("{path}.memory"), self.memory.as_ref(), problems);
        if let Some(gpu) = &self.gpu {
            check_quantity(&format!("{path}.gpu.memory"), gpu.memory.as_ref(), problems);
            if !is_resource(&gpu.resource) {
                let message = "must be the name of a resource, as in nvidia.com/gpu";
                problems.push(Problem::new(&format!("{path}.gpu.resource"), message));
            }
        }
        check_labels(&format!("{path}.nodeSelector"), &self.node_selector, problems);
        check_name(&format!("{path}.runtimeClassName"), "RuntimeClass", self.runtime_class_name.as_ref(), problems);
        check_image(&format!("{path}.image"), self.image.as_ref(), problems);
        if self.cpu.as_ref().is_some_and(|c| !is_cores(c)) {
            let message = "must be a number of cores, as in 4, 0.5 or 500m";
            problems.push(Problem::new(&format!("{path}.cpu"), message));
        }
        if let Some(engine) = &self.engine {
            engine.check(&format!("{path}.engine"), problems);
        }
    }
}

impl EngineSpec {
    fn check(&self, path: &str, problems: &mut Vec<Problem>) {
        if self.flash_attn == Some(FlashAttention::Off) && self.cache_type_v.is_some_and(CacheType::is_quantized) {
            let message = "is quantised, which needs flash attention; set flashAttn to auto or on";
            problems.push(Problem::new(&format!("{path}.cacheTypeV"), message));
        }
        if let (Some(batch), Some(ubatch)) = (self.n_batch, self.n_ubatch)
            && ubatch > batch
        {
            problems
                .push(Problem::new(&format!("{path}.nUbatch"), format!("must not be above nBatch, which is {batch}")));
        }
    }
}

/// All stages or none name their layers, from 0, without gap or overlap.
fn check_layers(list: &[StageSpec], problems: &mut Vec<Problem>) {
    if list.iter().all(|s| s.layers.is_none()) {
        return;
    }
    let mut next = 0;
    for (i, stage) in list.iter().enumerate() {
        let path = format!("spec.stageList[{i}].layers");
        match stage.layers.as_ref().map(|l| (l, LayerRange::range(l))) {
            None => problems.push(Problem::new(&path, "is missing: either every stage names its layers or none does")),
            Some((_, Some(range))) if range.start == next => next = range.end,
            Some((text, Some(range))) => {
                let what = if range.start > next { "leaves a gap" } else { "overlaps" };
                problems.push(Problem::new(&path, format!("is {}, which {what}: it must start at {next}", text.0)));
                next = range.end;
            }
            Some((text, None)) => {
                problems.push(Problem::new(
                    &path,
                    format!("is {:?}; it must be the first and the last layer, as in 0-9", text.0),
                ));
            }
        }
    }
}

fn check_name(path: &str, kind: &str, name: Option<&String>, problems: &mut Vec<Problem>) {
    if name.is_some_and(|n| !is_object_name(n)) {
        problems.push(Problem::new(path, format!("must be the name of a {kind}")));
    }
}

fn check_image(path: &str, image: Option<&String>, problems: &mut Vec<Problem>) {
    let ok = |c: char| c.is_ascii_alphanumeric() || "-._/:@".contains(c);
    if image.is_some_and(|i| !i.starts_with(|c: char| c.is_ascii_alphanumeric()) || !i.chars().all(ok)) {
        problems.push(Problem::new(path, "must be an image, as in registry/name:tag"));
    }
}

fn check_labels(path: &str, labels: &BTreeMap<String, String>, problems: &mut Vec<Problem>) {
    for (key, value) in labels {
        if !is_label_name(key) {
            problems.push(Problem::new(path, format!("has {key:?}, which is no name of a label")));
        }
        if !value.is_empty() && !is_label_word(value) {
            let message = format!(
                "has {key} with a value that is no value of a label: at most 63 letters, digits, '-', '_' and '.'"
            );
            problems.push(Problem::new(path, message));
        }
    }
}

/// The part of a label's name behind the prefix, or a value: starts and ends with a letter or digit.
fn is_label_word(text: &str) -> bool {
    let end = |c: char| c.is_ascii_alphanumeric();
    let inner = |c: char| end(c) || "-_.".contains(c);
    text.len() <= 63 && text.starts_with(end) && text.ends_with(end) && text.chars().all(inner)
}

fn is_label_name(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_object_name(prefix) && is_label_word(name),
        None => is_label_word(text),
    }
}

fn check_quantity(path: &str, quantity: Option<&Quantity>, problems: &mut Vec<Problem>) {
    if quantity.is_some_and(|q| q.bytes().is_none()) {
        problems.push(Problem::new(path, "must be bytes above 0, as in 80Gi or 500M"));
    }
}

fn is_resource(text: &str) -> bool {
    let Some((domain, name)) = text.split_once('/') else { return false };
    let end = |c: char| c.is_ascii_alphanumeric();
    is_object_name(domain)
        && name.starts_with(end)
        && name.ends_with(end)
        && name.chars().all(|c| end(c) || "-_.".contains(c))
}

fn is_cores(text: &str) -> bool {
    let digits = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
    match text.split_once('.') {
        Some((whole, part)) => digits(whole) && digits(part),
        None => digits(text.strip_suffix('m').unwrap_or(text)),
    }
}
