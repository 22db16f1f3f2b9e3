//! From a SplitModel to where its stages run and to the configuration of each; what the operator and the command line have
//! in common. Pure.
//!
//! [`Wanted`] says in the terms of stages and plans what a SplitModel asks for; [`place`] plans it for the nodes of a
//! cluster; [`stage_configs`] writes one configuration per stage, for a cluster and a laptop alike: they differ only in the
//! [`Site`].

mod configs;
pub mod devices;
mod machines;
pub mod names;
mod placement;
mod wanted;

pub use configs::{Cut, Place, Site, stage_configs};
pub use machines::Machines;
pub use placement::{Placement, PlacementError, place};
pub use wanted::Wanted;
