//! Pure state machines of a chain: the scheduler of stage 0, the worker of every stage, schedules and their shadow.

pub mod observe;
pub mod replay;
pub mod runtime;
pub mod schedule;
pub mod scheduler;
pub mod shadow;
pub mod worker;
