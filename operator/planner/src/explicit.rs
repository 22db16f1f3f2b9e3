//! The user's own layer ranges.

use std::ops::Range;

use splitmodel_gguf::ModelFacts;

use crate::{PlanError, solve::Placed};

/// Checks that `ranges` cover the layers in order and only cut where the model may be cut.
pub(crate) fn place(facts: &ModelFacts, ranges: &[Range<u32>], devices: usize) -> Result<Vec<Placed>, PlanError> {
    let n = facts.n_layers;
    let mut expected_first = 0;
    for (stage, range) in ranges.iter().enumerate() {
        let last = stage + 1 == ranges.len();
        let reason = if range.end <= range.start {
            ", and needs a layer"
        } else if last && range.end != n {
            ", and the last stage must end with the last layer"
        } else if range.end > n {
            ", and ends beyond the model"
        } else {
            ""
        };
        if range.start != expected_first || !reason.is_empty() {
            return Err(PlanError::Ranges {
                stage,
                first: range.start,
                end: range.end,
                expected_first,
                reason,
                layers: n,
            });
        }
        expected_first = range.end;
    }
    for (stage, range) in ranges.iter().enumerate() {
        if stage > 0 && !facts.legal_cuts.contains(&range.start) {
            let layer = range.start;
            let known = facts.illegal_cuts.iter().find(|c| c.layer == layer);
            return Err(PlanError::IllegalCut {
                stage,
                layer,
                reason: known.map_or_else(|| "the model may not be cut there".into(), |c| c.reason.clone()),
                below: facts.legal_cuts.iter().copied().filter(|l| *l < layer).max(),
                above: facts.legal_cuts.iter().copied().filter(|l| *l > layer).min(),
            });
        }
        if let Err(e) = facts.check_range(range.start, range.end) {
            return Err(PlanError::IllegalStage { stage, reason: e.to_string() });
        }
    }
    if ranges.len() > devices {
        return Err(PlanError::NotEnoughDevices { stages: ranges.len() as u32, devices });
    }
    Ok(ranges.iter().enumerate().map(|(device, layers)| Placed { device, layers: layers.clone() }).collect())
}
