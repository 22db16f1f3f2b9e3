//! The plan and how it is made.

use std::fmt;

use serde::{Deserialize, Serialize};
use splitmodel_gguf::ModelFacts;

use crate::{
    Device, Layout, MemoryModel, PlanError, PlanOptions, StageBytes,
    error::{Shortfall, inclusive},
    explicit,
    solve::{Goal, Placed, Search},
};

/// One stage of a plan.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StagePlan {
    /// First layer.
    pub first: u32,
    /// One past the last layer.
    pub end: u32,
    /// Index of the device in the list given.
    pub device: usize,
    /// Name of that device.
    pub device_name: String,
    /// What it needs.
    pub bytes: StageBytes,
    /// Bytes it needs on the device.
    pub total: u64,
    /// Bytes of the device, where they are limited.
    pub memory: Option<u64>,
    /// `memory − total`; below 0 only with the user's own layers.
    pub headroom: Option<i64>,
    /// Part of the time of a token that is spent here, from 0 to 1.
    pub cost_share: f64,
}

/// A device without a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusedDevice {
    /// Its name.
    pub device: String,
    /// Why.
    pub reason: String,
}

/// Layers, devices and bytes of a chain. `Display` draws a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// The stages in the order of the chain.
    pub stages: Vec<StagePlan>,
    /// Devices without a stage.
    pub unused: Vec<UnusedDevice>,
    /// What the planner did that was not asked for.
    pub notes: Vec<String>,
    /// What may go wrong.
    pub warnings: Vec<String>,
    /// Cells of the KV cache, on every stage.
    pub cells: u64,
}

/// Distributes the model of `facts` over `devices`, which stand in the order of the chain.
///
/// # Errors
/// [`PlanError`]: options without meaning, cuts that the model does not allow, or too little memory, with the stage, the
/// device and the bytes that are missing.
pub fn plan(facts: &ModelFacts, devices: &[Device], options: &PlanOptions) -> Result<Plan, PlanError> {
    options.check(facts, devices)?;
    let memory = MemoryModel::new(facts, options);
    let search = Search::new(facts, &memory, devices, options);
    let planner = Planner { facts, devices, options, search };
    match &options.layout {
        Layout::Layers(ranges) => {
            let placed = explicit::place(facts, ranges, devices.len())?;
            let warnings = planner.warnings(&placed)?;
            Ok(planner.finish(&placed, Vec::new(), warnings))
        }
        Layout::Stages(count) => planner.distribute(*count),
        Layout::Auto => {
            // Where nothing fits, the largest count shows the least that is missing.
            let count = match planner.search.fitting_counts() {
                0 => highest(planner.search.possible_counts()),
                counts => counts.trailing_zeros(),
            };
            planner.distribute(count)
        }
    }
}

/// The largest count in a set of counts; 0 where there is none.
fn highest(counts: u128) -> u32 {
    127 - (counts | 1).leading_zeros()
}

struct Planner<'a> {
    facts: &'a ModelFacts,
    devices: &'a [Device],
    options: &'a PlanOptions,
    search: Search<'a>,
}

