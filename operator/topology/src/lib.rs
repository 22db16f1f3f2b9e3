//! From a SplitModel and a plan to the configuration of every stage. Pure.
//!
//! [`Wanted`] says in the terms of stages and plans what a SplitModel asks for; [`stage_configs`] writes one configuration
//! per stage, for a cluster and a laptop alike: they differ only in the [`Site`].

mod configs;
mod wanted;

pub use configs::{Cut, Place, Site, stage_configs};
pub use wanted::Wanted;
