//! From a spec and a model's header to the plan that status pins. Pure.

use serde_json::Value;
use splitmodel_api::{ModelSource, PlanStatus, PlannedStage, SplitModel, SplitModelSpec};
use splitmodel_gguf::ModelFacts;
use splitmodel_planner::Plan;
use splitmodel_topology::{Machines, Placement, PlacementError, Wanted, place};

use crate::devices::Slot;
use crate::names;
use crate::reason::{NotReady, Reason};

/// A spec that can be worked with.
#[derive(Clone, Debug)]
pub struct Valid {
    /// What it asks for.
    pub wanted: Wanted,
    /// Where the model is.
    pub source: ModelSource,
    /// Hash of what pods are made from.
    pub spec_hash: String,
    /// Names the header that is read: source, credentials, and the wish to read it again.
    pub inspect_key: String,
}

/// Checks what the API server cannot.
///
/// # Errors
/// [`Reason::InvalidSpec`], naming the field.
pub fn validate(model: &SplitModel) -> Result<Valid, NotReady> {
    let invalid = |message: String| NotReady::new(Reason::InvalidSpec, message);
    let problems = model.validate();
    if !problems.is_empty() {
        return Err(invalid(problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")));
    }
    let wanted = Wanted::new(model).map_err(|e| invalid(e.to_string()))?;
    let source = model.source().map_err(|e| invalid(format!("spec.model.source {e}")))?;
    if matches!(source, ModelSource::File { .. }) {
        return Err(invalid(
            "spec.model.source is a file of one machine; in a cluster put it on a claim and write pvc://claim/path, or use \
             hf://, https:// or oci://"
                .to_owned(),
        ));
    }
    let spec = &model.spec;
    Ok(Valid { wanted, source, spec_hash: spec_hash(spec), inspect_key: names::inspect_key(model) })
}

/// Hash of the fields of a spec that pods are made from. What has its default does not count, so that a new field with a
/// default, which a new version of the operator brings, changes nothing.
#[must_use]
pub fn spec_hash(spec: &SplitModelSpec) -> String {
    let mut pods = spec.clone();
    let fresh = SplitModelSpec::new(&spec.model.source);
    // They change Services and the number of chains, not pods.
    pods.replicas = fresh.replicas;
    pods.api.service_type = fresh.api.service_type;
    pods.api.port = fresh.api.port;
    pods.api.session_affinity = fresh.api.session_affinity;
    let json = |spec: &SplitModelSpec| serde_json::to_value(spec).unwrap_or_default();
    let mut said = differences(json(&pods), &json(&fresh));
    said["model"]["source"] = spec.model.source.clone().into();
    names::short_hash(canonical(&said).as_bytes())
}

/// `value` without what is equal in `default`.
fn differences(value: Value, default: &Value) -> Value {
    match (value, default) {
        (Value::Object(map), Value::Object(default)) => map
            .into_iter()
            .filter(|(key, value)| default.get(key) != Some(value))
            .map(|(key, value)| {
                let value = default.get(&key).map_or(value.clone(), |default| differences(value, default));
                (key, value)
            })
            .collect(),
        (value, _) => value,
    }
}

/// JSON with the keys in the order of the alphabet, whatever features other crates give `serde_json`.
fn canonical(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| *key);
            let entries: Vec<_> = entries.iter().map(|(k, v)| format!("{k:?}:{}", canonical(v))).collect();
            format!("{{{}}}", entries.join(","))
        }
        Value::Array(list) => format!("[{}]", list.iter().map(canonical).collect::<Vec<_>>().join(",")),
        other => other.to_string(),
    }
}

