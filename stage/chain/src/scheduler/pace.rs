//! How many prompt rows go along with running answers. A fixed number fits no two machines: rows that a GPU computes beside
//! an answer for nothing cost a CPU as much as an answer each. So it follows what the stages say that frames cost. The same
//! figures tell in how many frames a short prompt passes the stages soonest.

use splitmodel_link::frame::StageStats;

/// Frames with prompt rows may cost this many times what frames without cost.
const SLOWDOWN: f64 = 2.0;
/// Rows a frame gets at least, so that prompts go on where every row is dear.
const LEAST_PER_FRAME: usize = 8;
/// Share of a new frame in the means.
const WEIGHT: f64 = 1.0 / 16.0;
/// Frames whose numbers of rows are closer together than this share of their mean say nothing about the cost of a row.
const LEAST_SPREAD: f64 = 0.1;
/// Growth by one observation at most.
const GROWTH: f64 = 1.25;

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// Rows of one frame.
    now: f64,
    least: f64,
    most: f64,
    frames: usize,
    /// Of frames with answers.
    line: Line,
    /// Of frames with prompts alone or answers alone.
    pure: Line,
}

impl Pace {
    /// At most `most` rows in flight, over `frames` frames.
    pub(super) fn new(most: usize, frames: usize) -> Self {
        let most_per_frame = most.div_ceil(frames.max(1)).max(1);
        let least = LEAST_PER_FRAME.min(most_per_frame) as f64;
        Self {
            now: least,
            least,
            most: most_per_frame as f64,
            frames: frames.max(1),
            line: Line::default(),
            pure: Line::default(),
        }
    }

    /// Prompt rows for the next frame.
    pub(super) fn per_frame(&self) -> usize {
        self.now as usize
    }

    /// Prompt rows in flight at once.
    pub(super) fn in_flight(&self) -> usize {
        self.per_frame() * self.frames
    }

    /// Rows of each of the frames in which `rows` prompt rows pass the stages soonest, while no answer is running. Of `k` frames
    /// over `n` stages the last is through after `n + k - 1` steps of `fixed + row · rows / k` each, which is least at
    /// `k = √((n - 1) · rows / (fixed / row))`. At most `most` frames are worth it; all
    /// goes in one where nothing is known.
    pub(super) fn alone(&self, rows: usize, most: usize) -> usize {
        let others = (self.frames - 1) as f64;
        let Some(fixed_per_row) = self.pure.fixed_per_row.filter(|_| others > 0.0 && rows > 1) else { return rows };
        let frames = (others * rows as f64 / fixed_per_row).sqrt().round().clamp(1.0, most.max(1) as f64);
        rows.div_ceil(frames as usize)
    }

    /// Takes in what an answered frame with so many rows of prompts and answers cost.
    pub(super) fn answered(&mut self, prompt_rows: usize, answer_rows: usize, stats: impl Iterator<Item = StageStats>) {
        // The slowest stage sets the pace of a pipeline.
        let cost = stats.map(|s| f64::from(s.compute_us) + f64::from(s.encode_us)).fold(0.0, f64::max);
        if cost <= 0.0 {
            return;
        }
        if answer_rows == 0 || prompt_rows == 0 {
            self.pure.add((prompt_rows + answer_rows) as f64, cost);
        }
        if answer_rows == 0 {
            return;
        }
        self.line.add((prompt_rows + answer_rows) as f64, cost);
        let fit = match self.line.fixed_per_row {
            // fixed + row · (answers + p) = SLOWDOWN · (fixed + row · answers)
            Some(fixed_per_row) => (SLOWDOWN - 1.0) * (fixed_per_row + answer_rows as f64),
            // Other numbers of rows have to be seen before anything is known.
            None if prompt_rows > 0 => f64::INFINITY,
            None => return,
        };
        self.now = fit.min(self.now * GROWTH).max(self.now / GROWTH).clamp(self.least, self.most);
    }
}

