//! stub
pub mod chain;
mod logs;
pub mod ports;
pub mod progress;
mod ready;
pub mod signals;
pub mod supervisor;
mod watcher;
pub async fn run(_a: crate::args::UpArgs) -> Result<(), crate::error::CliError> { Ok(()) }
