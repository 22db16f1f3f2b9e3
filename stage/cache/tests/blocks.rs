//! The store of exact states under long random use, beside a list of whole states.
#![cfg(test)]

use proptest::prelude::*;
use splitmodel_cache::BlockStore;

const MAX: u64 = 200_000;

#[derive(Clone, Debug)]
enum Act {
    /// A page, the head that is its own, and how much of what it shares with others.
    Insert(u64, u8, usize),
    Get(u64),
    Remove(u64),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0..12u64, any::<u8>(), 0..90_000usize).prop_map(|(p, h, n)| Act::Insert(p, h, n)),
        6 => (0..12u64).prop_map(Act::Get),
        2 => (0..12u64).prop_map(Act::Remove),
    ]
}

/// Bytes that all states draw from.
fn common() -> Vec<u8> {
    let mut x = 1_u32;
    let step = |_| {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        (x >> 8) as u8
    };
    (0..90_000).map(step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn states_come_back_as_they_were_or_not_at_all(cuts: bool, acts in prop::collection::vec(act(), 1..200)) {
        let common = common();
        let mut store = if cuts { BlockStore::new(MAX) } else { BlockStore::whole(MAX) };
        // In the order of use.
        let mut list: Vec<(u64, Vec<u8>)> = Vec::new();
        for act in acts {
            match act {
                Act::Insert(page, head, n) => {
                    list.retain(|(p, _)| *p != page);
                    let state = [&[head; 100], &common[..n]].concat();
                    let mut buffer = store.buffer();
                    buffer.clear();
                    buffer.extend_from_slice(&state);
                    store.insert(page, buffer).unwrap();
                    // Whatever went was used before whatever stayed.
                    let gone = list.iter().take_while(|(p, _)| !store.holds(*p)).count();
                    list.drain(..gone);
                    list.push((page, state));
                }
                Act::Get(page) => {
                    let at = list.iter().position(|(p, _)| *p == page);
                    let state = at.map(|at| list.remove(at));
                    let found = store.get(page);
                    prop_assert_eq!(found.as_deref(), state.as_ref().map(|s| &s.1[..]));
                    list.extend(state);
                }
                Act::Remove(page) => {
                    let before = list.len();
                    list.retain(|(p, _)| *p != page);
                    prop_assert_eq!(store.remove(page), list.len() < before);
                }
            }
            prop_assert!(list.iter().all(|(p, _)| store.holds(*p)));
            prop_assert_eq!(store.len(), list.len());
            let whole: usize = list.iter().map(|s| s.1.len()).sum();
            let longest = list.iter().map(|s| s.1.len()).max().unwrap_or(0);
            prop_assert!(store.bytes() <= MAX.min(whole as u64) && store.bytes() >= longest as u64 / 2);
        }
        for (page, _) in list {
            store.remove(page);
        }
        prop_assert_eq!(store.bytes(), 0);
    }
}
