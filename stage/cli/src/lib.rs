//! The splitmodel command: up, plan, slice, chat, status, link.
//!
//! Nothing here links llama.cpp: stages are processes of their own.
pub mod args;
pub mod chat;
pub mod error;
pub mod http;
pub mod link;
pub mod manifest;
pub mod planning;
pub mod rundir;
pub mod slice;
pub mod sse;
pub mod status;
pub mod ui;
pub mod up;

use args::{Cli, Command};
use error::CliError;

/// Does what the command line says.
///
/// # Errors
/// [`CliError`], to be shown to the user.
pub async fn run(cli: Cli) -> Result<(), CliError> {
    match cli.command {
        Command::Up(args) => up::run(args).await,
        Command::Plan(args) => planning::run(&args),
        Command::Slice(args) => slice::run(&args),
        Command::Chat(args) => chat::run(args).await,
        Command::Status(args) => status::run(args).await,
        Command::Link(args) => link::run(args).await,
    }
}
