//! Conditions, as Kubernetes has them.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::reason::Reason;

/// Longest message; the API server takes 32 KiB.
const MESSAGE: usize = 2000;

/// What a condition says.
pub(super) struct Say<'a> {
    pub(super) type_: &'static str,
    pub(super) status: bool,
    pub(super) reason: Reason,
    pub(super) message: &'a str,
}

/// The condition as it is now; its time moves only when its status changes.
pub(super) fn condition(say: &Say<'_>, before: &[Condition], generation: Option<i64>, now: Timestamp) -> Condition {
    let status = if say.status { "True" } else { "False" };
    let former = before.iter().find(|c| c.type_ == say.type_ && c.status == status);
    let last_transition_time = former.map_or_else(
        // Whole seconds, as the API server keeps them.
        || Time(Timestamp::from_second(now.as_second()).unwrap_or(now)),
        |c| c.last_transition_time.clone(),
    );
    Condition {
        type_: say.type_.to_owned(),
        status: status.to_owned(),
        reason: say.reason.name().to_owned(),
        message: say.message.chars().take(MESSAGE).collect(),
        observed_generation: generation,
        last_transition_time,
    }
}
