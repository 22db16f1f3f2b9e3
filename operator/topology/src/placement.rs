//! A model onto the nodes of a cluster.

use splitmodel_gguf::ModelFacts;
use splitmodel_planner::{Device, Plan, PlanError, plan};

use crate::devices::{NoPlace, Slots, slots};
use crate::{Machines, Wanted};

/// Where the stages of a model go.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The stages.
    pub plan: Plan,
    /// The places; stages name theirs by its index.
    pub places: Slots,
}

/// Why a model goes onto no nodes.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlacementError {
    /// No node is what a stage asks for.
    #[error(transparent)]
    NoPlace(#[from] NoPlace),
    /// The nodes that are lack memory, or the model cannot be cut so.
    #[error("{error}{}", and(.excluded))]
    DoesNotFit {
        /// What is missing.
        error: PlanError,
        /// Nodes that are out of the question, with the reason.
        excluded: Vec<(String, String)>,
    },
}

fn and(excluded: &[(String, String)]) -> String {
    excluded.iter().map(|(node, why)| format!("; {node} {why}")).collect()
}

/// Plans the model of `facts` for the `machines` of a cluster, as [`slots`] sees them.
///
/// # Errors
/// [`PlacementError`], with what is missing and each node's reason.
pub fn place(
    wanted: &Wanted,
    facts: &ModelFacts,
    machines: Option<&Machines<'_>>,
) -> Result<Placement, PlacementError> {
    let places = slots(wanted, machines)?;
    let devices: Vec<Device> = places.slots.iter().map(|s| s.device.clone()).collect();
    match plan(facts, &devices, &wanted.options()) {
        Ok(plan) => Ok(Placement { plan, places }),
        Err(error) => Err(PlacementError::DoesNotFit { error, excluded: places.excluded }),
    }
}
