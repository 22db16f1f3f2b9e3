//! The stage process.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use splitmodel_server::{devices, replay, serve};

/// One stage of a chain: a slice of a model, its links, and on stage 0 the OpenAI API.
#[derive(Parser)]
#[command(name = "splitmodel-stage", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Runs the stage until it is told to end (SIGTERM and SIGINT drain it).
    Serve {
        /// The stage's configuration, YAML or JSON (`splitmodel up` and the operator write it).
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// End when standard input ends, so that no stage outlives the program that started it.
        #[arg(long)]
        exit_with_parent: bool,
    },
    /// Runs a schedule log through the unsplit model and compares every logit, bit for bit. Exit code 2: they differ.
    Replay {
        /// The last stage's schedule log (`schedule_log` in its configuration).
        #[arg(value_name = "LOG")]
        log: PathBuf,
        /// The unsplit model's GGUF file.
        #[arg(long, value_name = "FILE")]
        model: PathBuf,
    },
    /// Lists the devices that llama.cpp sees, by the names that `engine.devices` takes.
    Devices,
    /// Serves this machine's CPU as a ggml-RPC device. Without authentication: for tests on loopback.
    RpcServer {
        /// Where to listen, `host:port`.
        #[arg(long, value_name = "ADDRESS")]
        bind: String,
        /// Threads.
        #[arg(long, default_value_t = 1)]
        threads: usize,
    },
    /// Writes a model again with F32 weights: the precise setting that tests of correctness use.
    Precise {
        /// The model's GGUF file.
        model: PathBuf,
        /// The file to write.
        out: PathBuf,
    },
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve { config, exit_with_parent } => {
            serve::main(&config, exit_with_parent).map_err(|e| e.to_string())
        }
        Command::Replay { log, model } => match replay::main(&log, &model) {
            Ok(true) => Ok(()),
            Ok(false) => return ExitCode::from(2),
            Err(e) => Err(e.to_string()),
        },
        Command::Devices => devices::main().map_err(|e| e.to_string()),
        Command::RpcServer { bind, threads } => {
            splitmodel_engine::serve_rpc(&bind, threads).map(|never| match never {}).map_err(|e| e.to_string())
        }
        Command::Precise { model, out } => splitmodel_engine::to_f32(&model, &out).map_err(|e| e.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            serve::complain(&message);
            ExitCode::FAILURE
        }
    }
}
