//! What belongs to a SplitModel, as the operator applies it. Pure.

mod access;
mod inspect;
mod pod;
mod stage;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::core::{ApiResource, DynamicObject, GroupVersionKind, ObjectMeta};
use serde_json::{Value, json};
use splitmodel_api::{GROUP, PlanStatus, SplitModel, VERSION};
use splitmodel_topology::Wanted;

use crate::names;
use crate::settings::Settings;

pub use access::{api_service, network_policy};
pub use inspect::{ended, facts, inspect_pod, read_facts};
pub use stage::chain;

/// Kinds of children that are watched and applied. Secrets are not among them: the operator may not list them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "Kubernetes' own names")]
pub enum Kind {
    Service,
    ConfigMap,
    PersistentVolumeClaim,
    NetworkPolicy,
    PodDisruptionBudget,
    StatefulSet,
    Pod,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Service,
        Self::ConfigMap,
        Self::PersistentVolumeClaim,
        Self::NetworkPolicy,
        Self::PodDisruptionBudget,
        Self::StatefulSet,
        Self::Pod,
    ];

    /// For the API.
    #[must_use]
    pub fn resource(self) -> ApiResource {
        let (group, version, kind) = match self {
            Self::Service => ("", "v1", "Service"),
            Self::ConfigMap => ("", "v1", "ConfigMap"),
            Self::PersistentVolumeClaim => ("", "v1", "PersistentVolumeClaim"),
            Self::Pod => ("", "v1", "Pod"),
            Self::NetworkPolicy => ("networking.k8s.io", "v1", "NetworkPolicy"),
            Self::PodDisruptionBudget => ("policy", "v1", "PodDisruptionBudget"),
            Self::StatefulSet => ("apps", "v1", "StatefulSet"),
        };
        let mut resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        if self == Self::NetworkPolicy {
            "networkpolicies".clone_into(&mut resource.plural);
        }
        resource
    }
}

/// A child as it should be.
#[derive(Clone, Debug, PartialEq)]
pub struct Child {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Says whether it has changed.
    pub hash: String,
    /// The whole object, without status.
    pub body: Value,
    /// Whether a difference in the cluster is left alone while the hash is the same: what pods are made from must not change
    /// because of a new version of the operator.
    pub pinned: bool,
}

impl Child {
    fn new(kind: Kind, owner: &Owner, name: String, labels: BTreeMap<String, String>, content: Value) -> Self {
        let resource = kind.resource();
        let mut body = json!({
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": {
                "name": name,
                "namespace": owner.namespace,
                "labels": labels,
                "ownerReferences": [owner.reference()],
            },
        });
        if let (Some(body), Value::Object(content)) = (body.as_object_mut(), content) {
            body.extend(content);
        }
        let hash = names::short_hash(body.to_string().as_bytes());
        Self { kind, name, hash, body, pinned: false }
    }

    /// Changes only with `hash`.
    fn pinned(mut self, hash: String) -> Self {
        (self.hash, self.pinned) = (hash, true);
        self
    }

    /// The object to apply: with its hash.
    #[must_use]
    pub fn manifest(&self) -> Value {
        let mut manifest = self.body.clone();
        manifest["metadata"]["annotations"][names::HASH] = self.hash.clone().into();
        manifest
    }

    /// Whether it makes a pod of a stage behind stage 0.
    #[must_use]
    pub fn is_later_stage(&self) -> bool {
        let stage = &self.body["metadata"]["labels"][names::STAGE];
        self.kind == Kind::StatefulSet && stage.as_str().is_some_and(|s| s != "0")
    }

    /// Whether `live` is as it should be.
    #[must_use]
    pub fn is_current(&self, live: &DynamicObject) -> bool {
        let hash = live.metadata.annotations.as_ref().and_then(|a| a.get(names::HASH));
        if hash != Some(&self.hash) {
            return false;
        }
        self.pinned || serde_json::to_value(live).is_ok_and(|live| covers(&live, &self.body))
    }
}

/// Whether everything that `wanted` says stands in `live`. Lists must be equal in length and order; the API server adds
/// defaults to objects, also to those in lists.
fn covers(live: &Value, wanted: &Value) -> bool {
    match (live, wanted) {
        (Value::Object(live), Value::Object(wanted)) => {
            wanted.iter().all(|(key, value)| live.get(key).is_some_and(|live| covers(live, value)))
        }
        (Value::Array(live), Value::Array(wanted)) => {
            live.len() == wanted.len() && live.iter().zip(wanted).all(|(live, wanted)| covers(live, wanted))
        }
        _ => live == wanted,
    }
}

/// Whose children they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Name of the SplitModel.
    pub name: String,
    /// Its namespace.
    pub namespace: String,
    /// Its uid.
    pub uid: String,
}

impl Owner {
    /// The owner, if it is in the cluster.
    #[must_use]
    pub fn of(model: &SplitModel) -> Option<Self> {
        let ObjectMeta { name, namespace, uid, .. } = &model.metadata;
        Some(Self { name: name.clone()?, namespace: namespace.clone()?, uid: uid.clone()? })
    }

    /// The reference that children carry.
    #[must_use]
    pub fn reference(&self) -> OwnerReference {
        OwnerReference {
            api_version: format!("{GROUP}/{VERSION}"),
            kind: "SplitModel".to_owned(),
            name: self.name.clone(),
            uid: self.uid.clone(),
            controller: Some(true),
            block_owner_deletion: Some(false),
        }
    }
}

/// Everything that children are made from.
#[derive(Clone, Copy, Debug)]
pub struct Recipe<'a> {
    /// Whose they are.
    pub owner: &'a Owner,
    /// What it asks for.
    pub wanted: &'a Wanted,
    /// The plan that chains follow.
    pub plan: &'a PlanStatus,
    /// The operator's own.
    pub settings: &'a Settings,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_of_the_server_are_no_difference() {
        let live = json!({"a": {"b": [{"c": 1, "default": true}]}, "status": {}});
        assert!(covers(&live, &json!({"a": {"b": [{"c": 1}]}})));
        for other in [json!({"a": {"b": [{"c": 2}]}}), json!({"a": {"b": []}}), json!({"z": 1}), json!({"a": []})] {
            assert!(!covers(&live, &other), "{other}");
        }
    }
}
