//! A SplitModel as people see it. Pure.
use std::collections::BTreeMap;
use std::fmt::Write as _;

use kube::ResourceExt as _;
use splitmodel_api::{ChainStatus, Phase, PlanStatus, PlannedStage, SplitModel, SplitModelStatus, StageStatus};
use splitmodel_topology::names;

use crate::ui;

/// Conditions, and how they are when all is well.
const WANTED: [(&str, &str); 4] =
    [("Planned", "True"), ("Progressing", "False"), ("Ready", "True"), ("Degraded", "False")];
/// Columns of a chain.
const HEAD: [&str; 10] = ["STAGE", "PHASE", "LAYERS", "POD", "NODE", "FETCHED", "WEIGHTS", "KV", "COMPUTE", "RESTARTS"];
/// From the line of the chain to where what a stage says stands: below its phase.
const INDENT: &str = "       ";

/// Tokens per second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rates {
    /// Of each chain that was asked, by its index.
    pub chains: BTreeMap<i32, f64>,
    /// Why one is missing.
    pub note: Option<String>,
}

/// The SplitModel, its chains stage by stage, and what is not as it should be.
#[must_use]
pub fn draw(model: &SplitModel, rates: &Rates) -> String {
    let none = SplitModelStatus::default();
    let status = model.status.as_ref().unwrap_or(&none);
    let mut out = head(model, status, rates);
    if status.chains.is_empty()
        && let Some(plan) = &status.plan
    {
        let stages = plan.stages.iter().map(|p| StageStatus {
            phase: Phase::Planned,
            layers: p.layers.clone(),
            ..StageStatus::default()
        });
        let chain = ChainStatus { phase: Phase::Planned, stages: stages.collect(), ..ChainStatus::default() };
        let _ = writeln!(out, "\nplan of each chain");
        out.push_str(&stages_of(&chain, Some(plan)));
    }
    for chain in &status.chains {
        // The plan says nothing about a chain that still follows the one before.
        let plan = status.plan.as_ref().filter(|p| chain.revision.as_ref().is_none_or(|r| *r == p.revision));
        let _ = write!(out, "\nchain {}  {:?}", chain.index, chain.phase);
        if let Some(rate) = rates.chains.get(&chain.index) {
            let _ = write!(out, "  {rate:.1} tokens/s");
        }
        if plan.is_none() && status.plan.is_some() {
            out.push_str("  still as before the last change");
        }
        out.push('\n');
        out.push_str(&stages_of(chain, plan));
    }
    let troubles = troubles(model, status, rates);
    if !troubles.is_empty() {
        out.push('\n');
        for trouble in troubles {
            let _ = writeln!(out, "{}", ui::plain(&trouble));
        }
    }
    out
}

fn head(model: &SplitModel, status: &SplitModelStatus, rates: &Rates) -> String {
    let mut out = format!("{}  namespace {}\n", model.name_any(), model.namespace().unwrap_or_default());
    let mut line = |label: &str, value: &str| {
        let _ = writeln!(out, "  {label:<9} {}", ui::plain(value));
    };
    line("MODEL", &model.spec.model.source);
    line("PHASE", &status.phase.map_or_else(|| "-".to_owned(), |p| format!("{p:?}")));
    line("READY", status.ready.as_deref().unwrap_or("-"));
    line("URL", status.url.as_deref().unwrap_or("-"));
    if !rates.chains.is_empty() {
        line("TOKENS/S", &format!("{:.1}", rates.chains.values().sum::<f64>()));
    }
    out
}

/// The stages in the order of the chain, with what the plan has for each, and below each what it says.
fn stages_of(chain: &ChainStatus, plan: Option<&PlanStatus>) -> String {
    let rows: Vec<Vec<String>> = chain
        .stages
        .iter()
        .enumerate()
        .map(|(index, stage)| row(index, stage, plan.and_then(|p| p.stages.get(index))))
        .collect();
    let table = ui::table(&HEAD, &rows);
    let mut lines = table.lines();
    let mut out = format!("    {}\n", lines.next().unwrap_or_default());
    let last = chain.stages.len().saturating_sub(1);
    for (index, (line, stage)) in lines.zip(&chain.stages).enumerate() {
        // The last stage sends its answers back to the first.
        let (mark, below) = match index {
            _ if last == 0 => ("    ", "    "),
            0 => ("┌─▶ ", "│   "),
            _ if index == last => ("└── ", "    "),
            _ => ("│   ", "│   "),
        };
        let _ = writeln!(out, "{mark}{line}");
        for said in says(stage) {
            let _ = writeln!(out, "{}", format!("{below}{INDENT}{}", ui::plain(&said)).trim_end());
        }
    }
    out
}

