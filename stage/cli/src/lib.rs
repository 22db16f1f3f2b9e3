//! The splitmodel command: up, plan, slice, chat, status, link, cluster; and `kubectl splitmodel`, which is the last of them.
//!
//! Nothing here links llama.cpp: stages are processes of their own.
pub mod args;
pub mod chat;
pub mod cluster;
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

use std::future::Future;
use std::process::ExitCode;

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
        Command::Cluster(args) => cluster::run(args).await,
    }
}

/// Runs a program to its end and tells the user how it failed.
pub fn execute(program: impl Future<Output = Result<(), CliError>>) -> ExitCode {
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            ui::note(&format!("error: cannot start threads: {e}"));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(program);
    // A blocked read of the terminal must not hold up the end.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_closed_output() => ExitCode::SUCCESS,
        Err(error) => {
            ui::note(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}
