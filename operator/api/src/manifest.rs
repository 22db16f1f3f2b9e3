//! Reading manifests.

use std::fmt;

use serde_json::Value;

use crate::{GROUP, SplitModel, VERSION, schema};

/// Largest manifest, in bytes; the API server takes little more.
const MAX_MANIFEST: usize = 1 << 20;

/// Something wrong with a field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Path of the field, as in `spec.stageList[1].layers`.
    pub path: String,
    /// What is wrong, to be read after the path.
    pub message: String,
}

impl Problem {
    pub(crate) fn new(path: &str, message: impl Into<String>) -> Self {
        Self { path: if path.is_empty() { "the manifest".into() } else { path.into() }, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.path, self.message)
    }
}

/// Why a text is no manifest of a SplitModel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// Not YAML, or more than one document.
    #[error("the manifest is no YAML: {0}")]
    Yaml(String),
    /// Larger than any SplitModel.
    #[error("the manifest has {0} bytes; at most {MAX_MANIFEST} are read")]
    TooLarge(usize),
    /// Fields that are wrong, all of them.
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Invalid(Vec<Problem>),
}

impl SplitModel {
    /// Reads a manifest as strictly as the API server: unknown fields, wrong types, values out of range and rules.
    ///
    /// # Errors
    /// [`ManifestError`], with every problem and the path of its field.
    pub fn from_yaml(text: &str) -> Result<Self, ManifestError> {
        if text.len() > MAX_MANIFEST {
            return Err(ManifestError::TooLarge(text.len()));
        }
        let mut value: Value = serde_saphyr::from_str(text).map_err(|e| ManifestError::Yaml(e.to_string()))?;
        schema::drop_nulls(&mut value);
        let mut problems = Vec::new();
        let api_version = format!("{GROUP}/{VERSION}");
        for (field, wanted) in [("apiVersion", api_version.as_str()), ("kind", "SplitModel")] {
            if value.get(field).and_then(Value::as_str) != Some(wanted) {
                problems.push(Problem::new(field, format!("must be {wanted}")));
            }
        }
        if value.pointer("/metadata/name").and_then(Value::as_str).is_none() {
            problems.push(Problem::new("metadata.name", "is required, and must be a text"));
        }
        problems.extend(schema::check(&value));
        if !problems.is_empty() {
            return Err(ManifestError::Invalid(problems));
        }
        let model: Self = serde_json::from_value(value)
            .map_err(|e| ManifestError::Invalid(vec![Problem::new("", format!("cannot be read: {e}"))]))?;
        let problems = model.validate();
        if problems.is_empty() { Ok(model) } else { Err(ManifestError::Invalid(problems)) }
    }
}
