//! Stage 0's directory of what every stage keeps beside the lanes, so that a session that begins alike need not compute it
//! again. The stages hold the cells or states.

use std::collections::HashMap;

use crate::policy::Checkpoints;
use crate::radix::Radix;
use crate::{Namespace, Token};

/// What is kept of a prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Payload {
    /// KV cells in spare sequences of the running context: any part from the start can be taken over.
    #[default]
    Resident,
    /// A copy of a sequence's KV cells as bytes, outside the cache, where running sessions do not pass over it: any part from the
    /// start can be restored.
    Copied,
    /// The whole state of a sequence as bytes, for caches that cannot be cut (sliding windows, recurrent states): it can be
    /// restored at its own length only.
    Exact,
}

impl Payload {
    /// Whether any part from the start can be used, not the whole only.
    #[must_use]
    pub const fn can_be_cut(self) -> bool {
        !matches!(self, Self::Exact)
    }

    /// The name, as metrics show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Copied => "copied",
            Self::Exact => "exact",
        }
    }
}

/// Limits of a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What is kept.
    pub payload: Payload,
    /// Prefixes at most; 0 keeps none.
    pub max_entries: u16,
    /// Shortest prefix worth keeping, in tokens.
    pub min_tokens: usize,
    /// Distance of the lengths at which exact states are taken, in tokens.
    pub stride: usize,
    /// Exact states of one prompt at most.
    pub max_records: usize,
    /// Deterministic answers of which the first tokens are kept, at most; 0 keeps none.
    pub replays: usize,
    /// Whether stage 0 keeps the activations of prefixes, too, for when another stage has lost them.
    pub activations: bool,
    /// Number of the first page. Stages that outlive this directory must never meet a number twice, so each begins behind the
    /// last of all earlier ones.
    pub first_page: u64,
}

/// A prefix and where it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of the entry, never used twice.
    pub page: u64,
    /// Tokens that are meant, from the first.
    pub length: u32,
    /// Index among the places of each stage.
    pub slot: u16,
}

#[derive(Debug)]
struct Entry {
    page: u64,
    namespace: Namespace,
    tokens: Box<[Token]>,
    /// Larger is later.
    used: u64,
    /// Sessions that use it.
    protected: u32,
}

/// See the module.
#[derive(Debug)]
pub struct Directory {
    settings: Settings,
    slots: Vec<Option<Entry>>,
    trees: HashMap<Namespace, Radix>,
    /// Tokens of all entries.
    tokens: usize,
    next_page: u64,
    clock: u64,
    evictions: u64,
    /// Grows with every entry that comes or goes.
    changes: u64,
}