impl Planner<'_> {
    fn distribute(&self, count: u32) -> Result<Plan, PlanError> {
        if count as usize > self.devices.len() {
            return Err(PlanError::NotEnoughDevices { stages: count, devices: self.devices.len() });
        }
        let possible = self.search.possible_counts();
        if count == 0 || possible & (1 << count) == 0 {
            let most = highest(possible);
            return Err(PlanError::TooManyStages { stages: count, layers: self.facts.n_layers, most });
        }
        match self.search.best(Goal::Cost, count) {
            Some(placed) => {
                let notes = self.moved_cuts(&placed, count);
                Ok(self.finish(&placed, notes, Vec::new()))
            }
            None => Err(self.shortfall(count)),
        }
    }

    fn shortfall(&self, count: u32) -> PlanError {
        let placed = self.search.best(Goal::Shortfall, count).unwrap_or_default();
        let worst = placed.iter().enumerate().max_by_key(|(_, p)| self.search.shortfall(p.device, &p.layers));
        let Some((stage, p)) = worst else {
            return PlanError::TooManyStages { stages: count, layers: self.facts.n_layers, most: 0 };
        };
        PlanError::DoesNotFit(Box::new(Shortfall {
            stages: placed.len(),
            stage,
            first: p.layers.start,
            end: p.layers.end,
            device: self.devices[p.device].name.clone(),
            usable: self.search.usable(p.device).unwrap_or(u64::MAX),
            bytes: self.search.memory.stage(p.layers.clone()),
            missing: self.search.shortfall(p.device, &p.layers),
            unused: self.unused(&placed),
        }))
    }

    /// Where cuts would lie if the model could be cut anywhere.
    fn moved_cuts(&self, placed: &[Placed], count: u32) -> Vec<String> {
        let Some(ideal) = self.search.without_rules().and_then(|s| s.best(Goal::Cost, count)) else {
            return Vec::new();
        };
        let mut notes = Vec::new();
        for (stage, (ideal, real)) in ideal.iter().zip(placed).enumerate() {
            let (wanted, got) = (ideal.layers.start, real.layers.start);
            if wanted == got {
                continue;
            }
            let cut = self.facts.illegal_cuts.iter().find(|c| c.layer == wanted).map(|c| c.reason.clone());
            let range = || self.facts.check_range(ideal.layers.start, ideal.layers.end).err().map(|e| e.to_string());
            let reason = cut.or_else(range).unwrap_or_else(|| "another cut had to move".into());
            notes.push(format!("stage {stage} begins at layer {got} instead of {wanted}: {reason}"));
        }
        notes
    }

    /// The user's ranges win over the estimate, unless the weights alone are too large.
    fn warnings(&self, placed: &[Placed]) -> Result<Vec<String>, PlanError> {
        let mut warnings = Vec::new();
        for (stage, p) in placed.iter().enumerate() {
            let device = &self.devices[p.device];
            let bytes = self.search.memory.stage(p.layers.clone());
            let Some(memory) = device.memory else { continue };
            if bytes.weights > memory {
                return Err(PlanError::CannotLoad {
                    stage,
                    first: p.layers.start,
                    end: p.layers.end,
                    device: device.name.clone(),
                    weights: bytes.weights,
                    memory,
                });
            }
            let missing = self.search.shortfall(p.device, &p.layers);
            if missing > 0 {
                warnings.push(format!(
                    "stage {stage} (layers {}) is estimated at {} on {} (weights {}, KV {}, compute {}), {} more than it \
                     should use; it may fail to load",
                    inclusive(p.layers.start, p.layers.end),
                    human(bytes.on_device(device.host)),
                    device.name,
                    human(bytes.weights),
                    human(bytes.kv),
                    human(bytes.compute),
                    human(missing),
                ));
            }
        }
        Ok(warnings)
    }

    fn unused(&self, placed: &[Placed]) -> Vec<UnusedDevice> {
        let used = |d: usize| placed.iter().any(|p| p.device == d);
        (0..self.devices.len())
            .filter(|d| !used(*d))
            .map(|d| UnusedDevice { device: self.devices[d].name.clone(), reason: self.why_unused(d, placed.len()) })
            .collect()
    }

    fn why_unused(&self, device: usize, stages: usize) -> String {
        let n = self.facts.n_layers;
        let smallest = (0..n)
            .filter_map(|first| (first + 1..=n).map(|end| first..end).find(|r| self.search.is_legal(r)))
            .min_by_key(|r| self.search.shortfall(device, r));
        match smallest {
            Some(range) if self.search.shortfall(device, &range) > 0 => format!(
                "too small: its smallest stage (layers {}) needs {}, it may use {}",
                inclusive(range.start, range.end),
                human(self.search.memory.stage(range).on_device(self.devices[device].host)),
                human(self.search.usable(device).unwrap_or(u64::MAX)),
            ),
            _ => match &self.options.layout {
                Layout::Auto => format!("not needed: the chain fits on {stages} of the devices"),
                Layout::Stages(_) => format!("not needed: {stages} of the devices are the best for as many stages"),
                Layout::Layers(_) => "there are more devices than stages".into(),
            },
        }
    }

    fn finish(&self, placed: &[Placed], notes: Vec<String>, warnings: Vec<String>) -> Plan {
        let sum: f64 = placed.iter().map(|p| self.search.cost(p.device, &p.layers)).sum();
        let stages = placed.iter().map(|p| {
            let device = &self.devices[p.device];
            let bytes = self.search.memory.stage(p.layers.clone());
            let total = bytes.on_device(device.host);
            let free = |m: u64| i64::try_from(i128::from(m) - i128::from(total)).unwrap_or(i64::MIN);
            StagePlan {
                first: p.layers.start,
                end: p.layers.end,
                device: p.device,
                device_name: device.name.clone(),
                bytes,
                total,
                memory: device.memory,
                headroom: device.memory.map(free),
                cost_share: if sum > 0.0 { self.search.cost(p.device, &p.layers) / sum } else { 0.0 },
            }
        });
        Plan {
            stages: stages.collect(),
            unused: self.unused(placed),
            notes,
            warnings,
            cells: self.search.memory.cells(),
        }
    }
}

/// Bytes for people: at most one decimal, binary units.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head =
            ["STAGE", "DEVICE", "LAYERS", "WEIGHTS", "KV", "COMPUTE", "TOTAL", "HEADROOM", "COST"].map(String::from);
        let mut rows = vec![head];
        for (i, s) in self.stages.iter().enumerate() {
            let headroom = match s.headroom {
                None => "-".into(),
                Some(free) if free < 0 => format!("-{}", human(free.unsigned_abs())),
                Some(free) => human(free.unsigned_abs()),
            };
            rows.push([
                i.to_string(),
                s.device_name.clone(),
                inclusive(s.first, s.end),
                human(s.bytes.weights),
                human(s.bytes.kv),
                human(s.bytes.compute),
                human(s.total),
                headroom,
                format!("{:.0}%", s.cost_share * 100.0),
            ]);
        }
        let widths: Vec<usize> =
            (0..rows[0].len()).map(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0)).collect();
        for row in &rows {
            // Names to the left, numbers to the right.
            let cells =
                row.iter().zip(&widths).enumerate().map(|(c, (cell, &width))| {
                    if c == 1 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
                });
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        if let Some(first) = self.stages.first().filter(|s| s.bytes.embedding > 0) {
            writeln!(f, "Stage 0 also holds the embedding table in host memory: {}.", human(first.bytes.embedding))?;
        }
        for unused in &self.unused {
            writeln!(f, "{} is not used: {}.", unused.device, unused.reason)?;
        }
        for note in &self.notes {
            writeln!(f, "Note: {note}.")?;
        }
        for warning in &self.warnings {
            writeln!(f, "Warning: {warning}.")?;
        }
        Ok(())
    }
}
