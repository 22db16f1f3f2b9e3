//! Exact states of one stage, in host memory. States are cut where their content says, and equal blocks are kept once: a
//! state of a longer prefix shares the cells of a shorter one, wherever its bytes stand.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use blake3::Hash;

use crate::buffers::Buffers;

/// Shortest block, but for the last of a state.
const MIN_BLOCK: usize = 2 << 10;
/// Longest block.
const MAX_BLOCK: usize = 64 << 10;
/// Blocks are about `MIN_BLOCK` + 2^13 bytes long.
const MEAN_BITS: u32 = 13;
/// Bytes that decide about a cut.
const WINDOW: usize = 64;

/// A random number for each byte.
const GEAR: [u64; 256] = gear();

const fn gear() -> [u64; 256] {
    let mut table = [0; 256];
    let mut state: u64 = 0;
    let mut i = 0;
    while i < table.len() {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        table[i] = x ^ (x >> 31);
        i += 1;
    }
    table
}

/// Length of the first block of `bytes`.
fn first_block(bytes: &[u8]) -> usize {
    let bytes = &bytes[..bytes.len().min(MAX_BLOCK)];
    let mut hash: u64 = 0;
    for (i, byte) in bytes.iter().enumerate().skip(MIN_BLOCK - WINDOW) {
        // A byte leaves the hash after 64 others.
        hash = (hash << 1).wrapping_add(GEAR[usize::from(*byte)]);
        if i >= MIN_BLOCK && hash >> (u64::BITS - MEAN_BITS) == 0 {
            return i;
        }
    }
    bytes.len()
}

fn blocks(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (block, rest) = bytes.split_at(first_block(bytes));
        bytes = rest;
        (!block.is_empty()).then_some(block)
    })
}

/// Why a state is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// It alone exceeds the limit.
    #[error("a state of {bytes} bytes is larger than all states may be together ({max_bytes} bytes)")]
    TooLarge {
        /// Bytes of the state.
        bytes: usize,
        /// The store's limit.
        max_bytes: u64,
    },
}

/// What became of states since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreCounts {
    /// States kept.
    pub recorded: u64,
    /// Blocks of theirs that were not there.
    pub new_blocks: u64,
    /// Blocks of theirs that were there.
    pub reused_blocks: u64,
    /// States given up for others.
    pub evictions: u64,
}

#[derive(Debug)]
struct Block {
    bytes: Box<[u8]>,
    /// How often states refer to it.
    references: u32,
}

#[derive(Debug)]
struct State {
    blocks: Vec<Hash>,
    /// Larger is later.
    used: u64,
}

/// States by page, within a limit of bytes; those used longest ago go first.
#[derive(Debug)]
pub struct BlockStore {
    max_bytes: u64,
    /// Whether states are cut into blocks.
    cuts: bool,
    blocks: HashMap<Hash, Block>,
    states: HashMap<u64, State>,
    bytes: u64,
    buffers: Buffers,
    /// Bytes of the state kept last.
    last: u64,
    clock: u64,
    counts: StoreCounts,
}

impl BlockStore {
    /// An empty store of at most `max_bytes` bytes of blocks.
    #[must_use]
    pub fn new(max_bytes: u64) -> Self {
        Self {
            max_bytes,
            cuts: true,
            blocks: HashMap::new(),
            states: HashMap::new(),
            bytes: 0,
            buffers: Buffers::default(),
            last: 0,
            clock: 0,
            counts: StoreCounts::default(),
        }
    }

    /// An empty store whose states share nothing: neither are they read to be cut, nor are equal parts looked for.
    #[must_use]
    pub fn whole(max_bytes: u64) -> Self {
        Self { cuts: false, ..Self::new(max_bytes) }
    }

    /// Bytes of all blocks. With the buffer of the next state they stay within the limit, too.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// States kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Counts since the start.
    #[must_use]
    pub const fn counts(&self) -> StoreCounts {
        self.counts
    }

    /// Whether the state of a page is kept.
    #[must_use]
    pub fn holds(&self, page: u64) -> bool {
        self.states.contains_key(&page)
    }