impl Directory {
    /// An empty directory.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let slots = std::iter::repeat_with(|| None).take(settings.max_entries.into()).collect();
        Self {
            settings,
            slots,
            trees: HashMap::new(),
            tokens: 0,
            next_page: settings.first_page,
            clock: 0,
            evictions: 0,
            changes: 0,
        }
    }

    /// What is kept.
    #[must_use]
    pub const fn payload(&self) -> Payload {
        self.settings.payload
    }

    /// Whether anything is ever kept.
    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        self.settings.max_entries > 0
    }

    /// Prefixes kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.trees.is_empty()
    }

    /// Tokens of all entries.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// KV cells of all entries, as if none shared any.
    #[must_use]
    pub const fn cells(&self) -> usize {
        match self.settings.payload {
            Payload::Resident => self.tokens,
            Payload::Copied | Payload::Exact => 0,
        }
    }

    /// Entries given up for others, or for sessions.
    #[must_use]
    pub const fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Grows with every entry that comes or goes.
    #[must_use]
    pub const fn changes(&self) -> u64 {
        self.changes
    }

    /// Whether a page is kept.
    #[must_use]
    pub fn holds(&self, page: u64) -> bool {
        self.slots.iter().flatten().any(|e| e.page == page)
    }

    /// The chain is formed anew: residents are gone with the caches that held them; copies and states stay where a stage
    /// did, and where it did not a restore will show it.
    pub fn formed(&mut self) {
        if self.settings.payload == Payload::Resident {
            self.clear();
        }
    }

    fn clear(&mut self) {
        self.slots.fill_with(|| None);
        self.trees.clear();
        self.tokens = 0;
    }

    /// What a session with `prompt` may begin with, longest first, at most `most` places. At least one token of the prompt is
    /// left to be computed. The longest counts as used.
    pub fn lookup(&mut self, namespace: Namespace, prompt: &[Token], most: usize) -> Vec<Place> {
        let Some(tree) = self.trees.get(&namespace) else { return Vec::new() };
        let before = &prompt[..prompt.len().saturating_sub(1)];
        let found = match self.settings.payload.can_be_cut() {
            true => tree.sharing(before, most),
            false => tree.prefixes(before).collect(),
        };
        let long = found.into_iter().take_while(|(length, _)| *length >= self.settings.min_tokens.max(1));
        let places: Vec<_> = long.take(most).filter_map(|(length, slot)| self.place(slot, length)).collect();
        if let Some(best) = places.first() {
            self.touch(best.slot);
        }
        places
    }

    /// Tokens of `prompt` that a session could begin with; nothing counts as used.
    #[must_use]
    pub fn longest(&self, namespace: Namespace, prompt: &[Token]) -> usize {
        let Some(tree) = self.trees.get(&namespace) else { return 0 };
        let before = &prompt[..prompt.len().saturating_sub(1)];
        match self.settings.payload.can_be_cut() {
            true => tree.sharing(before, 1).first().map_or(0, |(length, _)| *length),
            false => tree.prefixes(before).next().map_or(0, |(length, _)| length),
        }
    }

    fn place(&self, slot: u16, length: usize) -> Option<Place> {
        let entry = self.slots.get(usize::from(slot))?.as_ref()?;
        Some(Place { page: entry.page, length: u32::try_from(length).ok()?, slot })
    }

    fn touch(&mut self, slot: u16) {
        self.clock += 1;
        if let Some(Some(entry)) = self.slots.get_mut(usize::from(slot)) {
            entry.used = self.clock;
        }
    }

    /// Decides where to keep `tokens`, and notes it. `None` when they are too few, kept already, or every place is protected.
    /// Where any part of an entry can be used, one that they go on from is replaced; else a free place is taken, else the one
    /// used longest ago.
    pub fn record(&mut self, namespace: Namespace, tokens: &[Token]) -> Option<Place> {
        let length = u32::try_from(tokens.len()).ok()?;
        if tokens.len() < self.settings.min_tokens.max(1) || self.slots.is_empty() {
            return None;
        }
        if let Some(slot) = self.kept(namespace, tokens) {
            self.touch(slot);
            return None;
        }
        let slot = match self.shorter(namespace, tokens).or_else(|| self.free()) {
            Some(slot) => slot,
            None => {
                let slot = self.oldest(false)?;
                self.evictions += 1;
                slot
            }
        };
        let place = Place { page: self.next_page, length, slot };
        self.put(place, namespace, tokens);
        Some(place)
    }

    /// Notes an entry, in place of what its slot held. Nothing is noted where there is no such slot.
    pub(crate) fn put(&mut self, Place { page, slot, .. }: Place, namespace: Namespace, tokens: &[Token]) {
        self.take(slot);
        let Some(place) = self.slots.get_mut(usize::from(slot)) else { return };
        self.clock += 1;
        self.changes += 1;
        self.next_page = self.next_page.max(page.saturating_add(1));
        self.tokens += tokens.len();
        *place = Some(Entry { page, namespace, tokens: tokens.into(), used: self.clock, protected: 0 });
        self.trees.entry(namespace).or_default().insert(tokens, slot);
    }

    /// Leaves out so many page numbers.
    pub(crate) fn skip(&mut self, pages: u64) {
        self.next_page += pages;
    }

    /// All entries, the one used longest ago first.
    pub(crate) fn oldest_first(&self) -> Vec<(Place, &Namespace, &[Token])> {
        let entries = (0_u16..).zip(&self.slots).filter_map(|(slot, entry)| Some((slot, entry.as_ref()?)));
        let mut entries: Vec<_> = entries.collect();
        entries.sort_by_key(|(_, e)| e.used);
        let place = |slot, e: &Entry| Some(Place { page: e.page, length: u32::try_from(e.tokens.len()).ok()?, slot });
        entries.into_iter().filter_map(|(slot, e)| Some((place(slot, e)?, &e.namespace, &*e.tokens))).collect()
    }

    /// The place from which `tokens` can be restored as they are.
    fn kept(&self, namespace: Namespace, tokens: &[Token]) -> Option<u16> {
        let tree = self.trees.get(&namespace)?;
        match self.settings.payload.can_be_cut() {
            true => {
                tree.sharing(tokens, 1).first().filter(|(length, _)| *length == tokens.len()).map(|(_, slot)| *slot)
            }
            false => tree.get(tokens),
        }
    }

    /// The longest entry that `tokens` make superfluous.
    fn shorter(&self, namespace: Namespace, tokens: &[Token]) -> Option<u16> {
        let tree = self.trees.get(&namespace).filter(|_| self.settings.payload.can_be_cut())?;
        tree.prefixes(tokens).next().map(|(_, slot)| slot)
    }

    fn free(&self) -> Option<u16> {
        self.slots.iter().position(Option::is_none).and_then(|slot| u16::try_from(slot).ok())
    }

    /// The entry used longest ago, of the protected ones or of the others.
    fn oldest(&self, protected: bool) -> Option<u16> {
        let entries = (0_u16..).zip(&self.slots).filter_map(|(slot, entry)| Some((slot, entry.as_ref()?)));
        let fit = entries.filter(|(_, e)| (e.protected > 0) == protected);
        fit.min_by_key(|(_, e)| e.used).map(|(slot, _)| slot)
    }

    fn take(&mut self, slot: u16) -> Option<Entry> {
        let entry = self.slots.get_mut(usize::from(slot))?.take()?;
        self.changes += 1;
        self.tokens -= entry.tokens.len();
        if let Some(tree) = self.trees.get_mut(&entry.namespace) {
            tree.remove(&entry.tokens);
            if tree.is_empty() {
                self.trees.remove(&entry.namespace);
            }
        }
        Some(entry)
    }

    /// Forgets an entry that some stage lost; says whether it was still noted.
    pub fn forget(&mut self, lost: &Place) -> bool {
        let noted =
            self.slots.get(usize::from(lost.slot)).is_some_and(|e| e.as_ref().is_some_and(|e| e.page == lost.page));
        noted && self.take(lost.slot).is_some()
    }

    /// Forgets the entry used longest ago, protected ones last; says which.
    pub fn evict(&mut self) -> Option<Place> {
        let slot = self.oldest(false).or_else(|| self.oldest(true))?;
        let entry = self.take(slot)?;
        self.evictions += 1;
        Some(Place { page: entry.page, length: u32::try_from(entry.tokens.len()).ok()?, slot })
    }

    /// A session uses the entry: others go before it until the session [releases](Self::release) it.
    pub fn protect(&mut self, page: u64) {
        if let Some(entry) = self.entry(page) {
            entry.protected += 1;
        }
    }

    /// A session that [protected](Self::protect) the entry uses it no more.
    pub fn release(&mut self, page: u64) {
        if let Some(entry) = self.entry(page) {
            entry.protected = entry.protected.saturating_sub(1);
        }
    }

    fn entry(&mut self, page: u64) -> Option<&mut Entry> {
        self.slots.iter_mut().flatten().find(|e| e.page == page)
    }

    /// Lengths at which exact states of `prompt` are to be recorded, ascending, when `restored` tokens of it come from one.
    /// Empty where any part of an entry can be used: such are recorded as they end.
    #[must_use]
    pub fn checkpoints(&self, namespace: Namespace, prompt: &[Token], restored: usize) -> Vec<usize> {
        let Settings { payload, max_entries, min_tokens, stride, max_records, .. } = self.settings;
        if payload.can_be_cut() || max_entries == 0 {
            return Vec::new();
        }
        let branch = self.trees.get(&namespace).map_or(0, |t| t.common(prompt));
        let mut points = Checkpoints { min_tokens, stride, max_records }.plan(prompt.len(), restored, branch);
        points.retain(|n| *n >= min_tokens && *n > restored && self.kept(namespace, &prompt[..*n]).is_none());
        points
    }
}
