//! What the cluster holds of one SplitModel when it is looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt as _;
use kube::core::DynamicObject;
use splitmodel_control::StageStatus as Reported;
use splitmodel_topology::Machines;

use crate::children::{Kind, Owner};
use crate::names;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Children by kind and name.
    pub children: BTreeMap<(Kind, String), Arc<DynamicObject>>,
    /// Pods of stages, also of those that are going.
    pub pods: Vec<Arc<Pod>>,
    /// The pod that reads the header.
    pub inspect: Option<Arc<Pod>>,
    /// Nodes, where they may be seen.
    pub nodes: Option<Vec<Arc<Node>>>,
    /// What drivers publish of the devices in them, where the cluster has that.
    pub slices: Vec<Arc<ResourceSlice>>,
    /// What stages say of themselves, by the uid of their pod.
    pub reported: BTreeMap<String, Reported>,
    /// Now.
    pub now: Timestamp,
}

/// Chain and stage of a child, by its labels.
#[must_use]
pub fn place(labels: &BTreeMap<String, String>) -> Option<(u32, usize)> {
    Some((labels.get(names::CHAIN)?.parse().ok()?, labels.get(names::STAGE)?.parse().ok()?))
}

impl Observed {
    /// The child, if it is there and belongs to `owner`.
    #[must_use]
    pub fn child(&self, owner: &Owner, kind: Kind, name: &str) -> Option<&Arc<DynamicObject>> {
        self.children.get(&(kind, name.to_owned())).filter(|c| belongs(c, owner))
    }

    /// Children of `owner`.
    pub fn own<'a>(&'a self, owner: &'a Owner) -> impl Iterator<Item = (Kind, &'a Arc<DynamicObject>)> {
        self.children.iter().filter(|(_, c)| belongs(c, owner)).map(|((kind, _), c)| (*kind, c))
    }

    /// Pods of a stage, those that stay first.
    #[must_use]
    pub fn pods_of(&self, chain: u32, stage: usize) -> Vec<&Arc<Pod>> {
        let mut pods: Vec<_> = self.pods.iter().filter(|p| place(p.labels()) == Some((chain, stage))).collect();
        pods.sort_by_key(|p| (p.metadata.deletion_timestamp.is_some(), p.name_any()));
        pods
    }

    /// Whether a chain has any pod.
    #[must_use]
    pub fn has_pods(&self, chain: u32) -> bool {
        self.pods.iter().any(|p| place(p.labels()).is_some_and(|(c, _)| c == chain))
    }

    /// Chains that `owner` has anything of.
    #[must_use]
    pub fn chains(&self, owner: &Owner) -> BTreeSet<u32> {
        self.own(owner).filter_map(|(_, c)| c.labels().get(names::CHAIN)?.parse().ok()).collect()
    }

    /// What plans are made for, where nodes may be seen.
    #[must_use]
    pub fn machines(&self) -> Option<Machines<'_>> {
        let nodes = self.nodes.as_ref()?.iter().map(AsRef::as_ref).collect();
        Some(Machines { nodes, slices: self.slices.iter().map(AsRef::as_ref).collect() })
    }

    /// The node of that name; `None` also where nodes cannot be seen.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.as_ref()?.iter().find(|n| n.metadata.name.as_deref() == Some(name)).map(AsRef::as_ref)
    }
}

fn belongs(child: &DynamicObject, owner: &Owner) -> bool {
    child.owner_references().iter().any(|r| r.uid == owner.uid)
}

/// Whether a pod's condition `Ready` is true and it is to stay.
#[must_use]
pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_ref());
    pod.metadata.deletion_timestamp.is_none()
        && conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}