    /// A buffer to take the next state in, of any content. Where that state will need room, others go now and leave theirs.
    pub fn buffer(&mut self) -> Vec<u8> {
        while !self.cuts && self.bytes + self.last > self.max_bytes && self.evict_oldest() {}
        self.buffers.take()
    }

    /// Keeps a state as `page`, in place of what the page was. States used longest ago go where there is no room.
    ///
    /// # Errors
    /// [`StoreError::TooLarge`]; the other states stay.
    pub fn insert(&mut self, page: u64, state: Vec<u8>) -> Result<(), StoreError> {
        self.remove(page);
        // A name that no other page has.
        let whole = || blake3::hash(&page.to_le_bytes());
        let parts: Vec<_> = match self.cuts {
            true => blocks(&state).map(|bytes| (blake3::hash(bytes), bytes)).collect(),
            false => vec![(whole(), &state[..])],
        };
        if unique(&parts, |_| false) > self.max_bytes {
            return Err(StoreError::TooLarge { bytes: state.len(), max_bytes: self.max_bytes });
        }
        loop {
            // What goes may have held blocks that this state would have shared.
            let needed = self.bytes + unique(&parts, |hash| self.blocks.contains_key(hash));
            if needed + self.buffers.bytes() > self.max_bytes {
                self.buffers.clear();
            }
            if needed + self.buffers.bytes() <= self.max_bytes || !self.evict_oldest() {
                break;
            }
        }
        let bytes = state.len() as u64;
        let names = parts.iter().map(|(hash, _)| *hash).collect();
        if self.cuts {
            for (hash, bytes) in parts {
                self.refer(hash, || bytes.into());
            }
        } else {
            self.refer(whole(), || state.into());
        }
        self.clock += 1;
        self.last = bytes;
        if !self.cuts && self.bytes + bytes <= self.max_bytes {
            self.buffers.prepare(bytes);
        }
        self.counts.recorded += 1;
        self.states.insert(page, State { blocks: names, used: self.clock });
        Ok(())
    }

    /// Counts one more reference to a block, which is made where it is not there.
    fn refer(&mut self, hash: Hash, bytes: impl FnOnce() -> Box<[u8]>) {
        let block = self.blocks.entry(hash).or_insert_with(|| Block { bytes: bytes(), references: 0 });
        if block.references == 0 {
            self.bytes += block.bytes.len() as u64;
            self.counts.new_blocks += 1;
        } else {
            self.counts.reused_blocks += 1;
        }
        block.references += 1;
    }

    /// The state of a page, which counts as used now; `None`: it is not kept. Put together where it was cut.
    pub fn get(&mut self, page: u64) -> Option<Cow<'_, [u8]>> {
        let state = self.states.get_mut(&page)?;
        self.clock += 1;
        state.used = self.clock;
        let part = |hash: &Hash| self.blocks.get(hash).map_or(&[][..], |b| &b.bytes);
        Some(match &state.blocks[..] {
            [one] => part(one).into(),
            many => many.iter().map(part).collect::<Vec<_>>().concat().into(),
        })
    }

    /// Gives up the state used longest ago; `false`: there is none.
    fn evict_oldest(&mut self) -> bool {
        let Some(oldest) = self.states.iter().min_by_key(|(_, s)| s.used).map(|(page, _)| *page) else { return false };
        self.remove(oldest);
        self.counts.evictions += 1;
        true
    }

    /// Forgets a state; says whether it was there.
    pub fn remove(&mut self, page: u64) -> bool {
        let Some(state) = self.states.remove(&page) else { return false };
        for hash in state.blocks {
            let Some(block) = self.blocks.get_mut(&hash) else { continue };
            block.references -= 1;
            if block.references == 0 {
                self.bytes -= block.bytes.len() as u64;
                let gone = self.blocks.remove(&hash);
                if let (Some(block), false) = (gone, self.cuts) {
                    self.buffers.put(block.bytes.into());
                }
            }
        }
        true
    }
}

