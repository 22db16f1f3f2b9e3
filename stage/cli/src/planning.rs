//! From a manifest to a plan, and `splitmodel plan`.
use std::path::{Path, PathBuf};

use serde::Serialize;
use splitmodel_api::Quantity;
use splitmodel_gguf::{Model, ModelFacts};
use splitmodel_planner::{Device, Layout, Plan, PlanOptions, plan};
use splitmodel_topology::Wanted;

use crate::args::PlanArgs;
use crate::error::CliError;
use crate::manifest;
use crate::ui;

/// Name of the device that all local stages share.
const HERE: &str = "this machine";

/// A manifest, its model, and how the model is cut.
#[derive(Clone, Debug)]
pub struct Planned {
    /// What the manifest asks for.
    pub wanted: Wanted,
    /// The model.
    pub facts: ModelFacts,
    /// The stages.
    pub plan: Plan,
}

/// Where the stages run.
#[derive(Clone, Debug)]
pub enum Devices {
    /// All on this machine.
    Here,
    /// On the GPUs of the manifest, if it says how large they are; else on this machine.
    Declared,
    /// On these, in the order of the chain.
    Given(Vec<Device>),
}

/// Reads the manifest `file`, opens its model, which is at the path that is returned, and plans; `stages` overrides the manifest.
///
/// # Errors
/// [`CliError`]: the manifest's field, the model's file, or the stage that does not fit.
pub fn prepare(file: &Path, stages: Option<u32>, devices: Devices) -> Result<(Planned, PathBuf), CliError> {
    let (mut wanted, path) = manifest::load(file)?;
    if let Some(stages) = stages {
        manifest::override_stages(&mut wanted, stages)?;
    }
    let source = &wanted.spec.model.source;
    let facts = facts(&open_model(&path, source)?, source)?;
    let devices = match devices {
        Devices::Here => local_devices(&wanted.layout),
        Devices::Declared => wanted.devices().unwrap_or_else(|| local_devices(&wanted.layout)),
        Devices::Given(devices) => devices,
    };
    let plan = plan(&facts, &devices, &wanted.options()).map_err(|e| CliError::Plan(e.to_string()))?;
    Ok((Planned { wanted, facts, plan }, path))
}

/// Opens the model at `path`; `source` is how the user wrote it.
///
/// # Errors
/// [`CliError::Model`].
pub fn open_model(path: &Path, source: &str) -> Result<Model, CliError> {
    Model::open(path).map_err(|e| CliError::Model { model: source.to_owned(), message: e.to_string() })
}

/// What planning needs of a model; `source` is how the user wrote it.
///
/// # Errors
/// [`CliError::Model`].
pub fn facts(model: &Model, source: &str) -> Result<ModelFacts, CliError> {
    model.facts().map_err(|e| CliError::Model { model: source.to_owned(), message: e.to_string() })
}

/// Layer ranges of `stages` slices, as a plan for equal devices has them.
///
/// # Errors
/// [`CliError::Model`] or [`CliError::Plan`].
pub fn cut_evenly(model: &Model, stages: u32) -> Result<Vec<(u32, u32)>, CliError> {
    let facts = facts(model, model.file())?;
    let layout = Layout::Stages(stages);
    let devices = local_devices(&layout);
    let options = PlanOptions { layout, ..PlanOptions::default() };
    let plan = plan(&facts, &devices, &options).map_err(|e| CliError::Plan(e.to_string()))?;
    Ok(plan.stages.iter().map(|s| (s.first, s.end)).collect())
}

fn local_devices(layout: &Layout) -> Vec<Device> {
    let count = match layout {
        Layout::Auto => 1,
        Layout::Stages(n) => *n as usize,
        Layout::Layers(ranges) => ranges.len(),
    };
    // The planner refuses absurd counts by name; it need not see them all for that.
    vec![Device { host: true, ..Device::new(HERE, None) }; count.clamp(1, 128)]
}

