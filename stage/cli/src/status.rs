//! `splitmodel status`: what the control services of running chains say.
use std::time::Duration;

use serde::Serialize;
use splitmodel_control::{ControlClient, StageStatus};
use tokio::task::JoinSet;

use crate::args::StatusArgs;
use crate::error::CliError;
use crate::rundir::{self, RunState};
use crate::ui;
use crate::up::progress::phase_name;

/// Time a stage has to answer.
const TIMEOUT: Duration = Duration::from_secs(3);

/// Prints a table, or JSON, of all stages.
///
/// # Errors
/// [`CliError::Control`] of the first stage that does not answer, after the table is printed.
pub async fn run(args: StatusArgs) -> Result<(), CliError> {
    let (runs, none) = if args.control.is_empty() {
        let dir = rundir::state_dir(args.state_dir.as_deref())?;
        (rundir::running(&dir)?, format!("no chain is running here (looked in {})", dir.display()))
    } else {
        let run = RunState { name: String::new(), pid: 0, url: String::new(), control: args.control };
        (vec![run], String::new())
    };
    let mut chains = Vec::with_capacity(runs.len());
    for run in runs {
        let stages = ask_all(&run.control).await;
        chains.push((run, stages));
    }
    if args.json {
        ui::line(&json(&chains))?;
    } else if chains.is_empty() {
        ui::line(&none)?;
    }
    let mut first_error = None;
    for (run, stages) in chains {
        if !args.json {
            if !run.url.is_empty() {
                ui::line(&format!("{} at {} (process {})", run.name, run.url, run.pid))?;
            }
            ui::text(&table(&run.control, &stages))?;
        }
        first_error = first_error.or_else(|| stages.into_iter().find_map(Result::err));
    }
    first_error.map_or(Ok(()), |e| Err(e.into()))
}

type Answer = Result<StageStatus, splitmodel_control::ClientError>;

/// Asks all at once; answers in the order of `addresses`.
async fn ask_all(addresses: &[String]) -> Vec<Answer> {
    let mut asking = JoinSet::new();
    for (index, address) in addresses.iter().cloned().enumerate() {
        asking.spawn(async move { (index, ask(&address).await) });
    }
    let mut answers: Vec<(usize, Answer)> = Vec::with_capacity(addresses.len());
    while let Some(Ok(answer)) = asking.join_next().await {
        answers.push(answer);
    }
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

async fn ask(address: &str) -> Answer {
    ControlClient::connect(address, TIMEOUT).await?.status().await
}

fn table(addresses: &[String], answers: &[Answer]) -> String {
    let rows: Vec<Vec<String>> = addresses
        .iter()
        .zip(answers)
        .map(|(address, answer)| match answer {
            Ok(s) => {
                let memory = s.memory.unwrap_or_default();
                vec![
                    s.stage.to_string(),
                    phase_name(s.phase()).into(),
                    format!("[{}, {})", s.first_layer, s.end_layer),
                    ui::bytes(memory.weights),
                    ui::bytes(memory.kv),
                    ui::bytes(memory.compute),
                    format!("{}/{}", s.lanes_used, s.lanes),
                    s.queued.to_string(),
                    format!("{}+{}", s.prompt_tokens, s.generated_tokens),
                    format!("{}s", s.uptime_ms / 1000),
                    address.clone(),
                    ui::plain(&s.last_error),
                ]
            }
            Err(_) => {
                let mut row = vec![String::from("?"), "not answering".into()];
                row.resize(10, String::new());
                row.push(address.clone());
                row
            }
        })
        .collect();
    let head = [
        "STAGE", "PHASE", "LAYERS", "WEIGHTS", "KV", "COMPUTE", "LANES", "QUEUE", "TOKENS", "UPTIME", "CONTROL",
        "ERROR",
    ];
    ui::table(&head, &rows)
}

fn json(chains: &[(RunState, Vec<Answer>)]) -> String {
    let chains: Vec<Chain<'_>> = chains
        .iter()
        .map(|(run, answers)| Chain {
            run,
            stages: run.control.iter().zip(answers).map(|(address, answer)| Stage::new(address, answer)).collect(),
        })
        .collect();
    serde_json::to_string_pretty(&chains).unwrap_or_default()
}

#[derive(Serialize)]
struct Chain<'a> {
    #[serde(flatten)]
    run: &'a RunState,
    stages: Vec<Stage<'a>>,
}

/// One stage; all but the address is absent when it does not answer.
#[derive(Serialize)]
struct Stage<'a> {
    address: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    unreachable: Option<String>,
    #[serde(flatten)]
    told: Option<Told<'a>>,
}

#[derive(Serialize)]
struct Told<'a> {
    chain: &'a str,
    stage: u32,
    phase: &'static str,
    layers: [u32; 2],
    fetched_bytes: u64,
    total_bytes: u64,
    weights_bytes: u64,
    kv_bytes: u64,
    compute_bytes: u64,
    lanes_used: u32,
    lanes: u32,
    queued: u32,
    prompt_tokens: u64,
    generated_tokens: u64,
    uptime_ms: u64,
    formation: u64,
    instance: &'a str,
    version: &'a str,
    last_error: &'a str,
}

impl<'a> Stage<'a> {
    fn new(address: &'a str, answer: &'a Answer) -> Self {
        match answer {
            Ok(status) => Self { address, unreachable: None, told: Some(Told::new(status)) },
            Err(error) => Self { address, unreachable: Some(error.to_string()), told: None },
        }
    }
}

impl<'a> Told<'a> {
    fn new(s: &'a StageStatus) -> Self {
        let memory = s.memory.unwrap_or_default();
        Self {
            chain: &s.chain,
            stage: s.stage,
            phase: phase_name(s.phase()),
            layers: [s.first_layer, s.end_layer],
            fetched_bytes: s.fetched_bytes,
            total_bytes: s.total_bytes,
            weights_bytes: memory.weights,
            kv_bytes: memory.kv,
            compute_bytes: memory.compute,
            lanes_used: s.lanes_used,
            lanes: s.lanes,
            queued: s.queued,
            prompt_tokens: s.prompt_tokens,
            generated_tokens: s.generated_tokens,
            uptime_ms: s.uptime_ms,
            formation: s.formation,
            instance: &s.instance,
            version: &s.version,
            last_error: &s.last_error,
        }
    }
}
