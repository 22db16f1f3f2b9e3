//! Nodes as places for stages. Pure.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Taint, Toleration};
use splitmodel_api::{Quantity, StageSpec};
use splitmodel_planner::Device;

use crate::{Machines, Wanted};

/// Label of NVIDIA's feature discovery: MiB of each GPU.
const GPU_MEMORY: &str = "nvidia.com/gpu.memory";
/// Most places of one plan.
const MAX_PLACES: usize = 128;

/// A place for one stage.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// For the planner; its name is the node's.
    pub device: Device,
    /// GPUs of it, and whether the node's label says how large they are.
    pub gpus: Option<(u32, bool)>,
}

/// Where stages may run, in the order of the chain, and which nodes hold none of them, and why.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Slots {
    /// The places.
    pub slots: Vec<Slot>,
    /// Nodes that are out of the question, with the reason.
    pub excluded: Vec<(String, String)>,
}

/// No place for a stage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stage {stage} finds no node: {}", reasons(.excluded))]
pub struct NoPlace {
    /// The stage.
    pub stage: usize,
    /// Each node's reason.
    pub excluded: Vec<(String, String)>,
}

fn reasons(excluded: &[(String, String)]) -> String {
    if excluded.is_empty() {
        return "there are no nodes".to_owned();
    }
    excluded.iter().map(|(node, why)| format!("{node} {why}")).collect::<Vec<_>>().join("; ")
}

/// Places for the stages that `wanted` asks for. Without `machines`, which the operator may not see in namespaced mode, they are
/// as large as the SplitModel declares, or not limited.
///
/// # Errors
/// [`NoPlace`].
pub fn slots(wanted: &Wanted, machines: Option<&Machines<'_>>) -> Result<Slots, NoPlace> {
    let count = wanted.spec.stage_count().map(|n| n as usize);
    let Some(machines) = machines else { return Ok(declared(wanted, count.unwrap_or(1))) };
    if wanted.spec.stage_list.is_some() { one_by_one(wanted, machines) } else { alike(wanted, machines, count) }
}

fn declared(wanted: &Wanted, count: usize) -> Slots {
    let slots = (0..count.clamp(1, MAX_PLACES)).map(|stage| {
        let spec = wanted.spec.stage(stage);
        let gpu = spec.gpu.as_ref();
        let memory = gpu.and_then(|g| g.memory.as_ref()?.bytes()?.checked_mul(g.count.into()));
        let name = gpu.map_or_else(|| "any node".to_owned(), |g| format!("any {}", g.resource));
        Slot {
            device: Device { host: gpu.is_none(), ..Device::new(name, memory) },
            gpus: gpu.map(|g| (g.count, false)),
        }
    });
    Slots { slots: slots.collect(), excluded: Vec::new() }
}

/// All stages want the same of a node.
fn alike(wanted: &Wanted, machines: &Machines<'_>, count: Option<usize>) -> Result<Slots, NoPlace> {
    let spec = wanted.spec.stage(0);
    let mut found = Slots::default();
    let mut fitting = Vec::new();
    for node in &machines.nodes {
        match offer(machines, node, &spec) {
            Ok(offer) => fitting.push(offer),
            Err(why) => found.excluded.push((name(node), why)),
        }
    }
    if fitting.is_empty() {
        return Err(NoPlace { stage: 0, excluded: found.excluded });
    }
    // Without GPUs stages share nodes, and their memory.
    let shares = count.map_or(1, |n| n.div_ceil(fitting.len()));
    for offer in fitting {
        let each = if spec.gpu.is_some() { offer.places } else { shares };
        let memory = offer.memory.map(|m| if spec.gpu.is_some() { m } else { m / each.max(1) as u64 });
        for _ in 0..each {
            found.slots.push(offer.slot(memory));
        }
    }
    found.slots.truncate(MAX_PLACES);
    Ok(found)
}

/// Each stage says what it wants: it gets the largest place that is left.
fn one_by_one(wanted: &Wanted, machines: &Machines<'_>) -> Result<Slots, NoPlace> {
    let stages = wanted.spec.stage_list.as_ref().map_or(0, Vec::len);
    let mut taken: BTreeMap<(String, String), usize> = BTreeMap::new();
    let mut found = Slots::default();
    for stage in 0..stages {
        let spec = wanted.spec.stage(stage);
        let resource = spec.gpu.as_ref().map(|g| g.resource.clone()).unwrap_or_default();
        let mut excluded = Vec::new();
        let mut best: Option<Offer> = None;
        for node in &machines.nodes {
            match offer(machines, node, &spec) {
                Ok(offer) => {
                    let used = taken.get(&(offer.node.clone(), resource.clone())).copied().unwrap_or(0);
                    let full = spec.gpu.is_some() && used >= offer.places;
                    let memory = |o: &Offer| (o.memory.unwrap_or(u64::MAX), std::cmp::Reverse(used));
                    if full {
                        excluded.push((offer.node, format!("has no {resource} left beside the other stages")));
                    } else if best.as_ref().is_none_or(|b| memory(&offer) > memory(b)) {
                        best = Some(offer);
                    }
                }
                Err(why) => excluded.push((name(node), why)),
            }
        }
        let Some(best) = best else { return Err(NoPlace { stage, excluded }) };
        *taken.entry((best.node.clone(), resource)).or_default() += 1;
        found.slots.push(best.slot(best.memory));
        for (node, why) in excluded {
            if !found.excluded.iter().any(|(n, _)| *n == node) {
                found.excluded.push((node, format!("is not for stage {stage}: it {why}")));
            }
        }
    }
    found.excluded.retain(|(node, _)| !found.slots.iter().any(|s| s.device.name == *node));
    Ok(found)
}