impl Planned {
    /// The plan as a table under one line about the model.
    #[must_use]
    pub fn table(&self) -> String {
        let f = &self.facts;
        let name = if f.name.is_empty() { &self.wanted.name } else { &f.name };
        let spec = &self.wanted.spec;
        format!(
            "{name}: {}, {} layers; {} sessions of {} tokens\n{}",
            f.arch,
            f.n_layers,
            spec.parallel,
            spec.context_length,
            self.plan.to_string().trim_end()
        )
    }

    /// Prints the table, or JSON.
    ///
    /// # Errors
    /// [`CliError::Plan`] for a number that JSON does not have, [`CliError::Output`].
    pub fn print(&self, json: bool) -> Result<(), CliError> {
        if !json {
            return ui::line(&self.table());
        }
        let f = &self.facts;
        let model = ModelFactsShort {
            source: &self.wanted.spec.model.source,
            arch: &f.arch,
            name: &f.name,
            digest: &f.digest,
            n_layers: f.n_layers,
            n_embd: f.n_embd,
        };
        let json = Json { name: &self.wanted.name, model: &model, plan: &self.plan };
        ui::line(&serde_json::to_string_pretty(&json).map_err(|e| CliError::Plan(e.to_string()))?)
    }

    /// A warning if the stages together need more than the `available` bytes of this machine.
    #[must_use]
    pub fn memory_warning(&self, available: Option<u64>) -> Option<String> {
        let needed = self.plan.stages.iter().fold(0_u64, |sum, s| sum.saturating_add(s.total));
        let available = available.filter(|a| needed > *a)?;
        Some(format!(
            "warning: the stages need about {} together, and this machine has {} available; lower spec.contextLength or \
             spec.parallel if they fail to load",
            ui::bytes(needed),
            ui::bytes(available)
        ))
    }
}

/// Bytes of memory that programs can still take, where the system says so.
#[must_use]
pub fn available_memory() -> Option<u64> {
    parse_available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let rest = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[derive(Serialize)]
struct Json<'a> {
    name: &'a str,
    model: &'a ModelFactsShort<'a>,
    plan: &'a Plan,
}

#[derive(Serialize)]
struct ModelFactsShort<'a> {
    source: &'a str,
    arch: &'a str,
    name: &'a str,
    digest: &'a str,
    n_layers: u32,
    n_embd: u32,
}

/// `splitmodel plan`.
///
/// # Errors
/// As [`prepare`], and [`CliError::Flag`].
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    let devices = args.device.iter().map(|d| parse_device(d)).collect::<Result<Vec<_>, _>>()?;
    let devices = if devices.is_empty() { Devices::Declared } else { Devices::Given(devices) };
    prepare(&args.file, args.stages, devices)?.0.print(args.json)
}

/// `name=memory`, with memory as Kubernetes writes it.
fn parse_device(text: &str) -> Result<Device, CliError> {
    let bad = || CliError::Flag {
        flag: "device",
        message: format!("`{text}` is no device; write name=memory, such as gpu0=24Gi"),
    };
    let (name, memory) = text.split_once('=').ok_or_else(bad)?;
    let memory = Quantity(memory.trim().to_owned()).bytes().ok_or_else(bad)?;
    if name.trim().is_empty() {
        return Err(bad());
    }
    Ok(Device::new(name.trim(), Some(memory)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_names_with_memory() {
        let device = parse_device("gpu0=24Gi").unwrap();
        assert_eq!((device.name.as_str(), device.memory), ("gpu0", Some(24 << 30)));
        for bad in ["gpu0", "=1Gi", "gpu0=", "gpu0=much"] {
            let text = parse_device(bad).unwrap_err().to_string();
            assert!(text.starts_with("--device: ") && text.contains(bad), "{text}");
        }
    }

    #[test]
    fn available_memory_is_read_from_the_system() {
        assert_eq!(parse_available("MemTotal: 9 kB\nMemAvailable:    2 kB\n"), Some(2048));
        assert_eq!(parse_available("MemTotal: 9 kB\n"), None);
        assert!(available_memory().is_none_or(|bytes| bytes > 0));
    }
}
