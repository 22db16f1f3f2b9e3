//! Chains whose links lead to a stage that was replaced: its pod is gone from the API, its process still runs on a node that nobody
//! reaches, and it answers its neighbours. They have no reason to look for the successor, so stage 0 is told to form anew.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use splitmodel_control::Phase;

use crate::observed::{Observed, place};

/// A successor may say that it is loaded a moment before stage 0 says that its links broke.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest pause between two attempts that did not help: something else keeps the stage out, and a chain that serves must not be broken
/// for it again and again.
const LONGEST: Duration = Duration::from_secs(600);

/// How stage 0's links go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Stage 0 has no formation, or nothing is known of it.
    Unformed,
    /// No stage is left out.
    Whole,
    /// The chain serves without one of its stages.
    Divided(Divided),
}

/// A chain that serves without one of its stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divided {
    /// Uid of stage 0's pod.
    pub first: String,
    /// The formation that stage 0 has.
    pub formation: u64,
    /// The stage that is loaded and in no formation.
    pub stage: usize,
    /// Uid of its pod.
    pub left_out: String,
}

/// What every stage's present pod says, against what stage 0's says.
#[must_use]
pub fn find(observed: &Observed, chain: u32) -> Found {
    let said = |stage| {
        let pod = observed.pods_of(chain, stage).into_iter().find(|p| p.metadata.deletion_timestamp.is_none())?;
        let uid = pod.uid()?;
        observed.reported.get(&uid).map(|status| (uid, status))
    };
    let Some((first, status)) = said(0).filter(|(_, s)| matches!(s.phase(), Phase::Linked | Phase::Serving)) else {
        return Found::Unformed;
    };
    let stages: BTreeSet<usize> = observed.pods.iter().filter_map(|p| place(p.labels())).map(|(_, s)| s).collect();
    let left_out = |stage: usize| {
        let (uid, status) = said(stage)?;
        (status.phase() == Phase::Loaded).then_some((stage, uid))
    };
    match stages.into_iter().filter(|s| *s > 0).find_map(left_out) {
        Some((stage, left_out)) => Found::Divided(Divided { first, formation: status.formation, stage, left_out }),
        None => Found::Whole,
    }
}

/// What is to be done about a divided chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Look again after this time.
    In(Duration),
    /// Stage 0 is to be told.
    Now,
}

/// A stage that is left out.
#[derive(Debug)]
struct Case {
    left_out: String,
    since: Instant,
    /// How often stage 0 was told.
    told: u32,
}

/// Since when chains are divided, by the uid of stage 0's pod.
#[derive(Debug, Default)]
pub struct Watch {
    cases: HashMap<String, Case>,
}

impl Watch {
    /// Takes in how a chain is found at `now`. While the same stage is left out stage 0 is told with growing pauses, whatever formations
    /// it has meanwhile.
    pub fn see(&mut self, found: &Divided, now: Instant) -> Due {
        let new = || Case { left_out: found.left_out.clone(), since: now, told: 0 };
        let case = self.cases.entry(found.first.clone()).or_insert_with(new);
        if case.left_out != found.left_out {
            *case = new();
        }
        let patience = PATIENCE.saturating_mul(2_u32.saturating_pow(case.told)).min(LONGEST);
        match patience.checked_sub(now.duration_since(case.since)) {
            Some(left) if !left.is_zero() => Due::In(left),
            _ => {
                (case.since, case.told) = (now, case.told + 1);
                Due::Now
            }
        }
    }

    /// The chain with this pod of stage 0 is whole.
    pub fn whole(&mut self, first: &str) {
        self.cases.remove(first);
    }

    /// Forgets chains whose stage 0 is gone; `there` are the uids of all pods of stages.
    pub fn keep(&mut self, there: &HashSet<String>) {
        self.cases.retain(|first, _| there.contains(first));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;
    use splitmodel_control::StageStatus;

    use super::*;
    use crate::names;

    fn pod(uid: &str, stage: usize) -> Arc<Pod> {
        let mut pod = Pod::default();
        pod.metadata.uid = Some(uid.to_owned());
        pod.metadata.name = Some(format!("m-0-{stage}-0"));
        pod.labels_mut().insert(names::CHAIN.to_owned(), "0".to_owned());
        pod.labels_mut().insert(names::STAGE.to_owned(), stage.to_string());
        Arc::new(pod)
    }

    fn observed(phases: [Phase; 3]) -> Observed {
        let mut observed = Observed::default();
        for (stage, phase) in phases.into_iter().enumerate() {
            let uid = format!("uid-{stage}");
            observed.pods.push(pod(&uid, stage));
            let mut status = StageStatus { formation: 7, ..StageStatus::default() };
            status.set_phase(phase);
            observed.reported.insert(uid, status);
        }
        observed
    }

    #[test]
    fn a_chain_is_divided_where_a_loaded_stage_is_in_no_formation_and_stage_0_is() {
        use Phase::{Fetching, Linked, Loaded, Serving};
        let found = |phases| find(&observed(phases), 0);
        let want = |stage| {
            let left_out = format!("uid-{stage}");
            Found::Divided(Divided { first: "uid-0".to_owned(), formation: 7, stage, left_out })
        };
        assert_eq!(found([Serving, Loaded, Serving]), want(1));
        assert_eq!(found([Linked, Linked, Loaded]), want(2));
        for whole in [[Serving, Serving, Serving], [Serving, Fetching, Serving]] {
            assert_eq!(found(whole), Found::Whole, "{whole:?}");
        }
        assert_eq!(found([Loaded, Loaded, Loaded]), Found::Unformed);
        assert_eq!(find(&observed([Serving, Loaded, Serving]), 1), Found::Unformed, "another chain");
    }

    #[test]
    fn stage_0_is_told_after_some_patience_and_then_less_and_less_often() {
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        let found = Divided { first: "a".to_owned(), formation: 7, stage: 1, left_out: "b".to_owned() };
        let mut watch = Watch::default();
        assert_eq!(watch.see(&found, at(0)), Due::In(PATIENCE));
        assert_eq!(watch.see(&found, at(2)), Due::In(Duration::from_secs(3)));
        assert_eq!(watch.see(&found, at(5)), Due::Now);
        // The next formation is no new case.
        let next = Divided { formation: 8, ..found };
        assert_eq!(watch.see(&next, at(6)), Due::In(Duration::from_secs(9)));
        assert_eq!(watch.see(&next, at(15)), Due::Now);
        assert_eq!(watch.see(&next, at(16)), Due::In(Duration::from_secs(19)));
        let mut now = 35;
        for _ in 0..20 {
            assert_eq!(watch.see(&next, at(now)), Due::Now);
            now += LONGEST.as_secs();
        }
        // Another pod is, and so is the same after the chain was whole.
        let other = Divided { left_out: "c".to_owned(), ..next.clone() };
        assert_eq!(watch.see(&other, at(now)), Due::In(PATIENCE));
        watch.whole("a");
        assert_eq!(watch.see(&other, at(now + 60)), Due::In(PATIENCE));
        watch.keep(&HashSet::new());
        assert_eq!(watch.see(&other, at(now + 120)), Due::In(PATIENCE));
    }
}
