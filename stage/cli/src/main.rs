//! The `splitmodel` program.
use std::process::ExitCode;

use clap::Parser;
use splitmodel_cli::args::Cli;
use splitmodel_cli::ui;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            ui::note(&format!("error: cannot start threads: {e}"));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(splitmodel_cli::run(cli));
    // A blocked read of the terminal must not hold up the end.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            ui::note(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}
