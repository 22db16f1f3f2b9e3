//! Stage 0's directory of resident prefixes: what every stage keeps beside the lanes, so that a session that begins alike
//! need not compute it again. Pure; the stages hold the cells.

use splitmodel_link::frame::{Candidate, MAX_CANDIDATES, Token};

/// A prefix that the stages keep.
#[derive(Clone, Debug)]
struct Entry {
    page: u64,
    namespace: String,
    tokens: Vec<Token>,
    /// Larger is later.
    used: u64,
}

/// See the module. Slots are the indices of the stages' resident sequences.
#[derive(Debug)]
pub struct Residents {
    slots: Vec<Option<Entry>>,
    min_tokens: usize,
    /// Tokens of all entries.
    cells: usize,
    next_page: u64,
    clock: u64,
}

impl Residents {
    /// No residents yet, at most `slots`; shorter ones than `min_tokens` are neither kept nor used.
    #[must_use]
    pub fn new(slots: u16, min_tokens: usize) -> Self {
        let slots = std::iter::repeat_with(|| None).take(slots.into()).collect();
        Self { slots, min_tokens: min_tokens.max(1), cells: 0, next_page: 1, clock: 0 }
    }

    /// Prefixes kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Cells of all residents, as if none shared any.
    #[must_use]
    pub fn cells(&self) -> usize {
        self.cells
    }

    /// Whether a page is kept.
    #[must_use]
    pub fn holds(&self, page: u64) -> bool {
        self.slots.iter().flatten().any(|e| e.page == page)
    }

    /// The stages forgot everything.
    pub fn clear(&mut self) {
        self.slots.fill(None);
        self.cells = 0;
    }

    fn put(&mut self, slot: usize, entry: Option<Entry>) -> Option<Entry> {
        let tokens = |e: &Option<Entry>| e.as_ref().map_or(0, |e| e.tokens.len());
        self.cells += tokens(&entry);
        let before = std::mem::replace(&mut self.slots[slot], entry);
        self.cells -= tokens(&before);
        before
    }

    /// What a session with `prompt` in `namespace` may begin with, longest first. At least one token of the prompt is left to
    /// be computed. The longest counts as used.
    pub fn lookup(&mut self, namespace: &str, prompt: &[Token]) -> Vec<Candidate> {
        let most = prompt.len().saturating_sub(1);
        let mut found: Vec<Candidate> = (0_u16..)
            .zip(&self.slots)
            .filter_map(|(slot, entry)| {
                let entry = entry.as_ref().filter(|e| e.namespace == namespace)?;
                let length = common(&entry.tokens, prompt).min(most);
                (length >= self.min_tokens).then_some(Candidate {
                    page: entry.page,
                    length: u32::try_from(length).unwrap_or(u32::MAX),
                    slot,
                })
            })
            .collect();
        found.sort_by_key(|c| std::cmp::Reverse(c.length));
        found.truncate(MAX_CANDIDATES);
        if let Some(best) = found.first() {
            self.touch(best.slot);
        }
        found
    }

    fn touch(&mut self, slot: u16) {
        self.clock += 1;
        if let Some(Some(entry)) = self.slots.get_mut(usize::from(slot)) {
            entry.used = self.clock;
        }
    }

    /// Decides where to keep `tokens`, and notes it. `None` when they are too few, or kept already. An entry that they go on
    /// from is replaced; else a free slot is taken, else the one used longest ago.
    pub fn record(&mut self, namespace: &str, tokens: &[Token]) -> Option<Candidate> {
        if tokens.len() < self.min_tokens || self.slots.is_empty() {
            return None;
        }
        let own = |e: &&Entry| e.namespace == namespace;
        let covers = |e: &Entry| e.tokens.starts_with(tokens);
        if let Some(slot) = self.slots.iter().position(|e| e.as_ref().filter(own).is_some_and(covers)) {
            self.touch(u16::try_from(slot).ok()?);
            return None;
        }
        let shorter = |e: &Entry| tokens.starts_with(&e.tokens);
        let slot = self
            .slots
            .iter()
            .position(|e| e.as_ref().filter(own).is_some_and(shorter))
            .or_else(|| self.slots.iter().position(Option::is_none))
            .or_else(|| self.oldest())?;
        self.clock += 1;
        let page = self.next_page;
        self.next_page += 1;
        let entry = Entry { page, namespace: namespace.to_owned(), tokens: tokens.to_vec(), used: self.clock };
        self.put(slot, Some(entry));
        Some(Candidate { page, length: u32::try_from(tokens.len()).ok()?, slot: u16::try_from(slot).ok()? })
    }

