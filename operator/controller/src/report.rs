//! Status and events, written.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource as _, ResourceExt as _};
use serde_json::json;
use splitmodel_api::{GROUP, SplitModel, SplitModelStatus, VERSION};

use crate::apply::FIELD_MANAGER;
use crate::metrics::Metrics;
use crate::settings::Settings;

/// Longest note of an event; the API server takes 1 kB.
const NOTE: usize = 900;

/// Writes `status`.
///
/// # Errors
/// The API server's.
pub async fn write(
    client: &Client,
    model: &SplitModel,
    status: &SplitModelStatus,
    metrics: &Metrics,
) -> Result<(), kube::Error> {
    let api: Api<SplitModel> = Api::namespaced(client.clone(), &model.namespace().unwrap_or_default());
    let body = json!({
        "apiVersion": format!("{GROUP}/{VERSION}"),
        "kind": "SplitModel",
        // A new object of the same name must not get the status of the old one.
        "metadata": {"name": model.name_any(), "uid": model.uid()},
        "status": status,
    });
    metrics.write("SplitModel");
    let written =
        api.patch_status(&model.name_any(), &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(body)).await;
    match written {
        Ok(_) => Ok(()),
        // Deleted, or replaced, meanwhile.
        Err(kube::Error::Api(error)) if matches!(error.code, 404 | 409) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Tells what has changed from the status that `model` has to `now`. An event that cannot be written is left out.
pub async fn events(client: &Client, settings: &Settings, model: &SplitModel, now: &SplitModelStatus) {
    let before = model.status.as_ref().map(|s| by_type(&s.conditions)).unwrap_or_default();
    let reporter = Reporter { controller: FIELD_MANAGER.to_owned(), instance: Some(settings.identity.clone()) };
    let recorder = Recorder::new(client.clone(), reporter);
    for condition in &now.conditions {
        let former = before.get(condition.type_.as_str());
        let turned = former.is_none_or(|f| f.status != condition.status);
        let other_reason = former.is_some_and(|f| f.reason != condition.reason);
        let good = condition.status == "True";
        let tell = match condition.type_.as_str() {
            "Planned" => turned || other_reason,
            "Ready" => turned && (good || former.is_some()),
            "Degraded" => good && (turned || other_reason),
            _ => false,
        };
        if !tell {
            continue;
        }
        let warning = if condition.type_ == "Degraded" { good } else { !good && condition.reason != "Inspecting" };
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: condition.reason.clone(),
            note: Some(condition.message.chars().take(NOTE).collect()),
            action: condition.type_.clone(),
            secondary: None,
        };
        if let Err(error) = recorder.publish(&event, &model.object_ref(&())).await {
            tracing::warn!(%error, reason = event.reason, "an event could not be written");
        }
    }
}

fn by_type(conditions: &[Condition]) -> BTreeMap<&str, &Condition> {
    conditions.iter().map(|c| (c.type_.as_str(), c)).collect()
}
