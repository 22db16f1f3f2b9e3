//! The stage process: engine, links, scheduler, API and control service wired together.

pub mod api;
pub mod backend;
pub mod control;
pub mod coordinator;
pub mod devices;
pub mod engine;
pub mod fatal;
pub mod heartbeat;
pub mod inspect;
pub mod kept;
pub mod load;
pub mod logging;
pub mod meter;
pub mod metrics;
pub mod replay;
pub mod serve;
pub mod telemetry;
pub mod wiring;
