//! What the engine's thread counts: jobs by label with wait and hold, and the sizes of batches.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use splitmodel_chain::worker::PrefixCounts;
use splitmodel_link::frame::{Frame, row_flags};

use crate::heartbeat::Heartbeat;

/// What a job of the engine is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    /// A frame whose rows all want a token.
    Decode,
    /// A frame with rows of prompts only.
    Prefill,
    /// A frame with both.
    Mixed,
    /// A frame without rows.
    Control,
    /// A formation begins.
    Attach,
    /// A formation ends.
    Detach,
}

impl Label {
    const ALL: [Self; 6] = [Self::Decode, Self::Prefill, Self::Mixed, Self::Control, Self::Attach, Self::Detach];

    const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Mixed => "mixed",
            Self::Control => "control",
            Self::Attach => "attach",
            Self::Detach => "detach",
        }
    }

    /// The label of a frame.
    #[must_use]
    pub fn of(frame: &Frame) -> Self {
        let wanted = frame.rows.iter().filter(|r| r.has(row_flags::WANT)).count();
        match (frame.rows.len(), wanted) {
            (0, _) => Self::Control,
            (_, 0) => Self::Prefill,
            (all, wanted) if all == wanted => Self::Decode,
            _ => Self::Mixed,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct JobLabel {
    job: &'static str,
}

type Seconds = Counter<f64, AtomicU64>;

/// Counters of all labels.
#[derive(Debug, Default)]
struct Families {
    count: Family<JobLabel, Counter>,
    wait: Family<JobLabel, Seconds>,
    hold: Family<JobLabel, Seconds>,
}

/// One label's counters, looked up once.
#[derive(Debug)]
struct Jobs {
    count: Counter,
    wait: Seconds,
    hold: Seconds,
}

/// Counters of the engine, written by its thread only.
#[derive(Debug)]
pub struct EngineStats {
    families: Families,
    jobs: [Jobs; Label::ALL.len()],
    batch_rows: Histogram,
    batch_sessions: Histogram,
    send: Seconds,
    /// Frames computed.
    pub frames: AtomicU64,
    /// Rows computed.
    pub rows: AtomicU64,
    /// Rows from which a token was predicted.
    pub wanted: AtomicU64,
    /// Rows dropped here or before.
    pub dropped: AtomicU64,
    /// Lanes in use.
    pub lanes: AtomicU64,
    prefixes: Mutex<PrefixCounts>,
    /// Signs of life.
    pub heartbeat: Heartbeat,
}

impl Default for EngineStats {
    fn default() -> Self {
        let sizes = || Histogram::new((0..=10).map(|n| f64::from(1 << n)));
        let families = Families::default();
        let jobs = Label::ALL.map(|label| {
            let job = JobLabel { job: label.name() };
            Jobs {
                count: families.count.get_or_create_owned(&job),
                wait: families.wait.get_or_create_owned(&job),
                hold: families.hold.get_or_create_owned(&job),
            }
        });
        Self {
            families,
            jobs,
            batch_rows: sizes(),
            batch_sessions: sizes(),
            send: Seconds::default(),
            frames: AtomicU64::default(),
            rows: AtomicU64::default(),
            wanted: AtomicU64::default(),
            dropped: AtomicU64::default(),
            lanes: AtomicU64::default(),
            prefixes: Mutex::default(),
            heartbeat: Heartbeat::default(),
        }
    }
}

impl EngineStats {
    /// Counts a job that waited and held the slice.
    pub fn job(&self, label: Label, wait: Duration, hold: Duration) {
        let jobs = &self.jobs[label as usize];
        jobs.count.inc();
        jobs.wait.inc_by(wait.as_secs_f64());
        jobs.hold.inc_by(hold.as_secs_f64());
    }

    /// Counts a frame's batch: rows, of them wanted, and the sessions they belong to.
    pub fn batch(&self, rows: usize, wanted: usize, sessions: usize) {
        self.frames.fetch_add(1, Relaxed);
        self.rows.fetch_add(rows as u64, Relaxed);
        self.wanted.fetch_add(wanted as u64, Relaxed);
        if rows > 0 {
            self.batch_rows.observe(rows as f64);
            self.batch_sessions.observe(sessions as f64);
        }
    }

    /// Counts the time that a finished frame waited for a place in the link's queue.
    pub fn sent(&self, waited: Duration) {
        self.send.inc_by(waited.as_secs_f64());
    }

    /// Notes what the stage kept and gave back of prefixes.
    pub fn set_prefixes(&self, counts: PrefixCounts) {
        *self.prefixes.lock().unwrap_or_else(PoisonError::into_inner) = counts;
    }

    /// What the stage kept and gave back of prefixes.
    pub fn prefixes(&self) -> PrefixCounts {
        *self.prefixes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shows the counters in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let f = &self.families;
        let second = Unit::Seconds;
        registry.register("engine_jobs", "Jobs of the engine's queue by what they are", f.count.clone());
        registry.register_with_unit("engine_wait", "Time jobs waited for the engine", second.clone(), f.wait.clone());
        registry.register_with_unit("engine_hold", "Time jobs held the engine", second.clone(), f.hold.clone());
        let help = "Time finished frames waited for a place in the queue of the next link";
        registry.register_with_unit("engine_send", help, second, self.send.clone());
        registry.register("batch_rows", "Rows of a batch", self.batch_rows.clone());
        registry.register("batch_sessions", "Sessions of a batch", self.batch_sessions.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use splitmodel_link::frame::Row;

    #[test]
    fn frames_are_labelled_by_their_rows() {
        let frame = |flags: &[u16]| Frame {
            rows: flags.iter().map(|f| Row { flags: *f, ..Row::default() }).collect(),
            ..Frame::default()
        };
        let want = row_flags::WANT;
        for (flags, label) in [
            (&[][..], Label::Control),
            (&[0, 0], Label::Prefill),
            (&[want, want | row_flags::LOGPROBS], Label::Decode),
            (&[0, want], Label::Mixed),
        ] {
            assert_eq!(Label::of(&frame(flags)), label);
        }
    }

    #[test]
    fn waits_show_under_their_label() {
        let stats = EngineStats::default();
        stats.job(Label::Decode, Duration::from_millis(250), Duration::from_millis(500));
        stats.batch(4, 4, 4);
        let mut registry = Registry::default();
        stats.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode_registry(&mut text, &registry).unwrap();
        for line in [
            "engine_jobs_total{job=\"decode\"} 1",
            "engine_wait_seconds_total{job=\"decode\"} 0.25",
            "engine_hold_seconds_total{job=\"decode\"} 0.5",
            "batch_sessions_bucket{le=\"2.0\"} 0",
            "batch_sessions_bucket{le=\"4.0\"} 1",
            "engine_jobs_total{job=\"prefill\"} 0",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
    }
}
