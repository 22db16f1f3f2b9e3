//! From what the cluster holds to a SplitModel's status. Pure.

mod conditions;
mod stage;

use splitmodel_api::{ChainStatus, LayerRange, Phase, PlanStatus, SplitModel, SplitModelStatus, StageStatus};

use kube::ResourceExt as _;

use crate::children::Owner;
use crate::names;
use crate::observed::Observed;
use crate::reason::{NotReady, Reason};
use crate::rollout::{Act, ChainView};
use conditions::{Say, condition};
use stage::Known;

/// What a status is made from.
pub struct Situation<'a> {
    /// The SplitModel, with the status that it has.
    pub model: &'a SplitModel,
    /// For its children.
    pub owner: &'a Owner,
    /// What the cluster holds.
    pub observed: &'a Observed,
    /// The plan that chains follow, if there is one.
    pub plan: Option<&'a PlanStatus>,
    /// Why there is none for this spec.
    pub unplanned: Option<&'a NotReady>,
    /// What else is wrong.
    pub troubles: &'a [NotReady],
    /// The chains, and what happens to each.
    pub chains: &'a [(ChainView, Act)],
    /// Warnings about StatefulSets and pods, by name.
    pub warnings: &'a std::collections::BTreeMap<String, String>,
    /// Domain of the cluster.
    pub domain: &'a str,
}

/// The status.
#[must_use]
pub fn status(situation: &Situation<'_>) -> SplitModelStatus {
    let Situation { model, owner, observed, plan, .. } = situation;
    let spec = &model.spec;
    let none = SplitModelStatus::default();
    let before = model.status.as_ref().unwrap_or(&none);
    let mut reasons: Vec<NotReady> = situation.unplanned.into_iter().chain(situation.troubles).cloned().collect();
    let staying = situation.chains.iter().filter(|(view, _)| view.index < spec.replicas);
    let chains: Vec<ChainStatus> = staying
        .clone()
        .map(|(view, act)| {
            let (chain, why) = chain(situation, before, view, *act);
            reasons.extend(why);
            chain
        })
        .collect();
    let serving = chains.iter().filter(|c| c.phase == Phase::Serving).count();
    let stages = chains.iter().map(|c| c.stages.len()).sum::<usize>();
    let ready = chains.iter().flat_map(|c| &c.stages).filter(|s| s.phase == Phase::Serving).count();
    let rolling = plan.is_some_and(|plan| {
        let behind = |view: &ChainView| view.sets.iter().any(|(_, r)| *r != plan.revision);
        staying.clone().any(|(view, _)| behind(view))
    });
    let generation = model.metadata.generation;
    let mut all = SplitModelStatus {
        observed_generation: generation,
        phase: Some(phase(&chains, spec.replicas, situation)),
        ready: plan.map(|plan| format!("{ready}/{}", stages.max(plan.stages.len() * spec.replicas as usize))),
        layers: plan.map(layers),
        url: Some(format!("http://{}.{}.svc.{}:{}/v1", owner.name, owner.namespace, situation.domain, spec.api.port)),
        replicas: i32::try_from(serving).unwrap_or(i32::MAX),
        selector: Some(format!("{}={},{}=0", names::MODEL, owner.name, names::STAGE)),
        conditions: Vec::new(),
        plan: plan.cloned(),
        chains,
    };
    reasons.sort_by_key(|r| weight(r.reason));
    let facts = Facts { serving, ready, stages, rolling, reasons: &reasons };
    let says = says(situation, &all, &facts);
    all.conditions = says
        .iter()
        .map(|(type_, status, why)| {
            let say = Say { type_, status: *status, reason: why.reason, message: &why.message };
            condition(&say, &before.conditions, generation, observed.now)
        })
        .collect();
    all
}

struct Facts<'a> {
    serving: usize,
    ready: usize,
    stages: usize,
    rolling: bool,
    /// The weightiest first.
    reasons: &'a [NotReady],
}

