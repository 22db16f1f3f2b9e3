//! The store of activations under long random use, beside a list.
#![cfg(test)]

use std::sync::Arc;

use proptest::prelude::*;
use splitmodel_cache::ActivationStore;

const MAX: u64 = 400;

#[derive(Clone, Debug)]
enum Act {
    Insert(u64, usize),
    Get(u64, usize),
    Remove(u64),
    Hold(u64),
    Clear,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => (0..12u64, 0..110usize).prop_map(|(page, floats)| Act::Insert(page, floats)),
        8 => (0..12u64, 0..110usize).prop_map(|(page, floats)| Act::Get(page, floats)),
        2 => (0..12u64).prop_map(Act::Remove),
        3 => (0..MAX + 40).prop_map(Act::Hold),
        1 => Just(Act::Clear),
    ]
}

/// Floats that tell pages and times apart.
fn rows(page: u64, at: usize, floats: usize) -> Arc<[f32]> {
    (0..floats).map(|i| (page as usize * 1_000_000 + at * 1000 + i) as f32).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]
    #[test]
    fn the_store_holds_what_a_list_holds(acts in prop::collection::vec(act(), 1..200)) {
        let mut store = ActivationStore::new(MAX);
        // In the order of use.
        let mut list: Vec<(u64, Arc<[f32]>)> = Vec::new();
        let (mut held, mut evictions) = (0, 0);
        let kept = |list: &[(u64, Arc<[f32]>)]| list.iter().map(|(_, rows)| 4 * rows.len() as u64).sum::<u64>();
        for (at, act) in acts.into_iter().enumerate() {
            match act {
                Act::Insert(page, floats) => {
                    let (rows, bytes) = (rows(page, at, floats), 4 * floats as u64);
                    list.retain(|(p, _)| *p != page);
                    let fits = bytes <= MAX;
                    while fits && !list.is_empty() && kept(&list) + held + bytes > MAX {
                        list.remove(0);
                        evictions += 1;
                    }
                    list.extend(fits.then(|| (page, rows.clone())));
                    prop_assert_eq!(store.insert(page, rows), fits);
                }
                Act::Get(page, floats) => {
                    let found = list.iter().position(|(p, rows)| *p == page && rows.len() >= floats);
                    let rows = found.map(|at| list.remove(at).1);
                    list.extend(rows.clone().map(|rows| (page, rows)));
                    prop_assert_eq!(store.get(page, floats), rows);
                }
                Act::Remove(page) => {
                    let before = list.len();
                    list.retain(|(p, _)| *p != page);
                    prop_assert_eq!(store.remove(page), list.len() < before);
                }
                Act::Hold(bytes) => {
                    held = bytes;
                    while !list.is_empty() && kept(&list) + held > MAX {
                        list.remove(0);
                        evictions += 1;
                    }
                    prop_assert_eq!(store.hold(bytes), bytes <= MAX);
                }
                Act::Clear => {
                    list.clear();
                    store.clear();
                }
            }
            prop_assert!(list.iter().all(|(page, _)| store.holds(*page)));
            prop_assert_eq!((store.len(), store.bytes()), (list.len(), kept(&list) + held));
            prop_assert_eq!(store.counts().evictions, evictions);
        }
    }
}
