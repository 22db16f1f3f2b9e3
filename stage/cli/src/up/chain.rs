//! One running chain: its processes, what they report, and the end.
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use splitmodel_control::{Phase, StageStatus};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::progress::Progress;
use super::ready;
use super::signals::Signals;
use super::supervisor::{Happened, Order, Restarts, StageProcess, supervise};
use super::watcher::follow;
use crate::error::CliError;

/// Events that wait to be handled; more make the senders wait.
const QUEUE: usize = 64;
/// What the remaining stages get when the chain ends by a failure.
const SHORT_GRACE: Duration = Duration::from_secs(2);
/// What a stage gets beyond the grace, which it keeps to by itself.
const SLACK: Duration = Duration::from_secs(2);

/// A chain to run.
#[derive(Debug)]
pub struct Chain {
    /// One process per stage.
    pub processes: Vec<StageProcess>,
    /// When stages start again.
    pub restarts: Restarts,
    /// What running requests get after Ctrl-C.
    pub grace: Duration,
    /// Where the API listens.
    pub api: SocketAddr,
    /// Name of the model.
    pub model: String,
    /// Whether the API asks for a key.
    pub keyed: bool,
    /// Whether standard error is a terminal.
    pub terminal: bool,
}

/// How a chain ended, if not by an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was told to.
    Stopped,
    /// Another program has a port of it; new ports may help.
    PortsTaken,
}

type Report = (u32, Option<StageStatus>);

impl Chain {
    /// Runs the chain until a signal or a failure ends it. No process of it is left when this returns.
    ///
    /// # Errors
    /// [`CliError`] of the stage that failed for good.
    pub async fn run(self, signals: &mut Signals) -> Result<Ended, CliError> {
        let (orders, order) = watch::channel(Order::Run);
        let (event_sender, mut events) = mpsc::channel(QUEUE);
        let (report_sender, mut reports) = mpsc::channel::<Report>(QUEUE);
        let mut supervisors = JoinSet::new();
        // Aborted when dropped, which is at the end of this function.
        let mut followers = JoinSet::new();
        for process in &self.processes {
            let linked = Arc::new(AtomicBool::new(false));
            let address = process.ports.control.to_string();
            followers.spawn(follow(process.stage, address, Arc::clone(&linked), report_sender.clone()));
            let events = event_sender.clone();
            supervisors.spawn(supervise(process.clone(), self.restarts, linked, order.clone(), events));
        }
        let mut screen = Screen::new(&self);
        let ended = loop {
            tokio::select! {
                () = signals.next() => break Ok(Ended::Stopped),
                Some((stage, happened)) = events.recv() => match happened {
                    Happened::Started(pid) => screen.started(stage, pid),
                    Happened::Hung(why) => screen.hung(stage, &why),
                    Happened::Restarting { exit, pause } => screen.restarting(stage, &exit, pause),
                    Happened::PortsTaken => break Ok(Ended::PortsTaken),
                    Happened::Failed(error) => break Err(error),
                },
                Some((stage, status)) = reports.recv() => screen.report(stage, status.as_ref()),
                asked = screen.readiness() => screen.ready(asked),
            }
        };
        drop(events);
        screen.ending = true;
        let stopped = matches!(ended, Ok(Ended::Stopped));
        if stopped {
            screen.say("draining; Ctrl-C again ends at once");
        }
        let _ = orders.send(Order::Drain(if stopped { self.grace + SLACK } else { SHORT_GRACE }));
        loop {
            tokio::select! {
                gone = supervisors.join_next() => if gone.is_none() { break },
                Some((stage, status)) = reports.recv() => screen.report(stage, status.as_ref()),
                () = signals.next() => {
                    let _ = orders.send(Order::Kill);
                }
            }
        }
        screen.clear();
        ended
    }
}

/// What the user is told while the chain runs.
struct Screen<'a> {
    chain: &'a Chain,
    progress: Progress,
    /// Resolves when the API says that tokens cross the chain. Watched only while stage 0 says it serves.
    waiting: Option<JoinHandle<Result<(), CliError>>>,
    serving: bool,
    times_ready: u32,
    /// A chain that ends is not broken.
    ending: bool,
}

impl<'a> Screen<'a> {
    fn new(chain: &'a Chain) -> Self {
        let progress = Progress::new(chain.processes.len(), chain.terminal);
        Self { chain, progress, waiting: None, serving: false, times_ready: 0, ending: false }
    }

    fn say(&self, line: &str) {
        self.progress.say(line);
    }

    fn clear(&self) {
        self.progress.clear();
    }

    fn started(&self, stage: u32, pid: u32) {
        self.say(&format!("stage {stage}: started (process {pid})"));
    }

    fn hung(&self, stage: u32, why: &str) {
        let seconds = self.chain.restarts.hang.as_secs();
        self.say(&format!("stage {stage}: no sign of life for {seconds} s, so it is killed ({why})"));
    }

    fn restarting(&self, stage: u32, exit: &str, pause: Duration) {
        self.say(&format!("stage {stage}: ended with {exit}; starting again in {} ms", pause.as_millis()));
    }

    fn report(&mut self, stage: u32, status: Option<&StageStatus>) {
        match status {
            // What ends loses its links: no news.
            Some(status) if self.ending => {
                self.progress.report(stage, &StageStatus { last_error: String::new(), ..status.clone() });
            }
            Some(status) => self.progress.report(stage, status),
            None => self.progress.lost(stage),
        }
        if stage == 0 {
            let serving = status.is_some_and(|s| matches!(s.phase(), Phase::Linked | Phase::Serving));
            if serving != self.serving {
                self.serving = serving;
                if let Some(old) = self.waiting.take() {
                    old.abort();
                }
                if serving {
                    self.waiting = Some(tokio::spawn(ready::until_ready(self.chain.api)));
                } else if self.times_ready > 0 && !self.ending {
                    self.say("the chain is broken; requests wait until it is whole again");
                }
            }
        }
    }

    async fn readiness(&mut self) -> Result<(), CliError> {
        match &mut self.waiting {
            Some(task) => task.await.unwrap_or(Ok(())),
            None => std::future::pending().await,
        }
    }

    fn ready(&mut self, asked: Result<(), CliError>) {
        self.waiting = None;
        if let Err(error) = asked {
            return self.say(&format!("whether the API is ready is not known: {error}"));
        }
        self.times_ready += 1;
        if self.times_ready > 1 {
            return self.say("ready again");
        }
        let url = ready::url(self.chain.api);
        let stages = self.chain.processes.len();
        let plural = if stages == 1 { "" } else { "s" };
        let lines = format!(
            "ready: {url} serves {} over {stages} stage{plural}\n{}",
            self.chain.model,
            ready::curl_line(&url, &self.chain.model, self.chain.keyed)
        );
        self.progress.print(&lines);
    }
}