/// What a node has for stages of one kind.
struct Offer {
    node: String,
    /// Stages that find their GPUs there; 1 without.
    places: usize,
    /// Bytes for each.
    memory: Option<u64>,
    gpus: Option<(u32, bool)>,
}

impl Offer {
    fn slot(&self, memory: Option<u64>) -> Slot {
        let host = self.gpus.is_none();
        Slot { device: Device { host, ..Device::new(self.node.clone(), memory) }, gpus: self.gpus }
    }
}

fn name(node: &Node) -> String {
    node.metadata.name.clone().unwrap_or_default()
}

/// What `node` offers a stage, or why it cannot take it.
fn offer(machines: &Machines<'_>, node: &Node, stage: &StageSpec) -> Result<Offer, String> {
    let spec = node.spec.as_ref();
    if spec.and_then(|s| s.unschedulable).unwrap_or(false) {
        return Err("is cordoned".to_owned());
    }
    if !is_ready(node) {
        return Err("is not ready".to_owned());
    }
    let none = BTreeMap::new();
    let labels = node.metadata.labels.as_ref().unwrap_or(&none);
    if let Some((key, value)) = stage.node_selector.iter().find(|(key, value)| labels.get(*key) != Some(value)) {
        return Err(format!("lacks the label {key}={value}"));
    }
    let taints = spec.and_then(|s| s.taints.as_ref()).map(Vec::as_slice).unwrap_or_default();
    let hard = |t: &&Taint| t.effect != "PreferNoSchedule";
    if let Some(taint) = taints.iter().filter(hard).find(|t| !stage.tolerations.iter().any(|o| tolerates(o, t))) {
        return Err(format!("has the taint {}:{}, which the stage does not tolerate", taint.key, taint.effect));
    }
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
    let has = |resource: &str| allocatable.and_then(|a| Quantity(a.get(resource)?.0.clone()).bytes()).unwrap_or(0);
    let Some(gpu) = &stage.gpu else {
        return Ok(Offer { node: name(node), places: 1, memory: Some(has("memory")), gpus: None });
    };
    let there = has(&gpu.resource);
    if there < u64::from(gpu.count) {
        let word = if there == 0 { "no".to_owned() } else { format!("only {there}") };
        return Err(format!("has {word} {}, and a stage asks for {}", gpu.resource, gpu.count));
    }
    let declared = gpu.memory.as_ref().and_then(Quantity::bytes);
    let label = labels.get(GPU_MEMORY).and_then(|mib| mib.parse::<u64>().ok()).map(|mib| mib << 20);
    let each = declared.or(label).or_else(|| machines.published_memory(&name(node), &gpu.resource));
    Ok(Offer {
        node: name(node),
        places: usize::try_from(there / u64::from(gpu.count)).unwrap_or(usize::MAX).min(MAX_PLACES),
        memory: each.map(|m| m.saturating_mul(gpu.count.into())),
        gpus: Some((gpu.count, declared.is_none() && label.is_some())),
    })
}