fn row(index: usize, stage: &StageStatus, planned: Option<&PlannedStage>) -> Vec<String> {
    let missing = || "-".to_owned();
    let text = |value: &Option<String>| value.as_deref().map_or_else(missing, ui::plain);
    let planned_bytes = |bytes: fn(&PlannedStage) -> i64| planned.map_or_else(missing, |p| self::bytes(bytes(p)));
    vec![
        index.to_string(),
        format!("{:?}", stage.phase),
        ui::plain(&stage.layers),
        text(&stage.pod),
        text(&stage.node),
        fetched(stage).unwrap_or_else(missing),
        planned_bytes(|p| p.weight_bytes),
        planned_bytes(|p| p.kv_bytes),
        planned_bytes(|p| p.compute_bytes),
        stage.restarts.to_string(),
    ]
}

/// Bytes of the slice that are there, of all.
fn fetched(stage: &StageStatus) -> Option<String> {
    let (done, all) = (stage.fetched_bytes?, stage.total_bytes?);
    if done >= all {
        return Some(bytes(all));
    }
    let percent = i128::from(done.max(0)) * 100 / i128::from(all.max(1));
    Some(format!("{} of {} ({percent}%)", bytes(done), bytes(all)))
}

fn bytes(n: i64) -> String {
    ui::bytes(u64::try_from(n).unwrap_or(0))
}

/// What a stage waits for, and how it failed.
fn says(stage: &StageStatus) -> Vec<String> {
    let mut said: Vec<String> = stage.message.iter().cloned().collect();
    if let Some(failure) = &stage.failure {
        let times = if failure.count == 1 { "once".to_owned() } else { format!("{} times", failure.count) };
        let first = failure.lines.first().map_or("it said nothing", String::as_str);
        said.push(format!("ended {times}, lastly with exit code {}: {first}", failure.exit_code));
        if failure.given_up.is_some() {
            let annotation = names::RETRY;
            said.push(format!(
                "given up: mend the cause, then change the spec or set the annotation {annotation} anew"
            ));
        }
    }
    said
}

/// What is not as it should be.
fn troubles(model: &SplitModel, status: &SplitModelStatus, rates: &Rates) -> Vec<String> {
    let mut troubles = Vec::new();
    if model.metadata.deletion_timestamp.is_some() {
        troubles.push("it is being deleted".to_owned());
    }
    match (status.observed_generation, model.metadata.generation) {
        (None, _) => troubles.push("the operator has not looked at it yet; does it run?".to_owned()),
        (Some(seen), Some(now)) if seen < now => {
            troubles.push("the operator has not looked at the last change of the spec yet; does it run?".to_owned());
        }
        _ => {}
    }
    // Conditions that say the same stand together.
    let mut told: Vec<(String, String)> = Vec::new();
    for (type_, wanted) in WANTED {
        let Some(condition) = status.conditions.iter().find(|c| c.type_ == type_) else { continue };
        if condition.status == wanted {
            continue;
        }
        let what = format!("{type_}={}", condition.status);
        let why = format!("{}: {}", condition.reason, condition.message);
        match told.iter_mut().find(|(_, said)| *said == why) {
            Some((whats, _)) => *whats = format!("{whats}, {what}"),
            None => told.push((what, why)),
        }
    }
    troubles.extend(told.into_iter().map(|(what, why)| format!("{what}  {why}")));
    let notes = status.plan.iter().flat_map(|p| &p.notes).filter(|n| n.starts_with("warning"));
    troubles.extend(notes.cloned());
    troubles.extend(rates.note.iter().map(|note| format!("tokens/s are not known: {note}")));
    troubles
}
