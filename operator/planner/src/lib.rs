//! Model facts and devices in, a plan of stages out. Pure: no clock, no files, no network.
//!
//! [`plan`] cuts a model into consecutive layer ranges, one per stage, and puts each on a device. Devices stand in the
//! order of the chain and may be left out. The plan's slowest stage is as fast as it can be (decoding reads every weight of
//! a stage once per token, so a stage costs its bytes, the output head included, over its device's speed); among such plans
//! the most even one is taken. What a stage needs in memory is in [`MemoryModel`].

mod error;
mod explicit;
mod memory;
mod options;
mod plan;
mod solve;
#[cfg(test)]
mod tests;

pub use error::PlanError;
pub use memory::{MemoryModel, StageBytes};
pub use options::{Device, Layout, PlanOptions};
pub use plan::{Plan, StagePlan, UnusedDevice, plan};
pub use splitmodel_gguf::{ModelFacts, TensorType};
