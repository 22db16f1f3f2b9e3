//! What a chain keeps of computed prefixes. No llama.cpp, no clock, and no I/O but for [`DiskStore`].
//!
//! - [`Directory`]: stage 0's account of the prefixes that all stages keep, a radix tree over tokens for each [`Namespace`],
//!   with limits, least-recently-used eviction and protection of what running sessions use.
//! - [`Checkpoints`]: at which lengths of a prompt an exact state is taken.
//! - [`Replays`]: the first tokens of deterministic answers.
//! - [`BlockStore`]: copies, or exact states as content-hashed blocks that states share, of one stage, in memory.
//! - [`ActivationStore`]: the activations of prefixes at the end of stage 0, in memory.
//! - [`DiskStore`]: the same as files, for a stage that starts again; a [snapshot](Directory::snapshot) is that of a directory.

mod activations;
mod blocks;
mod buffers;
mod directory;
mod disk;
mod identity;
mod policy;
mod radix;
mod replays;
mod snapshot;

pub use activations::{ActivationCounts, ActivationStore};
pub use blocks::{BlockStore, StoreCounts, StoreError};
pub use directory::{Directory, Payload, Place, Settings};
pub use disk::{DiskCounts, DiskError, DiskStore};
pub use identity::{Identity, Namespace};
pub use policy::Checkpoints;
pub use replays::{Fingerprint, MAX_REPLAY, Replays};
pub use snapshot::SnapshotError;

/// A token id.
pub type Token = i32;
