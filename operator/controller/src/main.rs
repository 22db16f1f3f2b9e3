//! The operator's program.

use std::io::Write as _;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser as _;
use kube::Client;
use splitmodel_operator::reconcile::Context;
use splitmodel_operator::run::{self, RunError, State};
use splitmodel_operator::settings::{Cli, Command, LogFormat, Settings};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::Crd) = cli.command {
        return match splitmodel_api::crd_yaml() {
            Ok(yaml) => {
                let written = std::io::stdout().write_all(yaml.as_bytes());
                if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
            }
            Err(error) => fail(&error),
        };
    }
    let filter = match EnvFilter::try_new(&cli.settings.log_level) {
        Ok(filter) => filter,
        Err(error) => return fail(&format!("--log-level: {error}")),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match cli.settings.log_format {
        LogFormat::Text => builder.with_ansi(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("the async runtime cannot start: {error}")),
    };
    match runtime.block_on(operate(cli.settings)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "error: {error}"); // nowhere else to say it
    ExitCode::FAILURE
}

async fn operate(settings: Settings) -> Result<(), String> {
    // Two libraries bring a provider of their own choice each; one is used.
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        tracing::debug!("a provider was there");
    }
    let listener = TcpListener::bind(settings.bind).await.map_err(|e| format!("--bind {}: {e}", settings.bind))?;
    let client = Client::try_default().await.map_err(|e| format!("no API server: {e}"))?;
    let context = Arc::new(Context::new(client, settings));
    let (state, seen) = watch::channel(State::NoCrd);
    let (stop, stopped) = watch::channel(false);
    let admin = tokio::spawn(splitmodel_operator::admin::serve(listener, context.clone(), seen, stopped.clone()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), image = context.settings.stage_image, "the operator starts");
    let mut running = tokio::spawn(run::run(context, state, stopped));
    let result = tokio::select! {
        result = &mut running => result,
        () = signalled() => {
            tracing::info!("ending");
            stop.send_replace(true);
            running.await
        }
    };
    stop.send_replace(true);
    let _ = tokio::time::timeout(std::time::Duration::from_secs(1), admin).await; // idle connections are left
    result.map_err(|e| format!("the operator broke: {e}"))?.map_err(|e: RunError| e.to_string())
}

async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}
