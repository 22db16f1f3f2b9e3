//! The operator: turns SplitModels into chains of stage pods.
//!
//! A look at a SplitModel ([`reconcile::look`]) goes through five phases: what is there ([`observed`], from the watches of
//! [`world`] and what [`stages`] say of themselves), whether the spec can be ([`planning::validate`]), the plan and what
//! follows from it ([`planning`], [`children`], [`rollout`]), the writes ([`apply`], [`certificates`]), and the status
//! ([`status`], [`report`]). The phases in the middle take no client.

pub mod admin;
pub mod apply;
pub mod certificates;
pub mod children;
pub mod ghosts;
pub mod metrics;
pub mod observed;
pub mod planning;
pub mod reason;
pub mod reconcile;
pub mod report;
pub mod rollout;
pub mod run;
pub mod settings;
pub mod stages;
pub mod status;
pub mod world;

pub use splitmodel_topology::{devices, names};
