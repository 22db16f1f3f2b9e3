//! Which chains follow the plan now, which keep what they have, and which go. Pure.

use std::collections::BTreeSet;

use kube::ResourceExt as _;

use crate::children::{Kind, Owner};
use crate::names;
use crate::observed::{Observed, is_ready, place};

/// What happens to a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// It follows the plan.
    Apply,
    /// It stays as it is until its turn comes.
    Keep,
    /// It ends: its streams within the grace, then everything of it.
    Remove,
}

/// One chain as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChainView {
    /// Its number.
    pub index: u32,
    /// Stages that have a StatefulSet, with the revision of each.
    pub sets: Vec<(usize, String)>,
    /// Whether all its pods are ready.
    pub ready: bool,
}

impl ChainView {
    /// Chain `index` of `owner`.
    #[must_use]
    pub fn new(observed: &Observed, owner: &Owner, index: u32) -> Self {
        let of_chain = |labels: &_| place(labels).filter(|(chain, _)| *chain == index).map(|(_, stage)| stage);
        let mut sets: Vec<(usize, String)> = observed
            .own(owner)
            .filter(|(kind, _)| *kind == Kind::StatefulSet)
            .filter_map(|(_, set)| {
                let revision = set.labels().get(names::REVISION).cloned().unwrap_or_default();
                Some((of_chain(set.labels())?, revision))
            })
            .collect();
        sets.sort();
        // A pod of another revision does not count: its replacement has not come yet.
        let ready_pods: BTreeSet<(usize, String)> = observed
            .pods
            .iter()
            .filter(|p| is_ready(p))
            .filter_map(|p| Some((of_chain(p.labels())?, p.labels().get(names::REVISION).cloned().unwrap_or_default())))
            .collect();
        let ready = !sets.is_empty() && sets.iter().all(|set| ready_pods.contains(set));
        Self { index, sets, ready }
    }

    /// Whether any part of it follows `revision`: then it has had its turn.
    fn follows(&self, revision: &str) -> bool {
        self.sets.is_empty() || self.sets.iter().any(|(_, r)| r == revision)
    }
}

/// Whether no pod of stage 0 of a chain follows another revision: requests that it had are answered, so the stages behind it
/// may change or go. Without `revision` none may be there at all.
#[must_use]
pub fn is_drained(observed: &Observed, chain: u32, revision: Option<&str>) -> bool {
    let same = |r: Option<&String>| r.map(String::as_str) == revision && revision.is_some();
    observed.pods_of(chain, 0).iter().all(|pod| same(pod.labels().get(names::REVISION)))
}

/// What happens to each chain. A change goes to chains that serve nothing at once, to those that serve one after the other,
/// and to the next only when all that have changed serve again.
#[must_use]
pub fn decide(chains: &[ChainView], replicas: u32, revision: &str) -> Vec<(u32, Act)> {
    let staying = || chains.iter().filter(|c| c.index < replicas);
    let mut turn = staying().all(|c| c.ready);
    let act = |chain: &ChainView| {
        if chain.index >= replicas {
            return Act::Remove;
        }
        if chain.follows(revision) || !chain.ready {
            return Act::Apply;
        }
        if std::mem::take(&mut turn) { Act::Apply } else { Act::Keep }
    };
    chains.iter().map(|c| c.index).zip(chains.iter().map(act)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(index: u32, revision: &str, ready: bool) -> ChainView {
        let sets = if revision.is_empty() { Vec::new() } else { vec![(0, revision.into()), (1, revision.into())] };
        ChainView { index, sets, ready }
    }

    fn acts(chains: &[ChainView], replicas: u32) -> Vec<Act> {
        decide(chains, replicas, "new").into_iter().map(|(_, act)| act).collect()
    }

    #[test]
    fn one_serving_chain_changes_at_a_time() {
        use Act::{Apply, Keep, Remove};
        let old = |index| chain(index, "old", true);
        assert_eq!(acts(&[old(0), old(1), old(2)], 3), [Apply, Keep, Keep]);
        assert_eq!(acts(&[chain(0, "new", false), old(1), old(2)], 3), [Apply, Keep, Keep], "the first is not back");
        assert_eq!(acts(&[chain(0, "new", true), old(1), old(2)], 3), [Apply, Apply, Keep]);
        assert_eq!(acts(&[chain(0, "new", true), chain(1, "new", true), old(2)], 2), [Apply, Apply, Remove]);
        assert_eq!(acts(&[old(0)], 1), [Apply]);
        assert_eq!(acts(&[old(0), chain(1, "old", false)], 2), [Keep, Apply], "what serves nothing goes first");
        assert_eq!(acts(&[old(0), chain(1, "", false)], 2), [Keep, Apply], "a new chain first");
        let mixed = ChainView { index: 0, sets: vec![(0, "new".into()), (1, "old".into())], ready: false };
        assert_eq!(acts(&[mixed, old(1)], 2), [Apply, Keep], "half done goes on");
    }
}