/// Whether the kubelet says so.
#[must_use]
pub fn is_ready(node: &Node) -> bool {
    let conditions = node.status.as_ref().and_then(|s| s.conditions.as_ref());
    conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// As the scheduler does.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let key = toleration.key.as_deref().unwrap_or_default();
    let exists = toleration.operator.as_deref() == Some("Exists");
    let same_value = toleration.value.as_deref().unwrap_or_default() == taint.value.as_deref().unwrap_or_default();
    let key_fits = if key.is_empty() { exists } else { key == taint.key };
    let effect_fits = toleration.effect.as_deref().is_none_or(|e| e.is_empty() || e == taint.effect);
    key_fits && effect_fits && (exists || same_value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use splitmodel_api::SplitModel;

    fn wanted(spec: &str) -> Wanted {
        let text = format!(
            "apiVersion: splitmodel.dev/v1alpha1\nkind: SplitModel\nmetadata: {{name: m}}\nspec:\n  model: {{source: 'hf://a/b/c.gguf'}}\n{spec}"
        );
        Wanted::new(&SplitModel::from_yaml(&text).unwrap()).unwrap()
    }

    fn node(name: &str, gpus: u32, more: &str) -> Node {
        serde_saphyr::from_str(&format!(
            "metadata: {{name: {name}, labels: {{zone: a, nvidia.com/gpu.memory: '81920'}}}}\nstatus:\n  conditions: [{{type: Ready, status: 'True'}}]\n  allocatable: {{memory: 64Gi, nvidia.com/gpu: '{gpus}'}}\n{more}"
        ))
        .unwrap()
    }

    fn these(nodes: &[Node]) -> Machines<'_> {
        Machines { nodes: nodes.iter().collect(), ..Machines::default() }
    }

    #[test]
    fn gpus_are_places_and_labels_say_how_large() {
        let nodes = [node("a", 2, ""), node("b", 0, ""), node("c", 5, "spec: {unschedulable: true}\n")];
        let found = slots(&wanted("  stageDefaults: {gpu: {count: 1}}\n  stages: 2\n"), Some(&these(&nodes))).unwrap();
        assert_eq!(found.slots.len(), 2);
        let first = &found.slots[0];
        assert_eq!(
            (first.device.name.as_str(), first.device.memory, first.gpus),
            ("a", Some(80 << 30), Some((1, true)))
        );
        assert_eq!(found.excluded[0], ("b".into(), "has no nvidia.com/gpu, and a stage asks for 1".into()));
        assert_eq!(found.excluded[1], ("c".into(), "is cordoned".into()));
        let none = slots(&wanted("  stageDefaults: {gpu: {count: 8}}\n"), Some(&these(&nodes))).unwrap_err();
        assert!(none.to_string().contains("a has only 2 nvidia.com/gpu, and a stage asks for 8"), "{none}");
    }

    #[test]
    fn stages_without_gpus_share_the_memory_of_nodes() {
        let tainted = "spec: {taints: [{key: control, effect: NoSchedule}]}\n";
        let nodes = [node("a", 0, ""), node("b", 0, ""), node("c", 0, tainted)];
        let found = slots(&wanted("  stages: 3\n"), Some(&these(&nodes))).unwrap();
        assert_eq!(found.slots.len(), 4);
        assert!(found.slots.iter().all(|s| s.device.memory == Some(32 << 30) && s.device.host));
        assert!(found.excluded[0].1.contains("the taint control:NoSchedule"), "{:?}", found.excluded);
        let tolerant = "  stages: 3\n  stageDefaults: {tolerations: [{operator: Exists}]}\n";
        assert_eq!(slots(&wanted(tolerant), Some(&these(&nodes))).unwrap().slots.len(), 3);
    }

    #[test]
    fn stages_that_say_what_they_want_get_it_or_the_reason() {
        let nodes = [node("a", 1, ""), node("b", 1, "")];
        let two = "  stageList:\n  - {gpu: {count: 1}}\n  - {gpu: {count: 1, memory: 24Gi}}\n";
        let found = slots(&wanted(two), Some(&these(&nodes))).unwrap();
        let names: Vec<_> = found.slots.iter().map(|s| (s.device.name.as_str(), s.device.memory)).collect();
        assert_eq!(names, [("a", Some(80 << 30)), ("b", Some(24 << 30))]);
        let three = format!("{two}  - {{gpu: {{count: 1}}, nodeSelector: {{zone: b}}}}\n");
        let none = slots(&wanted(&three), Some(&these(&nodes))).unwrap_err();
        assert_eq!(none.stage, 2);
        assert!(none.to_string().contains("a lacks the label zone=b"), "{none}");
    }

    #[test]
    fn what_a_driver_publishes_counts_where_no_label_does() {
        let mut nodes = [node("a", 2, ""), node("b", 2, "")];
        nodes[1].metadata.labels = None;
        let slice = serde_saphyr::from_str(
            "metadata: {name: s}\nspec:\n  driver: gpu.nvidia.com\n  nodeName: b\n  pool: {name: b, generation: 1, resourceSliceCount: 1}\n  devices: [{name: g, capacity: {memory: {value: 24Gi}}}]\n",
        )
        .unwrap();
        let machines = Machines { slices: vec![&slice], ..these(&nodes) };
        let found = slots(&wanted("  stageDefaults: {gpu: {count: 2}}\n"), Some(&machines)).unwrap();
        let memory: Vec<_> = found.slots.iter().map(|s| (s.device.memory, s.gpus)).collect();
        assert_eq!(memory, [(Some(160 << 30), Some((2, true))), (Some(48 << 30), Some((2, false)))]);
    }

    #[test]
    fn without_nodes_what_is_declared_counts() {
        let found = slots(&wanted("  stages: 2\n  stageDefaults: {gpu: {memory: 8Gi, count: 2}}\n"), None);
        let memory: Vec<_> = found.unwrap().slots.iter().map(|s| s.device.memory).collect();
        assert_eq!(memory, [Some(16 << 30); 2]);
    }
}