/// What the conditions say.
fn says(
    situation: &Situation<'_>,
    status: &SplitModelStatus,
    facts: &Facts<'_>,
) -> [(&'static str, bool, NotReady); 4] {
    let spec = &situation.model.spec;
    let planned = match (situation.unplanned, situation.plan) {
        (Some(why), _) => (false, why.clone()),
        (None, Some(plan)) => {
            let mut message = format!("{} stages: layers {}", plan.stages.len(), layers(plan));
            for note in &plan.notes {
                message.push_str("; ");
                message.push_str(note);
            }
            (true, NotReady::new(Reason::Planned, message))
        }
        (None, None) => (false, NotReady::new(Reason::Inspecting, "the model's header is being read")),
    };
    let first = facts.reasons.first().cloned();
    let settled = || NotReady::new(Reason::Settled, "all is as the spec says");
    let chains = status.chains.len();
    let ready = if facts.serving > 0 {
        let message = format!("{} of {chains} chains serve, {} of {} stages", facts.serving, facts.ready, facts.stages);
        (true, NotReady::new(Reason::Serving, message))
    } else if spec.replicas == 0 {
        (false, NotReady::new(Reason::ScaledToZero, "spec.replicas is 0"))
    } else {
        let unknown = || NotReady::new(Reason::Linking, "no token has crossed the chain yet");
        (false, first.clone().unwrap_or_else(unknown))
    };
    let waiting = facts.reasons.iter().find(|r| !r.reason.is_wrong() || r.reason == Reason::CrashLoop);
    let stuck = facts.reasons.iter().find(|r| r.reason.is_wrong() && r.reason != Reason::CrashLoop);
    let progressing = match (situation.unplanned, facts.rolling, stuck, waiting) {
        (Some(why), ..) => (why.reason == Reason::Inspecting, why.clone()),
        (None, _, Some(stuck), _) => (false, stuck.clone()),
        (None, true, None, _) => {
            let message = "chains change to the new revision one after the other";
            (true, NotReady::new(Reason::RollingOut, message))
        }
        (None, false, None, Some(waiting)) => (true, waiting.clone()),
        (None, false, None, None) => (false, settled()),
    };
    let lost = status.chains.iter().any(|c| c.phase == Phase::Degraded);
    let degraded = match facts.reasons.iter().find(|r| r.reason.is_wrong()).or(first.as_ref().filter(|_| lost)) {
        Some(why) => (true, why.clone()),
        None => (false, NotReady::new(Reason::AsPlanned, "nothing is wrong")),
    };
    [
        ("Planned", planned.0, planned.1),
        ("Progressing", progressing.0, progressing.1),
        ("Ready", ready.0, ready.1),
        ("Degraded", degraded.0, degraded.1),
    ]
}

/// Which reason is told first: what somebody must mend before what only takes time.
fn weight(reason: Reason) -> u8 {
    match reason {
        Reason::InvalidSpec | Reason::NoNode | Reason::DoesNotFit | Reason::InspectFailed => 0,
        Reason::NameTaken | Reason::OldChildren => 1,
        Reason::StageFailed => 2,
        Reason::Refused => 3,
        Reason::CrashLoop => 4,
        Reason::PodRefused => 5,
        Reason::Unschedulable => 6,
        Reason::ContainerWaiting => 7,
        Reason::Terminating => 8,
        Reason::Inspecting => 9,
        Reason::Fetching => 10,
        Reason::Loading => 11,
        _ => 12,
    }
}

/// Layers of each stage: `10/10/10`.
fn layers(plan: &PlanStatus) -> String {
    let count = |s: &splitmodel_api::PlannedStage| LayerRange(s.layers.clone()).range().map_or(0, |r| r.len());
    plan.stages.iter().map(|s| count(s).to_string()).collect::<Vec<_>>().join("/")
}

/// The least far of the chains; what is wrong counts most.
fn phase(chains: &[ChainStatus], replicas: u32, situation: &Situation<'_>) -> Phase {
    let any = |phase| chains.iter().any(|c| c.phase == phase);
    if chains.is_empty() {
        return match situation.unplanned {
            Some(why) if why.reason == Reason::InvalidSpec => Phase::Failed,
            Some(_) => Phase::Pending,
            None if replicas == 0 || situation.plan.is_some() => Phase::Planned,
            None => Phase::Pending,
        };
    }
    if any(Phase::Failed) {
        return Phase::Failed;
    }
    if any(Phase::Degraded) {
        return Phase::Degraded;
    }
    chains.iter().map(|c| c.phase).min().unwrap_or_default()
}

/// One chain, and why its stages do not serve.
fn chain(
    situation: &Situation<'_>,
    before: &SplitModelStatus,
    view: &ChainView,
    act: Act,
) -> (ChainStatus, Vec<NotReady>) {
    let Situation { model, observed, .. } = situation;
    let index = i32::try_from(view.index).unwrap_or(i32::MAX);
    let former = before.chains.iter().find(|c| c.index == index);
    // Once its turn has come, pods of the old revision count no more.
    let turned = situation.plan.filter(|_| act == Act::Apply).map(|plan| plan.revision.clone());
    let revision = turned.or_else(|| view.sets.first().map(|(_, r)| r.clone()));
    let plan = situation.plan.filter(|plan| revision.as_ref().is_none_or(|r| *r == plan.revision));
    let same = former.is_some_and(|f| f.revision == revision);
    let count = plan.map_or(view.sets.len(), |p| p.stages.len());
    let retry = names::retry(model).unwrap_or_default();
    let mut why = Vec::new();
    let stages: Vec<StageStatus> = (0..count)
        .map(|stage| {
            let former = former.filter(|_| same).and_then(|f| f.stages.get(stage));
            let pods = observed.pods_of(view.index, stage);
            let pod = pods.first().map(|p| p.as_ref());
            let follows = pod.and_then(|p| p.labels().get(names::REVISION));
            let uid = pod.and_then(|p| p.metadata.uid.as_ref());
            let set = names::stage(&situation.owner.name, view.index, stage);
            let warning = [pod.map(|_| names::pod(&situation.owner.name, view.index, stage)), Some(set)];
            let planned = plan.and_then(|p| p.stages.get(stage)).map(|s| s.layers.clone());
            let known = Known {
                name: format!("stage {stage} of chain {}", view.index),
                layers: planned.or_else(|| former.map(|f| f.layers.clone())).unwrap_or_default(),
                before: former,
                pod,
                reported: uid.and_then(|uid| observed.reported.get(uid)),
                former_revision: pod.is_some() && follows != revision.as_ref(),
                retry: &retry,
                warning: warning.iter().flatten().find_map(|n| situation.warnings.get(n)).map(String::as_str),
            };
            let (status, reason) = stage::stage(&known);
            why.extend(reason);
            status
        })
        .collect();
    let phase = chain_phase(&stages, former.map(|f| f.phase).filter(|_| same));
    (ChainStatus { index, phase, revision, stages }, why)
}

/// The least far of the stages. A chain that served and does not any more is degraded until it serves again.
fn chain_phase(stages: &[StageStatus], before: Option<Phase>) -> Phase {
    let any = |phase| stages.iter().any(|s| s.phase == phase);
    let least = stages.iter().map(|s| s.phase).min().unwrap_or_default();
    if any(Phase::Failed) {
        Phase::Failed
    } else if least == Phase::Serving && !any(Phase::Degraded) {
        Phase::Serving
    } else if any(Phase::Degraded) || matches!(before, Some(Phase::Serving | Phase::Degraded)) {
        Phase::Degraded
    } else {
        least
    }
}
