//! Keeps one stage process running: starts it, kills it when it hangs, restarts it with back-off, gives it up, ends it.
use std::fs::{File, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::pin::pin;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use super::liveness::hung;
use super::logs::fatal_lines;
use super::ports::{self, StagePorts};
use crate::error::CliError;

/// Longest wait for the end of a process that was killed.
const LAST_WAIT: Duration = Duration::from_secs(5);

/// How a stage is run.
#[derive(Clone, Debug)]
pub struct StageProcess {
    /// Index of the stage.
    pub stage: u32,
    /// The program.
    pub binary: PathBuf,
    /// Its configuration.
    pub config: PathBuf,
    /// What it writes goes here, one run after the other.
    pub log: PathBuf,
    /// The ports it was given.
    pub ports: StagePorts,
}

/// When a stage is started again.
#[derive(Clone, Copy, Debug)]
pub struct Restarts {
    /// Pause after the first failure; it doubles with each.
    pub first: Duration,
    /// Longest pause.
    pub longest: Duration,
    /// After a run that was linked and lasted this long the pause is the first again.
    pub steady: Duration,
    /// Runs in a row that were never linked after which the stage is given up.
    pub limit: u32,
    /// Time without a sign of life after which it is killed; zero: never.
    pub hang: Duration,
}

impl Restarts {
    /// A quarter second, doubling to 8 s; 10 s linked are steady.
    #[must_use]
    pub const fn new(limit: u32, hang: Duration) -> Self {
        Self {
            first: Duration::from_millis(250),
            longest: Duration::from_secs(8),
            steady: Duration::from_secs(10),
            limit,
            hang,
        }
    }

    /// Pause after the `failures`-th failure in a row.
    #[must_use]
    pub fn pause(&self, failures: u32) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        self.first.saturating_mul(1 << doublings).min(self.longest)
    }
}

/// What the supervised stages are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Keep running.
    Run,
    /// End what runs within this time.
    Drain(Duration),
    /// End at once.
    Kill,
}

/// What happens to a stage process.
#[derive(Debug)]
pub enum Happened {
    /// Started, with this process id.
    Started(u32),
    /// It hangs, for this reason, and is killed.
    Hung(String),
    /// Ended without being told; a new start follows after the pause.
    Restarting {
        /// How it ended.
        exit: String,
        /// Time until the next start.
        pause: Duration,
    },
    /// Another program has a port of it.
    PortsTaken,
    /// Given up.
    Failed(CliError),
}

/// Runs `process` until told otherwise or given up. Returns when the process and its group are gone. `linked` is set by
/// whoever watches the stage once it is linked, and cleared here at each start.
pub async fn supervise(
    process: StageProcess,
    restarts: Restarts,
    linked: Arc<AtomicBool>,
    mut orders: watch::Receiver<Order>,
    events: mpsc::Sender<(u32, Happened)>,
) {
    let stage = process.stage;
    let (mut failures, mut never_served) = (0, 0);
    while *orders.borrow() == Order::Run {
        linked.store(false, Ordering::Relaxed);
        let started = Instant::now();
        let mut running = match Running::start(&process) {
            Ok(running) => running,
            Err(error) => {
                let _ = events.send((stage, Happened::Failed(error))).await;
                return;
            }
        };
        let _ = events.send((stage, Happened::Started(running.id()))).await;
        let exit = {
            let mut hung = pin!(hung(process.ports.health, restarts.hang));
            let mut killed = false;
            loop {
                tokio::select! {
                    exit = running.wait() => break exit,
                    why = &mut hung, if !killed => {
                        killed = true;
                        let _ = events.send((stage, Happened::Hung(why))).await;
                        running.kill_group();
                    }
                    () = told_to_end(&mut orders) => {
                        running.end(&mut orders).await;
                        return;
                    }
                }
            }
        };
        running.kill_group();
        let steady = linked.load(Ordering::Relaxed) && started.elapsed() >= restarts.steady;
        failures = if steady { 1 } else { failures + 1 };
        // A run that served is no failure to start, however short; only the pause grows with it.
        never_served = if linked.load(Ordering::Relaxed) { 0 } else { never_served + 1 };
        let happened = if ports::taken(&process.ports) {
            Happened::PortsTaken
        } else if never_served >= restarts.limit {
            Happened::Failed(CliError::StageFailed {
                stage,
                tries: never_served,
                exit,
                lines: fatal_lines(&process.log, running.log_start),
                log: process.log.clone(),
            })
        } else {
            Happened::Restarting { exit, pause: restarts.pause(failures) }
        };
        let ends = !matches!(happened, Happened::Restarting { .. });
        let _ = events.send((stage, happened)).await;
        if ends {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(restarts.pause(failures)) => {}
            () = told_to_end(&mut orders) => return,
        }
    }
}

/// Resolves when the order is no longer to run, or nobody is left to give orders.
async fn told_to_end(orders: &mut watch::Receiver<Order>) {
    let _ = orders.wait_for(|order| *order != Order::Run).await;
}

/// A started process. It leads a process group of its own, so that Ctrl-C in the terminal reaches `up` alone, and reads
/// from a pipe whose other end closes with `up`, however that ends.
struct Running {
    child: Child,
    group: Option<Pid>,
    log_start: u64,
    _lifeline: Option<ChildStdin>,
}

impl Running {
    fn start(process: &StageProcess) -> Result<Self, CliError> {
        let log_error = || CliError::file("write", &process.log);
        let log = OpenOptions::new().create(true).append(true).open(&process.log).map_err(log_error())?;
        let log_start = log.metadata().map_err(log_error())?.len();
        let errors: File = log.try_clone().map_err(log_error())?;
        let mut child = Command::new(&process.binary)
            .arg("serve")
            .arg("--config")
            .arg(&process.config)
            .arg("--exit-with-parent")
            .stdin(Stdio::piped())
            .stdout(log)
            .stderr(errors)
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| CliError::Spawn { binary: process.binary.clone(), source })?;
        // Waiting closes the child's end that is still attached: take it.
        let lifeline = child.stdin.take();
        let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
        Ok(Self { child, group, log_start, _lifeline: lifeline })
    }

    fn id(&self) -> u32 {
        self.child.id().unwrap_or(0)
    }

    async fn wait(&mut self) -> String {
        self.child.wait().await.map_or_else(|e| format!("an unknown end ({e})"), describe)
    }

    /// Ends it as ordered, the hard way after the grace or when the order changes to that.
    async fn end(&mut self, orders: &mut watch::Receiver<Order>) {
        let order = *orders.borrow_and_update();
        if let (Order::Drain(grace), Some(pid)) = (order, self.group)
            && kill_process(pid, Signal::TERM).is_ok()
        {
            tokio::select! {
                _ = self.child.wait() => {}
                () = tokio::time::sleep(grace) => {}
                _ = orders.wait_for(|order| *order == Order::Kill) => {}
            }
        }
        self.kill_group();
        // A process that is stuck in a driver dies when that lets it; `up` does not wait for it.
        let _ = timeout(LAST_WAIT, self.child.wait()).await;
    }

    /// Whatever the stage itself started goes too.
    fn kill_group(&self) {
        if let Some(group) = self.group {
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "an unknown end".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_limit() {
        let restarts = Restarts::new(5, Duration::ZERO);
        let pauses: Vec<u128> = (1..=8).map(|n| restarts.pause(n).as_millis()).collect();
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 8000, 8000]);
        assert_eq!(restarts.pause(u32::MAX), Duration::from_secs(8));
    }
}