/// The cost of frames as a line over their rows, by least squares with exponential weights.
#[derive(Debug, Default)]
struct Line {
    /// Means of rows, cost, rows², rows · cost.
    means: Option<[f64; 4]>,
    /// The cost of a frame as such in rows; infinite where rows cost nothing.
    fixed_per_row: Option<f64>,
}

impl Line {
    fn add(&mut self, rows: f64, cost: f64) {
        let seen = [rows, cost, rows * rows, rows * cost];
        let means = self.means.get_or_insert(seen);
        for (mean, seen) in means.iter_mut().zip(seen) {
            *mean += WEIGHT * (seen - *mean);
        }
        let [r, c, rr, rc] = *means;
        let variance = rr - r * r;
        if variance.max(0.0).sqrt() < LEAST_SPREAD * r {
            return;
        }
        let row = (rc - r * c) / variance;
        let fixed = (c - row * r).max(0.0);
        self.fixed_per_row = Some(if row > 0.0 { fixed / row } else { f64::INFINITY });
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
        for at in 0..400 {
            // Prompts come in bursts, and the number of answers changes.
            let (answers, begins) = (2 + at / 10 % 3, at % 20 < 14);
            let rows = if begins { pace.per_frame() } else { 0 };
            assert!(pace.in_flight() <= most.next_multiple_of(3));
            pace.answered(rows, answers, frame(rows + answers));
        }
        for _ in 0..20 {
            let rows = pace.per_frame();
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
    fn a_short_prompt_goes_in_as_many_frames_as_pay() {
        let told = |base: u32, row: u32| {
            let mut pace = Pace::new(512, 3);
            assert_eq!(pace.alone(10, 3), 10, "nothing is known");
            for rows in [1, 1, 1, 100, 1, 1] {
                let cost = StageStats { compute_us: base + row * rows, ..StageStats::default() };
                let (prompt, answers) = if rows > 1 { (rows as usize, 0) } else { (0, 1) };
                pace.answered(prompt, answers, std::iter::once(cost));
            }
            pace
        };
        let (cpu, gpu) = (told(0, 7_000), told(20_000, 200));
        let short = [cpu.alone(10, 3), cpu.alone(2, 3), cpu.alone(1, 3), cpu.alone(0, 3)];
        assert_eq!((short, cpu.pure.fixed_per_row), ([4, 1, 1, 0], Some(0.0)), "each stage has a part");
        assert_eq!((cpu.alone(10, 2), cpu.alone(10, 0)), (5, 10), "as many as can be under way");
        // √(2 · rows ÷ 100) frames: 0.4, 1.4, 3.2.
        assert_eq!((gpu.alone(10, 3), gpu.alone(100, 3), gpu.alone(500, 3)), (10, 100, 167));
        assert_eq!(told(20_000, 0).alone(500, 3), 500, "rows cost nothing");
        assert_eq!(Pace::new(512, 1).alone(10, 3), 10);
    }

    #[test]
    fn a_server_that_always_has_prompts_learns_too() {
        let mut pace = Pace::new(512, 1);
        for _ in 0..200 {
            let rows = pace.per_frame();
            let cost = 20_000 + 200 * (rows as u32 + 4);
            pace.answered(rows, 4, std::iter::once(StageStats { compute_us: cost, ..StageStats::default() }));
        }
        assert!((95..=110).contains(&pace.per_frame()), "{}", pace.per_frame());
    }

    #[test]
    fn nothing_is_learnt_from_frames_that_say_nothing() {
        let mut pace = Pace::new(512, 2);
        let stats = |us| std::iter::once(StageStats { compute_us: us, ..StageStats::default() });
        pace.answered(0, 1, stats(5)); // what rows cost is not known yet
        pace.answered(0, 1, stats(0));
        pace.answered(8, 0, stats(9_000));
        assert_eq!(pace.per_frame(), 8);
    }
}