    fn oldest(&self) -> Option<usize> {
        let used = |(slot, entry): (usize, &Option<Entry>)| entry.as_ref().map(|e| (e.used, slot));
        self.slots.iter().enumerate().filter_map(used).min().map(|(_, slot)| slot)
    }

    /// Forgets a resident that some stage lost; says whether it was still noted.
    pub fn forget(&mut self, lost: &Candidate) -> bool {
        let slot = usize::from(lost.slot);
        let noted = self.slots.get(slot).is_some_and(|e| e.as_ref().is_some_and(|e| e.page == lost.page));
        noted && self.put(slot, None).is_some()
    }

    /// Forgets the resident used longest ago; says which: page and slot.
    pub fn evict(&mut self) -> Option<(u64, u16)> {
        let slot = self.oldest()?;
        let entry = self.put(slot, None)?;
        Some((entry.page, u16::try_from(slot).ok()?))
    }
}

fn common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(seed: i32, n: usize) -> Vec<Token> {
        (0..).map(|i| seed * 1000 + i).take(n).collect()
    }

    #[test]
    fn the_longest_common_prefix_is_found_and_one_token_is_left() {
        let mut r = Residents::new(4, 4);
        let page = r.record("", &text(1, 100)).unwrap();
        assert_eq!((page.length, page.slot), (100, 0));
        let found = r.lookup("", &text(1, 100));
        assert_eq!(found, [Candidate { length: 99, ..page }]);
        let mut other = text(1, 60);
        other.extend(text(2, 60));
        assert_eq!(r.lookup("", &other), [Candidate { length: 60, ..page }]);
        assert!(r.lookup("", &text(3, 100)).is_empty());
        assert!(r.lookup("", &text(1, 4)).is_empty(), "three tokens are too few");
        assert!(r.lookup("someone else's", &text(1, 100)).is_empty());
    }

    #[test]
    fn a_conversation_that_grows_keeps_its_slot() {
        let mut r = Residents::new(2, 1);
        r.record("", &text(1, 10)).unwrap();
        assert_eq!(r.record("", &text(1, 20)).unwrap().slot, 0);
        assert_eq!(r.record("", &text(1, 15)), None, "kept already");
        assert_eq!(
            r.record("", &text(2, 5)).unwrap().slot,
            1,
            "another conversation evicts nothing while there is room"
        );
        assert_eq!((r.len(), r.cells()), (2, 25));
        r.lookup("", &text(1, 20));
        assert_eq!(r.record("", &text(3, 5)).unwrap().slot, 1, "the one used longest ago goes");
        assert_eq!(r.evict().map(|(_, slot)| slot), Some(0));
        r.clear();
        assert!(r.is_empty() && r.evict().is_none());
        assert_eq!(Residents::new(0, 1).record("", &text(1, 9)), None);
    }

    proptest! {
        /// Against the plainest directory: a list of what was recorded and not replaced.
        #[test]
        fn lookups_name_what_was_recorded(
            acts in prop::collection::vec((prop::collection::vec(0..3i32, 1..12), 0..3u8, 0..2u8), 1..80),
        ) {
            let mut r = Residents::new(3, 2);
            let mut kept: std::collections::HashMap<u16, (u64, String, Vec<Token>)> = Default::default();
            let mut pages = std::collections::HashSet::new();
            for (tokens, what, namespace) in acts {
                let namespace = namespace.to_string();
                match what {
                    0 => if let Some(c) = r.record(&namespace, &tokens) {
                        prop_assert!(pages.insert(c.page), "a page was used twice");
                        kept.insert(c.slot, (c.page, namespace, tokens));
                    },
                    1 => if let Some((page, slot)) = r.evict() {
                        prop_assert_eq!(kept.remove(&slot).unwrap().0, page);
                    },
                    _ => {
                        let found = r.lookup(&namespace, &tokens);
                        prop_assert!(found.is_sorted_by_key(|c| std::cmp::Reverse(c.length)));
                        let best = kept.values().filter(|k| k.1 == namespace).map(|k| common(&k.2, &tokens)).max();
                        let best = best.unwrap_or(0).min(tokens.len() - 1);
                        prop_assert_eq!(found.first().map_or(0, |c| c.length as usize), if best < 2 { 0 } else { best });
                        for c in found {
                            let (page, owner, prefix) = &kept[&c.slot];
                            prop_assert_eq!((*page, owner), (c.page, &namespace));
                            let n = c.length as usize;
                            prop_assert_eq!(&prefix[..n], &tokens[..n]);
                        }
                    }
                }
                prop_assert_eq!(r.cells(), kept.values().map(|k| k.2.len()).sum::<usize>());
            }
        }
    }
}
