//! The directory of stage 0 under long random use, beside the plainest one: a list.
#![cfg(test)]

use std::cmp::Reverse;
use std::collections::HashSet;

use proptest::prelude::*;
use splitmodel_cache::{Directory, Identity, Namespace, Payload, Place, Settings, Token};

const SETTINGS: Settings = Settings {
    payload: Payload::Resident,
    max_entries: 4,
    min_tokens: 4,
    stride: 8,
    max_records: 2,
    replays: 0,
    activations: false,
    first_page: 7,
};
const NOBODY: fn() -> Namespace = Namespace::default;

fn text(seed: i32, n: usize) -> Vec<Token> {
    (0..).map(|i| seed * 1000 + i).take(n).collect()
}

#[test]
fn the_longest_common_prefix_is_found_and_one_token_is_left() {
    let mut r = Directory::new(SETTINGS);
    let page = r.record(NOBODY(), &text(1, 100)).unwrap();
    assert_eq!((page.length, page.slot), (100, 0));
    assert_eq!(r.lookup(NOBODY(), &text(1, 100), 8), [Place { length: 99, ..page }]);
    let mut other = text(1, 60);
    other.extend(text(2, 60));
    assert_eq!(r.lookup(NOBODY(), &other, 8), [Place { length: 60, ..page }]);
    assert!(r.lookup(NOBODY(), &text(3, 100), 8).is_empty());
    assert!(r.lookup(NOBODY(), &text(1, 4), 8).is_empty(), "three tokens are too few");
    let someone = Identity::default().namespace(None, None);
    assert!(r.lookup(someone, &text(1, 100), 8).is_empty());
}

#[test]
fn a_record_serves_its_extension() {
    let mut r = Directory::new(SETTINGS);
    let mut tokens = text(1, 2214);
    let page = r.record(NOBODY(), &tokens).unwrap();
    tokens.extend(text(2, 17));
    assert_eq!(r.lookup(NOBODY(), &tokens, 8), [Place { length: 2214, ..page }]);
}

#[test]
fn a_conversation_that_grows_keeps_its_place() {
    let mut r = Directory::new(Settings { max_entries: 2, min_tokens: 1, ..SETTINGS });
    r.record(NOBODY(), &text(1, 10)).unwrap();
    assert_eq!(r.record(NOBODY(), &text(1, 20)).unwrap().slot, 0);
    assert_eq!(r.record(NOBODY(), &text(1, 15)), None, "kept already");
    let other = r.record(NOBODY(), &text(2, 5)).unwrap();
    assert_eq!(other.slot, 1, "another conversation evicts nothing while there is room");
    assert_eq!((r.len(), r.cells(), r.evictions()), (2, 25, 0));
    r.lookup(NOBODY(), &text(1, 20), 8);
    assert_eq!(r.record(NOBODY(), &text(3, 5)).unwrap().slot, 1, "the one used longest ago goes");
    assert_eq!(r.evict().map(|p| (p.slot, p.length)), Some((0, 20)));
    assert_eq!(r.evictions(), 2);
    r.formed();
    assert!(r.is_empty() && r.evict().is_none());
    assert_eq!(Directory::new(Settings { max_entries: 0, ..SETTINGS }).record(NOBODY(), &text(1, 9)), None);
}

#[test]
fn what_sessions_use_goes_last() {
    let mut r = Directory::new(Settings { max_entries: 2, ..SETTINGS });
    let [a, b] = [1, 2].map(|seed| r.record(NOBODY(), &text(seed, 10)).unwrap());
    r.protect(a.page);
    r.protect(a.page);
    assert_eq!(r.record(NOBODY(), &text(3, 10)).unwrap().slot, b.slot);
    let c = r.lookup(NOBODY(), &text(3, 10), 1)[0];
    r.protect(c.page);
    assert_eq!(r.record(NOBODY(), &text(4, 10)), None, "every place is in use");
    r.release(a.page);
    assert_eq!(r.record(NOBODY(), &text(4, 10)), None, "by a second session still");
    assert_eq!(r.evict().map(|p| p.page), Some(a.page), "sessions need the room");
    r.release(a.page);
    assert_eq!(r.len(), 1);
}

#[test]
fn exact_states_serve_their_own_length_only() {
    let mut r = Directory::new(Settings { payload: Payload::Exact, ..SETTINGS });
    assert_eq!(r.checkpoints(NOBODY(), &text(1, 40), 0), [32]);
    let long = r.record(NOBODY(), &text(1, 32)).unwrap();
    assert_eq!(r.checkpoints(NOBODY(), &text(1, 40), 0), [0; 0], "kept already");
    let short = r.record(NOBODY(), &text(1, 16)).unwrap();
    assert_eq!(r.record(NOBODY(), &text(1, 16)), None);
    assert_eq!(r.lookup(NOBODY(), &text(1, 40), 8), [long, short]);
    assert_eq!(r.lookup(NOBODY(), &text(1, 32), 8), [short], "one token is left to compute");
    assert_eq!(r.lookup(NOBODY(), &text(1, 31), 1), [short]);
    assert!(r.lookup(NOBODY(), &text(1, 15), 8).is_empty());
    assert_eq!((r.tokens(), r.cells()), (48, 0), "states take no cells");
    // Where prompts part, others may part again.
    let parted = [text(1, 27), text(2, 30)].concat();
    assert_eq!(r.checkpoints(NOBODY(), &parted, 16), [27, 48]);
    assert_eq!(Directory::new(SETTINGS).checkpoints(NOBODY(), &parted, 0), [0; 0]);
}

fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[derive(Debug)]
struct Kept {
    place: Place,
    owner: Namespace,
    tokens: Vec<Token>,
    protected: u32,
}

fn run(payload: Payload, acts: Vec<(Vec<Token>, u8, u8)>) -> Result<(), TestCaseError> {
    let mut r = Directory::new(Settings { payload, max_entries: 3, min_tokens: 2, ..SETTINGS });
    // In the order of use.
    let mut kept: Vec<Kept> = Vec::new();
    let mut pages = HashSet::new();
    for (tokens, what, owner) in acts {
        let owner = Identity { stages: owner.into(), ..Identity::default() }.namespace(None, None);
        let oldest = |kept: &[Kept], protected: bool| kept.iter().position(|k| (k.protected > 0) == protected);
        match what {
            0..=2 => {
                let own = |k: &&Kept| k.owner == owner;
                let there = |k: &&Kept| match payload.can_be_cut() {
                    true => k.tokens.starts_with(&tokens),
                    false => k.tokens == tokens,
                };
                let shorter = |k: &&Kept| payload.can_be_cut() && tokens.starts_with(&k.tokens);
                let known = kept.iter().filter(own).any(|k| there(&k));
                let goes = kept.iter().filter(own).filter(shorter).max_by_key(|k| k.tokens.len()).map(|k| k.place);
                let goes =
                    goes.or_else(|| (kept.len() == 3).then(|| oldest(&kept, false).map(|at| kept[at].place)).flatten());
                let full = kept.len() == 3 && goes.is_none();
                let recorded = r.record(owner, &tokens);
                prop_assert_eq!(recorded.is_some(), tokens.len() >= 2 && !known && !full);
                if let Some(place) = recorded {
                    prop_assert!(pages.insert(place.page), "a page was used twice");
                    if let Some(gone) = goes {
                        prop_assert_eq!(place.slot, gone.slot);
                        kept.retain(|k| k.place.page != gone.page);
                    }
                    kept.push(Kept { place, owner, tokens, protected: 0 });
                } else if known && tokens.len() >= 2 {
                    // One of those that have it counts as used; which, only the directory knows.
                    if kept.iter().filter(own).filter(there).count() > 1 {
                        return Ok(());
                    }
                    let at = kept.iter().position(|k| own(&k) && there(&k)).unwrap();
                    let k = kept.remove(at);
                    kept.push(k);
                }
            }
            3 => {
                let at = oldest(&kept, false).or_else(|| oldest(&kept, true));
                prop_assert_eq!(r.evict().map(|p| p.page), at.map(|at| kept.remove(at).place.page));
            }
            4 => {
                let at = kept.iter().position(|k| k.owner == owner);
                let lost = at.map_or(Place { page: 0, length: 1, slot: 0 }, |at| kept.remove(at).place);
                prop_assert_eq!(r.forget(&lost), at.is_some());
            }
            5 => kept.iter_mut().filter(|k| k.owner == owner).for_each(|k| {
                r.protect(k.place.page);
                k.protected += 1;
            }),
            6 => kept.iter_mut().filter(|k| k.owner == owner && k.protected > 0).for_each(|k| {
                r.release(k.place.page);
                k.protected -= 1;
            }),
            _ => {
                let found = r.lookup(owner, &tokens, 2);
                prop_assert!(found.is_sorted_by_key(|c| Reverse(c.length)) && found.len() <= 2);
                let most = tokens.len() - 1;
                let usable = |k: &Kept| match payload {
                    Payload::Resident | Payload::Copied => common(&k.tokens, &tokens).min(most),
                    Payload::Exact if tokens[..most].starts_with(&k.tokens) => k.tokens.len(),
                    Payload::Exact => 0,
                };
                let best = kept.iter().filter(|k| k.owner == owner).map(usable).max().unwrap_or(0);
                let best = if best < 2 { 0 } else { best };
                prop_assert_eq!(found.first().map_or(0, |c| c.length as usize), best);
                for c in &found {
                    let k = kept.iter().find(|k| k.place.page == c.page).unwrap();
                    prop_assert_eq!((k.owner, k.place.slot, usable(k)), (owner, c.slot, c.length as usize));
                }
                if let Some(first) = found.first() {
                    let at = kept.iter().position(|k| k.place.page == first.page).unwrap();
                    let k = kept.remove(at);
                    kept.push(k);
                }
            }
        }
        prop_assert_eq!(r.len(), kept.len());
        prop_assert_eq!(r.is_empty(), kept.is_empty());
        prop_assert_eq!(r.tokens(), kept.iter().map(|k| k.tokens.len()).sum::<usize>());
        prop_assert!(kept.iter().all(|k| r.holds(k.place.page)));
    }
    Ok(())
}

proptest! {
    #[test]
    fn a_directory_knows_what_a_list_knows(
        payload in prop::sample::select(&[Payload::Resident, Payload::Copied, Payload::Exact][..]),
        acts in prop::collection::vec((prop::collection::vec(0..3i32, 1..12), 0..10u8, 0..2u8), 1..200),
    ) {
        run(payload, acts)?;
    }
}
