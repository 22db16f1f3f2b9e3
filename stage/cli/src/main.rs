//! The `splitmodel` program.
use std::process::ExitCode;

use clap::Parser;
use splitmodel_cli::args::Cli;

fn main() -> ExitCode {
    splitmodel_cli::execute(splitmodel_cli::run(Cli::parse()))
}
