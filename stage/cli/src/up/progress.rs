//! How far each stage is: bars on a terminal, a line per change otherwise.
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use splitmodel_control::{Phase, StageStatus};

use crate::ui;

/// The progress of all stages.
pub struct Progress {
    rows: Vec<Row>,
    bars: Option<(MultiProgress, Vec<ProgressBar>)>,
}

#[derive(Clone, Default)]
struct Row {
    phase: Option<Phase>,
    error: String,
    /// Tenths of the slice that were reported in plain lines.
    tenths: u64,
}

impl Progress {
    /// For `stages` stages; with bars if `terminal`.
    #[must_use]
    pub fn new(stages: usize, terminal: bool) -> Self {
        let bars = terminal.then(|| {
            let multi = MultiProgress::new();
            let bars = (0..stages)
                .map(|stage| {
                    let bar = multi.add(ProgressBar::new(0));
                    bar.set_style(style(false));
                    bar.set_prefix(format!("stage {stage}"));
                    bar.set_message("starting");
                    bar
                })
                .collect();
            (multi, bars)
        });
        Self { rows: vec![Row::default(); stages], bars }
    }

    /// Shows a line without disturbing the bars.
    pub fn say(&self, line: &str) {
        match &self.bars {
            Some((multi, _)) => multi.suspend(|| ui::note(line)),
            None => ui::note(line),
        }
    }

    /// Writes a line to standard output without disturbing the bars.
    pub fn print(&self, line: &str) {
        match &self.bars {
            Some((multi, _)) => multi.suspend(|| ui::offer(line)),
            None => ui::offer(line),
        }
    }

    /// Takes in what `stage` reports.
    pub fn report(&mut self, stage: u32, status: &StageStatus) {
        let Some(row) = self.rows.get_mut(stage as usize) else { return };
        let phase = status.phase();
        if let Some((_, bars)) = &self.bars {
            let bar = &bars[stage as usize];
            let fetching = phase == Phase::Fetching && status.total_bytes > 0;
            if row.phase != Some(phase) {
                bar.set_style(style(fetching));
            }
            bar.set_length(status.total_bytes);
            bar.set_position(status.fetched_bytes);
            bar.set_message(health(status));
            *row = Row { phase: Some(phase), error: status.last_error.clone(), tenths: 0 };
            return;
        }
        if row.phase != Some(phase) {
            row.phase = Some(phase);
            row.tenths = 0;
            ui::note(&format!("stage {stage}: {}", health(status)));
        } else if phase == Phase::Fetching && status.total_bytes > 0 {
            let tenths =
                u64::try_from(u128::from(status.fetched_bytes) * 10 / u128::from(status.total_bytes)).unwrap_or(10);
            if tenths > row.tenths {
                row.tenths = tenths;
                ui::note(&format!("stage {stage}: {}", health(status)));
            }
        }
        if row.error != status.last_error {
            row.error.clone_from(&status.last_error);
            if !row.error.is_empty() && phase != Phase::Failed {
                ui::note(&format!("stage {stage}: {}", row.error));
            }
        }
    }

    /// The stage does not answer any more.
    pub fn lost(&mut self, stage: u32) {
        if let Some(row) = self.rows.get_mut(stage as usize) {
            *row = Row::default();
        }
        if let Some((_, bars)) = &self.bars {
            bars[stage as usize].set_message("not answering");
        }
    }

    /// Takes the bars off the screen.
    pub fn clear(&self) {
        if let Some((multi, _)) = &self.bars {
            let _ = multi.clear();
        }
    }
}

fn style(fetching: bool) -> ProgressStyle {
    let template = if fetching { "{prefix} {bar:24} {bytes}/{total_bytes} {msg}" } else { "{prefix} {msg}" };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// A stage's state in a few words.
#[must_use]
pub fn health(status: &StageStatus) -> String {
    let layers = format!("layers [{}, {})", status.first_layer, status.end_layer);
    match status.phase() {
        Phase::Unspecified | Phase::Planned => format!("planned, {layers}"),
        Phase::Fetching if status.total_bytes > 0 => {
            format!("fetching {} of {}", ui::bytes(status.fetched_bytes), ui::bytes(status.total_bytes))
        }
        Phase::Fetching => "fetching".into(),
        Phase::Loading => "loading".into(),
        Phase::Loaded => format!("loaded, waiting for the other stages{}", with_error(status)),
        Phase::Linked => format!("linked{}", with_error(status)),
        Phase::Serving => {
            let memory = status.memory.unwrap_or_default();
            let used = memory.weights.saturating_add(memory.kv).saturating_add(memory.compute);
            format!("serving, {layers}, {}, {} of {} lanes", ui::bytes(used), status.lanes_used, status.lanes)
        }
        Phase::Draining => format!("draining, {} of {} lanes", status.lanes_used, status.lanes),
        Phase::Failed => format!("failed: {}", status.last_error),
    }
}

fn with_error(status: &StageStatus) -> String {
    if status.last_error.is_empty() { String::new() } else { format!(" ({})", status.last_error) }
}

/// A phase's name.
#[must_use]
pub const fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Unspecified => "unknown",
        Phase::Planned => "planned",
        Phase::Fetching => "fetching",
        Phase::Loading => "loading",
        Phase::Loaded => "loaded",
        Phase::Linked => "linked",
        Phase::Serving => "serving",
        Phase::Draining => "draining",
        Phase::Failed => "failed",
    }
}

#[cfg(test)]
mod tests {
    use splitmodel_control::Memory;

    use super::*;

    #[test]
    fn health_says_what_matters_in_each_phase() {
        let mut status = StageStatus { end_layer: 12, lanes: 4, lanes_used: 1, ..StageStatus::default() };
        let mut at = |phase| {
            status.set_phase(phase);
            status.clone()
        };
        assert_eq!(health(&at(Phase::Planned)), "planned, layers [0, 12)");
        let fetching = StageStatus { fetched_bytes: 1024, total_bytes: 2048, ..at(Phase::Fetching) };
        assert_eq!(health(&fetching), "fetching 1.0 KiB of 2.0 KiB");
        let loaded = StageStatus { last_error: "stage 2 refused: model".into(), ..at(Phase::Loaded) };
        assert_eq!(health(&loaded), "loaded, waiting for the other stages (stage 2 refused: model)");
        let memory = Some(Memory { weights: 1 << 20, kv: 1 << 20, compute: u64::MAX });
        let serving = StageStatus { memory, ..at(Phase::Serving) };
        assert!(health(&serving).ends_with("1 of 4 lanes"));
    }
}
