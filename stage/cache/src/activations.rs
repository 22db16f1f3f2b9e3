//! Activations of kept prefixes, in host memory: what stage 0 hands to stage 1 for them, row by row.

use std::collections::HashMap;
use std::sync::Arc;

/// What became of activations since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivationCounts {
    /// Prefixes whose activations were kept.
    pub stored: u64,
    /// Prefixes whose activations were not: they alone exceed the limit, or not all are known.
    pub skipped: u64,
    /// Prefixes whose activations were given up for others.
    pub evictions: u64,
}

#[derive(Debug)]
struct Page {
    rows: Arc<[f32]>,
    /// Larger is later.
    used: u64,
}

/// Activations by page, within a limit of bytes that what sessions hold beside them counts to; those used longest ago go first.
#[derive(Debug)]
pub struct ActivationStore {
    max_bytes: u64,
    pages: HashMap<u64, Page>,
    kept_bytes: u64,
    /// Bytes that sessions hold.
    held_bytes: u64,
    clock: u64,
    counts: ActivationCounts,
}

fn bytes(rows: &[f32]) -> u64 {
    size_of_val(rows) as u64
}

impl ActivationStore {
    /// An empty store of at most `max_bytes` bytes.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        let (pages, counts) = (HashMap::new(), ActivationCounts::default());
        Self { max_bytes, pages, kept_bytes: 0, held_bytes: 0, clock: 0, counts }
    }

    /// Bytes of all pages, and those that sessions hold.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.kept_bytes + self.held_bytes
    }

    /// Pages kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }

    /// Counts since the start.
    #[must_use]
    pub const fn counts(&self) -> ActivationCounts {
        self.counts
    }

    /// Whether the activations of a page are kept.
    #[must_use]
    pub fn holds(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// Says how many bytes sessions hold now; pages go where there is no room for both. `false`: they alone exceed the limit, and
    /// every page is gone.
    pub fn hold(&mut self, bytes: u64) -> bool {
        self.held_bytes = bytes;
        self.make_room(0);
        bytes <= self.max_bytes
    }

    /// Keeps `rows` (`tokens × width` floats, row-major) as `page`, in place of what the page was. Pages used longest ago go where
    /// there is no room. `false`: the rows alone exceed the limit, which counts as [skipped](Self::skip), and the other pages stay.
    pub fn insert(&mut self, page: u64, rows: Arc<[f32]>) -> bool {
        self.remove(page);
        let more = bytes(&rows);
        if more > self.max_bytes {
            self.skip();
            return false;
        }
        self.make_room(more);
        self.clock += 1;
        self.counts.stored += 1;
        self.kept_bytes += more;
        self.pages.insert(page, Page { rows, used: self.clock });
        true
    }

    /// Counts a prefix whose activations could not be kept.
    pub const fn skip(&mut self) {
        self.counts.skipped += 1;
    }

    /// The activations of a page if at least `floats` of them are kept; they count as used.
    pub fn get(&mut self, page: u64, floats: usize) -> Option<Arc<[f32]>> {
        let found = self.pages.get_mut(&page).filter(|p| p.rows.len() >= floats)?;
        self.clock += 1;
        found.used = self.clock;
        Some(found.rows.clone())
    }

    /// Forgets a page; says whether it was there.
    pub fn remove(&mut self, page: u64) -> bool {
        let gone = self.pages.remove(&page);
        self.kept_bytes -= gone.as_ref().map_or(0, |p| bytes(&p.rows));
        gone.is_some()
    }

    /// Forgets every page.
    pub fn clear(&mut self) {
        self.pages.clear();
        self.kept_bytes = 0;
    }

    fn make_room(&mut self, more: u64) {
        while self.bytes() + more > self.max_bytes
            && let Some(oldest) = self.pages.iter().min_by_key(|(_, p)| p.used).map(|(page, _)| *page)
        {
            self.remove(oldest);
            self.counts.evictions += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(floats: usize) -> Arc<[f32]> {
        (0..floats).map(|i| i as f32).collect()
    }

    #[test]
    fn what_was_used_longest_ago_goes_first_and_what_is_too_large_takes_nothing_away() {
        let mut store = ActivationStore::new(40);
        assert!(store.insert(1, rows(4)) && store.insert(2, rows(4)));
        assert!(store.get(1, 4).is_some() && store.get(1, 5).is_none());
        assert!(!store.insert(3, rows(11)));
        assert_eq!((store.bytes(), store.len()), (32, 2));
        assert!(store.insert(3, rows(5)));
        assert!(store.holds(1) && !store.holds(2) && store.holds(3));
        assert_eq!(store.counts(), ActivationCounts { stored: 3, skipped: 1, evictions: 1 });
        store.clear();
        assert_eq!((store.bytes(), store.is_empty()), (0, true));
    }

    #[test]
    fn what_sessions_hold_counts_to_the_limit() {
        let mut store = ActivationStore::new(40);
        assert!(store.insert(1, rows(4)) && store.insert(2, rows(4)) && store.hold(20));
        assert_eq!((store.bytes(), store.holds(1), store.holds(2)), (36, false, true));
        assert!(!store.hold(41));
        assert_eq!((store.bytes(), store.len()), (41, 0));
        assert!(store.hold(0) && store.insert(3, rows(10)));
        assert_eq!(store.get(3, 10).as_deref(), Some(&*rows(10)));
    }
}