/// Plans the model that `facts` describe. `machines` are those of the cluster, where they may be seen.
///
/// # Errors
/// [`Reason::NoNode`] or [`Reason::DoesNotFit`], with what is missing, [`Reason::InvalidSpec`], or
/// [`Reason::InspectFailed`] for facts that cannot be read.
pub fn make(
    model: &SplitModel,
    valid: &Valid,
    facts: &str,
    machines: Option<&Machines<'_>>,
    image: &str,
) -> Result<PlanStatus, NotReady> {
    let facts = ModelFacts::from_compact(facts).map_err(|e| {
        let message =
            format!("what the model's header says cannot be read: {e}; set the annotation {} anew", names::RETRY);
        NotReady::new(Reason::InspectFailed, message)
    })?;
    let Placement { plan: made, places } = place(&valid.wanted, &facts, machines).map_err(|e| {
        let reason = if matches!(e, PlacementError::NoPlace(_)) { Reason::NoNode } else { Reason::DoesNotFit };
        NotReady::new(reason, e.to_string())
    })?;
    let mut notes: Vec<String> = made.warnings.iter().map(|w| format!("warning: {w}")).collect();
    notes.extend(made.notes.iter().cloned());
    notes.extend(made.unused.iter().map(|u| format!("{} is not used: {}", u.device, u.reason)));
    notes.extend(places.excluded.iter().map(|(node, why)| format!("{node} is not used: it {why}")));
    notes.truncate(32);
    let stages = stages(&made, &places.slots);
    let image = valid.wanted.spec.image.clone().unwrap_or_else(|| image.to_owned());
    let mut status = PlanStatus {
        revision: String::new(),
        spec_hash: valid.spec_hash.clone(),
        retry: names::retry(model),
        model_digest: facts.digest,
        image,
        stages,
        notes,
    };
    status.revision = revision(&status);
    Ok(status)
}

/// Names what the plan makes: the cut, the model, the image, and the spec.
fn revision(plan: &PlanStatus) -> String {
    let layers: Vec<_> = plan.stages.iter().map(|s| (s.layers.as_str(), s.gpu_mib)).collect();
    let text = format!("{}\n{}\n{}\n{layers:?}", plan.spec_hash, plan.model_digest, plan.image);
    names::short_hash(text.as_bytes())
}

fn stages(made: &Plan, slots: &[Slot]) -> Vec<PlannedStage> {
    let bytes = |b: u64| i64::try_from(b).unwrap_or(i64::MAX);
    let stage = |s: &splitmodel_planner::StagePlan| {
        let by_label = slots.get(s.device).and_then(|slot| slot.gpus).filter(|(_, by_label)| *by_label);
        PlannedStage {
            layers: format!("{}-{}", s.first, s.end.saturating_sub(1)),
            device: Some(s.device_name.clone()),
            weight_bytes: bytes(s.bytes.weights),
            embedding_bytes: bytes(s.bytes.embedding),
            kv_bytes: bytes(s.bytes.kv),
            compute_bytes: bytes(s.bytes.compute),
            headroom_bytes: s.headroom,
            gpu_mib: by_label.map(|(count, _)| bytes(s.total.div_ceil(u64::from(count.max(1))).div_ceil(1 << 20))),
        }
    };
    made.stages.iter().map(stage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> SplitModelSpec {
        let head = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: {name: m}\nspec:\n  model: {source: 'hf://a/b/c.gguf'}\n";
        SplitModel::from_yaml(&format!("{head}{text}")).unwrap().spec
    }

    #[test]
    fn pods_follow_what_they_are_made_from_only() {
        let hash = |text: &str| spec_hash(&spec(text));
        let plain = hash("");
        for same in
            ["  replicas: 3\n", "  api: {port: 80, serviceType: NodePort}\n", "  contextLength: 4096\n  parallel: 4\n"]
        {
            assert_eq!(hash(same), plain, "{same}");
        }
        for other in
            ["  stages: 2\n", "  contextLength: 8192\n", "  pods: {env: [{name: A}]}\n", "  api: {keySecret: k}\n"]
        {
            assert_ne!(hash(other), plain, "{other}");
        }
    }

    #[test]
    fn a_field_with_a_default_that_a_later_version_brings_changes_nothing() {
        let fresh = serde_json::json!({"a": 1, "new": {"x": true, "y": 2}});
        let said = serde_json::json!({"a": 2, "new": {"x": true, "y": 2}, "own": [1]});
        assert_eq!(canonical(&differences(said, &fresh)), r#"{"a":2,"own":[1]}"#);
    }

    #[test]
    fn a_file_of_one_machine_is_none_of_a_cluster() {
        let text = "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: {name: m}\nspec: {model: {source: 'file:///m.gguf'}}";
        let why = validate(&SplitModel::from_yaml(text).unwrap()).unwrap_err();
        assert_eq!(why.reason, Reason::InvalidSpec);
        assert!(why.message.contains("pvc://"), "{}", why.message);
    }
}