/// Bytes of the different blocks among `parts` that are not `there`.
fn unique(parts: &[(Hash, &[u8])], there: impl Fn(&Hash) -> bool) -> u64 {
    let mut seen = HashSet::new();
    parts.iter().filter(|(hash, _)| !there(hash) && seen.insert(*hash)).map(|(_, bytes)| bytes.len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
        out
    }

    #[test]
    fn blocks_are_the_whole_and_their_cuts_follow_the_content() {
        let bytes = noise(1, 300_000);
        let cut: Vec<_> = blocks(&bytes).collect();
        assert_eq!(cut.concat(), bytes);
        let (last, others) = cut.split_last().unwrap();
        assert!(last.len() <= MAX_BLOCK && others.iter().all(|b| (MIN_BLOCK..=MAX_BLOCK).contains(&b.len())));
        assert!((15..60).contains(&cut.len()), "{}", cut.len());
        let moved = [noise(2, 77), bytes.clone()].concat();
        let again = blocks(&moved).filter(|b| cut.contains(b)).count();
        assert!(again + 3 > cut.len(), "{again} of {}", cut.len());
        assert_eq!(blocks(&[0; 2 * MAX_BLOCK + 1]).map(<[u8]>::len).collect::<Vec<_>>(), [MAX_BLOCK, MAX_BLOCK, 1]);
        assert_eq!(blocks(&[]).count(), 0);
    }

    #[test]
    fn states_of_a_common_start_keep_its_blocks_once() {
        // As a model's state: runs of each layer, longer with the prefix, with a head that differs.
        let state = |head: u64, tokens: usize| {
            let layers = (0..4).flat_map(|layer| noise(layer, 100_000)[..tokens * 100].to_vec());
            noise(head, 16).into_iter().chain(layers).collect::<Vec<_>>()
        };
        let mut store = BlockStore::new(1 << 20);
        store.insert(1, state(10, 800)).unwrap();
        let first = store.bytes();
        store.insert(2, state(11, 1000)).unwrap();
        assert!(store.bytes() < first + 250_000, "{first} bytes, then {}", store.bytes());
        let counts = store.counts();
        assert!(counts.reused_blocks * 2 > counts.new_blocks, "{counts:?}");
        for (page, want) in [(1, state(10, 800)), (2, state(11, 1000))] {
            assert_eq!(store.get(page).unwrap(), want);
        }
        store.remove(1);
        assert_eq!(store.get(2).unwrap(), state(11, 1000));
        store.remove(2);
        assert_eq!((store.bytes(), store.len()), (0, 0));
    }

    #[test]
    fn whole_states_share_nothing() {
        let mut store = BlockStore::whole(250_000);
        let state = noise(1, 100_000);
        for page in 1..=3 {
            store.insert(page, state.clone()).unwrap();
        }
        assert_eq!((store.len(), store.bytes(), store.counts().evictions), (2, 200_000, 1));
        assert!(store.get(1).is_none());
        assert_eq!(store.get(3).unwrap(), state);
    }

    #[test]
    fn a_whole_state_leaves_its_buffer_to_the_next_within_the_limit() {
        let mut store = BlockStore::whole(250_000);
        assert_eq!(store.buffer().capacity(), 0);
        store.insert(1, noise(1, 100_000)).unwrap();
        store.insert(2, noise(2, 100_000)).unwrap();
        assert_eq!((store.buffer().len(), store.len()), (100_000, 1), "the third would not fit");
        store.insert(3, noise(3, 100_000)).unwrap();
        store.remove(2);
        assert_eq!((store.bytes(), store.buffers.bytes()), (100_000, 100_000));
        store.insert(4, noise(4, 60_000)).unwrap();
        assert_eq!((store.bytes(), store.buffers.bytes()), (160_000, 0), "the buffer would exceed the limit");
        store.insert(5, noise(5, 60_000)).unwrap();
        assert_eq!((store.len(), store.counts().evictions), (3, 1));
    }

    #[test]
    fn the_limit_holds_and_what_is_too_large_takes_nothing_away() {
        let mut store = BlockStore::new(100_000);
        store.insert(1, noise(1, 60_000)).unwrap();
        let error = store.insert(2, noise(2, 100_001)).unwrap_err();
        assert!(error.to_string().contains("100001 bytes"), "{error}");
        assert!(store.holds(1) && store.counts().evictions == 0);
        store.insert(3, noise(3, 60_000)).unwrap();
        assert_eq!((store.holds(1), store.bytes(), store.counts().evictions), (false, 60_000, 1));
    }
}
