//! Chains whose links lead to a stage that was replaced: its pod is gone from the API, its process still runs on a node that nobody
//! reaches, and it answers its neighbours. They have no reason to look for the successor, so stage 0 is told to form anew.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::{Duration, Instant};

use kube::ResourceExt as _;
use splitmodel_control::Phase;

use crate::observed::{Observed, place};

/// A successor may say that it is loaded a moment before stage 0 says that its links broke.
const PATIENCE: Duration = Duration::from_secs(5);

/// A chain that serves without one of its stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divided {
    /// Uid of stage 0's pod.
    pub first: String,
    /// The formation that stage 0 has.
    pub formation: u64,
    /// The stage that is loaded and in no formation.
    pub stage: usize,
}

/// What every stage's present pod says, against what stage 0's says.
#[must_use]
pub fn divided(observed: &Observed, chain: u32) -> Option<Divided> {
    let said = |stage| {
        let pod = observed.pods_of(chain, stage).into_iter().find(|p| p.metadata.deletion_timestamp.is_none())?;
        let uid = pod.uid()?;
        observed.reported.get(&uid).map(|status| (uid, status))
    };
    let (first, status) = said(0)?;
    if !matches!(status.phase(), Phase::Linked | Phase::Serving) {
        return None;
    }
    let stages: BTreeSet<usize> = observed.pods.iter().filter_map(|p| place(p.labels())).map(|(_, s)| s).collect();
    let left_out = |stage: &usize| said(*stage).is_some_and(|(_, s)| s.phase() == Phase::Loaded);
    let stage = stages.into_iter().filter(|s| *s > 0).find(left_out)?;
    Some(Divided { first, formation: status.formation, stage })
}

/// What is to be done about a divided chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Look again after this time.
    In(Duration),
    /// Stage 0 is to be told.
    Now,
}

/// Since when chains are divided, by the uid of stage 0's pod.
#[derive(Debug, Default)]
pub struct Watch {
    since: HashMap<String, (Divided, Instant)>,
}

impl Watch {
    /// Takes in how a chain is found at `now`. Of the same division stage 0 is told again and again, with pauses between.
    pub fn see(&mut self, found: &Divided, now: Instant) -> Due {
        let entry = self.since.entry(found.first.clone()).or_insert_with(|| (found.clone(), now));
        if entry.0 != *found {
            *entry = (found.clone(), now);
        }
        match PATIENCE.checked_sub(now.duration_since(entry.1)) {
            Some(left) if !left.is_zero() => Due::In(left),
            _ => {
                entry.1 = now;
                Due::Now
            }
        }
    }

    /// The chain with this pod of stage 0 is whole.
    pub fn whole(&mut self, first: &str) {
        self.since.remove(first);
    }

    /// Forgets chains whose stage 0 is gone; `there` are the uids of all pods of stages.
    pub fn keep(&mut self, there: &HashSet<String>) {
        self.since.retain(|first, _| there.contains(first));
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
        let found = |phases| divided(&observed(phases), 0);
        let want = |stage| Some(Divided { first: "uid-0".to_owned(), formation: 7, stage });
        assert_eq!(found([Serving, Loaded, Serving]), want(1));
        assert_eq!(found([Linked, Linked, Loaded]), want(2));
        for whole in [[Serving, Serving, Serving], [Serving, Fetching, Serving], [Loaded, Loaded, Loaded]] {
            assert_eq!(found(whole), None, "{whole:?}");
        }
        assert_eq!(divided(&observed([Serving, Loaded, Serving]), 1), None, "another chain");
    }

    #[test]
    fn stage_0_is_told_after_some_patience_and_again_while_nothing_changes() {
        let begin = Instant::now();
        let at = |s| begin + Duration::from_secs(s);
        let found = Divided { first: "a".to_owned(), formation: 7, stage: 1 };
        let mut watch = Watch::default();
        assert_eq!(watch.see(&found, at(0)), Due::In(PATIENCE));
        assert_eq!(watch.see(&found, at(2)), Due::In(Duration::from_secs(3)));
        assert_eq!(watch.see(&found, at(5)), Due::Now);
        assert_eq!(watch.see(&found, at(6)), Due::In(Duration::from_secs(4)));
        // Another formation begins anew, and so does a chain that was whole.
        let next = Divided { formation: 8, ..found };
        assert_eq!(watch.see(&next, at(60)), Due::In(PATIENCE));
        watch.whole("a");
        assert_eq!(watch.see(&next, at(70)), Due::In(PATIENCE));
        watch.keep(&HashSet::new());
        assert_eq!(watch.see(&next, at(80)), Due::In(PATIENCE));
    }
}
