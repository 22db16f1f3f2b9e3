//! The engine thread: the one owner of the slice. Everything reaches it through one queue of labelled jobs, in order.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use splitmodel_chain::runtime::Runtime;
use splitmodel_chain::worker::{Outcome, PrefixCounts, Worker};
use splitmodel_link::frame::{Frame, Predictions, Row, row_flags};
use splitmodel_link::{Message, Permit, SendError, Sender};

use crate::meter::{EngineStats, Label};

/// Where outcomes of the present formation go.
pub enum Output {
    /// Over a link: frames downstream, or predictions to stage 0.
    Link(Sender),
    /// To the coordinator in this process: a chain of one stage.
    Local(Box<dyn Fn(Predictions) + Send>),
}

enum Job {
    Frame { formation: u64, frame: Frame, queued: Instant, permit: Option<Permit> },
    Attach { formation: u64, output: Output },
    Detach { formation: u64 },
    Shutdown,
}

impl Job {
    fn label(&self) -> &'static str {
        match self {
            Self::Frame { .. } => "frame",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::Shutdown => "shutdown",
        }
    }
}

/// The queue's sending side.
#[derive(Clone)]
pub struct EngineQueue(mpsc::Sender<Job>);

impl EngineQueue {
    /// Queues a frame of stage 0's scheduler.
    pub fn frame(&self, formation: u64, frame: Frame) {
        self.push(Job::Frame { formation, frame, queued: Instant::now(), permit: None });
    }

    /// Queues a frame from upstream; its credit is given back when the next stage has it.
    pub fn frame_from_link(&self, formation: u64, frame: Frame, permit: Permit) {
        self.push(Job::Frame { formation, frame, queued: Instant::now(), permit: Some(permit) });
    }

    /// From here on, outcomes of `formation` go to `output`; every lane is freed.
    pub fn attach(&self, formation: u64, output: Output) {
        self.push(Job::Attach { formation, output });
    }

    /// The formation is over: every lane is freed.
    pub fn detach(&self, formation: u64) {
        self.push(Job::Detach { formation });
    }

    /// Ends the thread after what is queued.
    pub fn shutdown(&self) {
        self.push(Job::Shutdown);
    }

    fn push(&self, job: Job) {
        // The thread ends only at shutdown; what comes later has no one to work for.
        if let Err(mpsc::SendError(job)) = self.0.send(job) {
            tracing::debug!(job = job.label(), "the engine has ended");
        }
    }
}

/// The thread's side of the queue.
pub struct EngineJobs(mpsc::Receiver<Job>);

/// A queue, both sides.
#[must_use]
pub fn queue() -> (EngineQueue, EngineJobs) {
    let (tx, rx) = mpsc::channel();
    (EngineQueue(tx), EngineJobs(rx))
}

/// Works off the queue until shutdown. Blocks; to be called on the thread that owns the slice.
pub fn run<R: Runtime>(mut worker: Worker<R>, jobs: &EngineJobs, stats: &Arc<EngineStats>) {
    let mut current: Option<(u64, Output)> = None;
    let mut prefixes = PrefixCounts::default();
    stats.heartbeat.work(false);
    while let Ok(job) = jobs.0.recv() {
        stats.heartbeat.work(true);
        match job {
            Job::Frame { formation, frame, queued, permit } => match &current {
                Some((f, output)) if *f == formation => {
                    step(&mut worker, frame, queued, output, stats);
                    drop(permit);
                }
                _ => tracing::debug!(formation, "a frame of a formation that is over"),
            },
            Job::Attach { formation, output } => {
                let begun = Instant::now();
                worker.reset();
                current = Some((formation, output));
                stats.job(Label::Attach, Duration::ZERO, begun.elapsed());
            }
            Job::Detach { formation } => {
                if current.as_ref().is_some_and(|(f, _)| *f == formation) {
                    let begun = Instant::now();
                    worker.reset();
                    current = None;
                    stats.job(Label::Detach, Duration::ZERO, begun.elapsed());
                }
            }
            Job::Shutdown => break,
        }
        stats.lanes.store(worker.lanes_in_use() as u64, Relaxed);
        let now = worker.prefix_counts();
        if std::mem::replace(&mut prefixes, now) != now {
            stats.set_prefixes(now);
        }
        stats.heartbeat.work(false);
    }
}

fn step<R: Runtime>(worker: &mut Worker<R>, frame: Frame, queued: Instant, output: &Output, stats: &EngineStats) {
    let start = Instant::now();
    let wait = start - queued;
    let is = |flag: u16| move |r: &&Row| r.has(flag);
    let wanted = frame.rows.iter().filter(is(row_flags::WANT)).count();
    let sessions = frame.rows.chunk_by(|a, b| a.session == b.session).count();
    let (rows, label) = (frame.rows.len(), Label::of(&frame));
    let outcome = worker.step(frame, u32::try_from(wait.as_micros()).unwrap_or(u32::MAX));
    let computed = Instant::now();
    let message = match outcome {
        Outcome::Forward(frame) => {
            let dropped = frame.rows.iter().filter(is(row_flags::DROPPED)).count();
            stats.dropped.fetch_add(dropped as u64, Relaxed);
            Message::Frame(frame)
        }
        Outcome::Reply(predictions) => Message::Predictions(predictions),
    };
    match (output, message) {
        // The link's owner forms the chain again.
        (Output::Link(sender), message) => match sender.send_blocking(message) {
            Ok(()) => {}
            Err(SendError::Closed(reason)) => tracing::debug!(%reason, "the next stage is gone"),
            Err(error @ SendError::Invalid(_)) => {
                tracing::error!(%error, "a frame is lost");
                sender.close();
            }
        },
        (Output::Local(take), Message::Predictions(predictions)) => take(predictions),
        (Output::Local(_), _) => tracing::error!("a slice without the head cannot answer by itself"),
    }
    stats.batch(rows, wanted, sessions);
    stats.job(label, wait, computed - start);
    stats.sent(computed.elapsed());
}
