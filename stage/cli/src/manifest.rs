//! What a `SplitModel` manifest asks for, in the terms of a local run.
use std::path::{Path, PathBuf};

use serde::Deserialize;
use splitmodel_control::config::{Activations, ApiConfig, EngineConfig};
use splitmodel_planner::Layout;

use crate::error::CliError;

/// What a manifest asks for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// `metadata.name`.
    pub name: String,
    /// `spec.model.source`, as written.
    pub source: String,
    /// The file that `source` means on this machine, absolute.
    pub path: PathBuf,
    /// How the layers are distributed.
    pub layout: Layout,
    /// Model and context of every stage.
    pub engine: EngineConfig,
    /// Type of activations on the wire.
    pub activations: Activations,
    /// Names and keys of the API; its address comes from the command line.
    pub api: ApiConfig,
}
#[derive(Deserialize)]
struct M {
    metadata: Meta,
    spec: Spec,
}
#[derive(Deserialize)]
struct Meta {
    name: String,
}
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Spec {
    model: Src,
    stages: u32,
    #[serde(default)]
    context_length: Option<u32>,
    #[serde(default)]
    parallel: Option<u32>,
}
#[derive(Deserialize)]
struct Src {
    source: String,
}

/// Reads and checks the manifest `file`.
///
/// # Errors
/// [`CliError::File`] or [`CliError::Manifest`], naming the field.
pub fn load(file: &Path) -> Result<Wanted, CliError> {
    let text = std::fs::read_to_string(file).map_err(CliError::file("read", file))?;
    let m: M =
        serde_saphyr::from_str(&text).map_err(|e| CliError::Manifest { path: file.into(), message: e.to_string() })?;
    let default = EngineConfig::default();
    let engine = EngineConfig {
        context_length: m.spec.context_length.unwrap_or(default.context_length),
        lanes: m.spec.parallel.unwrap_or(default.lanes),
        ..default
    };
    let api = ApiConfig {
        bind: ([127, 0, 0, 1], 0).into(),
        model: m.metadata.name.clone(),
        aliases: vec![],
        api_keys: vec![],
        api_key_file: None,
        cors: vec![],
    };
    Ok(Wanted {
        path: m.spec.model.source.trim_start_matches("file://").into(),
        source: m.spec.model.source,
        layout: Layout::Stages(m.spec.stages),
        engine,
        activations: Activations::F32,
        api,
        name: m.metadata.name,
    })
}
