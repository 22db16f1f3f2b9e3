//! How many prompt rows go along with running answers. A fixed number fits no two machines: rows that a GPU computes beside
//! an answer for nothing cost a CPU as much as an answer each. So it follows what the stages say that frames cost.

use splitmodel_link::frame::StageStats;

/// Frames with prompt rows may cost this many times what frames without cost.
const SLOWDOWN: f64 = 2.0;
/// Rows a frame gets at least, so that prompts go on where every row is dear.
const LEAST_PER_FRAME: usize = 8;
/// Share of a new observation.
const WEIGHT: f64 = 0.25;
/// Growth by one observation at most.
const GROWTH: f64 = 1.5;

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// Rows of one frame.
    now: f64,
    least: f64,
    most: f64,
    frames: usize,
    /// Cost of a frame with answers only, µs.
    answers_us: Option<f64>,
}

impl Pace {
    /// At most `most` rows in flight, over `frames` frames.
    pub(super) fn new(most: usize, frames: usize) -> Self {
        let most_per_frame = most.div_ceil(frames.max(1)).max(1);
        let least = LEAST_PER_FRAME.min(most_per_frame) as f64;
        Self { now: least, least, most: most_per_frame as f64, frames: frames.max(1), answers_us: None }
    }

    /// Prompt rows for the next frame.
    pub(super) fn per_frame(&self) -> usize {
        self.now as usize
    }

    /// Prompt rows in flight at once.
    pub(super) fn in_flight(&self) -> usize {
        self.per_frame() * self.frames
    }

    /// Takes in what an answered frame with so many rows of prompts and answers cost.
    pub(super) fn answered(&mut self, prompt_rows: usize, answer_rows: usize, stats: impl Iterator<Item = StageStats>) {
        // The slowest stage sets the pace of a pipeline.
        let cost = stats.map(|s| f64::from(s.compute_us) + f64::from(s.encode_us)).fold(0.0, f64::max);
        if answer_rows == 0 || cost <= 0.0 {
            return;
        }
        if prompt_rows == 0 {
            self.answers_us = Some(self.answers_us.map_or(cost, |before| before + WEIGHT * (cost - before)));
            return;
        }
        let Some(alone) = self.answers_us else { return };
        let per_row = (cost - alone) / prompt_rows as f64;
        let fit = if per_row > 0.0 { (SLOWDOWN - 1.0) * alone / per_row } else { f64::INFINITY };
        let next = self.now + WEIGHT * (fit.min(self.now * (1.0 + (GROWTH - 1.0) / WEIGHT)) - self.now);
        self.now = next.clamp(self.least, self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Frames of a chain whose slowest stage takes `base` µs and `row` µs for each row, as long as the pace takes to settle.
    fn settled(most: usize, base: u32, row: u32) -> usize {
        let mut pace = Pace::new(most, 3);
        let frame = |rows: usize| {
            let slow = StageStats { compute_us: base + row * rows as u32, ..StageStats::default() };
            [StageStats { compute_us: slow.compute_us / 2, ..StageStats::default() }, slow].into_iter()
        };
        pace.answered(0, 4, frame(4));
        for _ in 0..100 {
            let rows = pace.per_frame();
            assert!(pace.in_flight() <= most.next_multiple_of(3));
            pace.answered(rows, 4, frame(rows + 4));
        }
        pace.per_frame()
    }

    #[test]
    fn rows_that_cost_nothing_fill_the_frames_and_dear_ones_do_not() {
        // 20 ms a step whatever is in it: a GPU that waits for memory.
        assert_eq!(settled(512, 20_000, 0), 171);
        // 20 ms and 0.2 ms a row: 100 rows double a step with four answers, nearly.
        assert!((95..=110).contains(&settled(512, 20_000, 200)), "{}", settled(512, 20_000, 200));
        // Each row costs as much as an answer: a CPU.
        assert_eq!(settled(512, 0, 7_000), 8);
        assert_eq!(settled(6, 0, 7_000), 2, "the limit is the limit");
    }

    #[test]
    fn nothing_is_learnt_from_frames_that_say_nothing() {
        let mut pace = Pace::new(512, 2);
        let stats = |us| std::iter::once(StageStats { compute_us: us, ..StageStats::default() });
        pace.answered(8, 1, stats(5)); // what answers cost alone is not known yet
        pace.answered(0, 1, stats(0));
        pace.answered(8, 0, stats(9_000));
        assert_eq!(pace.per_frame(), 8);
    }
}
