//! The stage process.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use splitmodel_server::{devices, fatal, inspect, logging, replay, serve};

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
        /// File for what ended the process, at most 4096 bytes, as Kubernetes reads it.
        #[arg(long, value_name = "FILE")]
        termination_log: Option<PathBuf>,
    },
    /// Reads a model's header from any source and writes what planning needs, in at most 4096 bytes, or what is wrong.
    Inspect {
        /// `https://…`, `hf://owner/repo[@revision]/file`, `file://…` or a path; of a sharded model any file.
        #[arg(long)]
        source: String,
        /// Directory with a file `token`, or with `username` and `password`, for the source's host.
        #[arg(long, value_name = "DIR")]
        credentials: Option<PathBuf>,
        /// The file to write.
        #[arg(long, value_name = "FILE")]
        output: PathBuf,
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

/// Runs `command`; when it fails, gives the exit code and what to say.
fn run(command: Command) -> Result<(), (u8, String)> {
    let other = |e: &dyn std::error::Error| (fatal::TRANSIENT, e.to_string());
    match command {
        Command::Serve { config, exit_with_parent, termination_log } => {
            if let Some(path) = &termination_log {
                fatal::keep_in(path);
            }
            serve::main(&config, exit_with_parent).map_err(|e| (e.exit_code(), e.to_string()))
        }
        Command::Inspect { source, credentials, output } => {
            logging::init(&Default::default());
            inspect::main(&source, credentials.as_deref(), &output).map_err(|e| (e.exit_code(), e.to_string()))
        }
        Command::Replay { log, model } => match replay::main(&log, &model) {
            Ok(true) => Ok(()),
            Ok(false) => Err((2, String::new())),
            Err(e) => Err(other(&e)),
        },
        Command::Devices => devices::main().map_err(|e| other(&e)),
        Command::RpcServer { bind, threads } => {
            splitmodel_engine::serve_rpc(&bind, threads).map(|never| match never {}).map_err(|e| other(&e))
        }
        Command::Precise { model, out } => splitmodel_engine::to_f32(&model, &out).map_err(|e| other(&e)),
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => {
            fatal::forget();
            ExitCode::SUCCESS
        }
        Err((code, message)) => {
            if !message.is_empty() {
                fatal::complain(&message);
                fatal::note(&message);
            }
            ExitCode::from(code)
        }
    }
}
