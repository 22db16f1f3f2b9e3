//! What a chain keeps of computed prefixes. Pure: no llama.cpp, no I/O, no clock.
//!
//! - [`Directory`]: stage 0's account of the prefixes that all stages keep, a radix tree over tokens for each [`Namespace`],
//!   with limits, least-recently-used eviction and protection of what running sessions use.
//! - [`Checkpoints`]: at which lengths of a prompt an exact state is taken.
//! - [`Replays`]: the first tokens of deterministic answers.
//! - [`BlockStore`]: exact states of one stage as content-hashed blocks that states share.

mod blocks;
mod directory;
mod identity;
mod policy;
mod radix;
mod replays;

pub use blocks::{BlockStore, StoreCounts, StoreError};
pub use directory::{Directory, Payload, Place, Settings};
pub use identity::{Identity, Namespace};
pub use policy::Checkpoints;
pub use replays::{Fingerprint, MAX_REPLAY, Replays};

/// A token id.
pub type Token = i32;
