//! The `kubectl-splitmodel` program: kubectl finds it in PATH and runs it as `kubectl splitmodel`.
use std::process::ExitCode;

use clap::Parser;
use splitmodel_cli::args::Plugin;

fn main() -> ExitCode {
    splitmodel_cli::execute(splitmodel_cli::cluster::run(Plugin::parse().cluster))
}
