//! Frames of slices whose lanes have KV caches of their own (`kv_unified: false`), so that a row passes over its own lane's cells
//! only. llama.cpp then computes together what has one row in each of several sequences of consecutive numbers. So the rows of a frame
//! are brought into that order, and a small gap between two lanes is filled with a row of nothing whose cell is taken back.

use splitmodel_link::frame::{Lane, Position, Token};

/// Widest gap between lanes that is filled where a device other than the processor computes: a row more costs it next to nothing
/// beside passing over all weights once more. A few cores take about as long for a row as for a pass (SmolLM2-135M Q4_1, 2 cores:
/// 7 ms for one row, 23 ms for four), so there each gap begins another computation.
pub(crate) const MAX_FILL: usize = 4;

/// A row of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) lane: Lane,
    /// Its index in the frame; `None` where it fills a gap.
    pub(crate) of: Option<usize>,
}

/// The calls of a frame, and the buffers of one; kept between frames.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(crate) rows: Vec<Row>,
    /// Where each call ends in `rows`.
    pub(crate) ends: Vec<usize>,
    singles: Vec<usize>,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) positions: Vec<Position>,
    pub(crate) want: Vec<bool>,
    pub(crate) input: Vec<f32>,
    pub(crate) tokens: Vec<Token>,
}

impl Plan {
    /// Plans the calls of a frame with rows of `lanes`: lanes with one row together, each other lane by itself. Gaps of at most
    /// `widest` lanes are filled; `fills` says whether a lane that is not among them may.
    pub(crate) fn make(&mut self, lanes: &[Lane], widest: usize, fills: impl Fn(Lane) -> bool) {
        self.rows.clear();
        self.ends.clear();
        self.singles.clear();
        let once = |i: usize| lanes.iter().filter(|l| **l == lanes[i]).take(2).count() == 1;
        self.singles.extend((0..lanes.len()).filter(|i| once(*i)));
        self.singles.sort_by_key(|i| lanes[*i]);
        for (at, &i) in self.singles.iter().enumerate() {
            let lane = lanes[i];
            if let Some(before) = at.checked_sub(1).map(|b| lanes[self.singles[b]]) {
                let gap = before + 1..lane;
                if gap.len() <= widest && gap.clone().all(&fills) {
                    self.rows.extend(gap.map(|lane| Row { lane, of: None }));
                } else {
                    self.ends.push(self.rows.len());
                }
            }
            self.rows.push(Row { lane, of: Some(i) });
        }
        if !self.singles.is_empty() {
            self.ends.push(self.rows.len());
        }
        for (first, &lane) in lanes.iter().enumerate() {
            if once(first) || lanes[..first].contains(&lane) {
                continue;
            }
            let own = (first..lanes.len()).filter(|i| lanes[*i] == lane);
            self.rows.extend(own.map(|i| Row { lane, of: Some(i) }));
            self.ends.push(self.rows.len());
        }
    }

    /// Empties the buffers of a call.
    pub(crate) fn begin(&mut self) {
        self.lanes.clear();
        self.positions.clear();
        self.want.clear();
        self.input.clear();
        self.tokens.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lanes of each call; those that fill gaps are negative, less one.
    fn calls(lanes: &[Lane], full: &[Lane]) -> Vec<Vec<i32>> {
        calls_with(MAX_FILL, lanes, full)
    }

    fn calls_with(widest: usize, lanes: &[Lane], full: &[Lane]) -> Vec<Vec<i32>> {
        let mut plan = Plan::default();
        plan.make(lanes, widest, |lane| !full.contains(&lane));
        let mut start = 0;
        let mut found = Vec::new();
        for &end in &plan.ends {
            let lane = |r: &Row| if r.of.is_some() { i32::from(r.lane) } else { -1 - i32::from(r.lane) };
            found.push(plan.rows[start..end].iter().map(lane).collect());
            start = end;
        }
        let mut all: Vec<_> = plan.rows.iter().filter_map(|r| r.of).collect();
        all.sort_unstable();
        assert_eq!(all, (0..lanes.len()).collect::<Vec<_>>(), "every row once");
        assert!(plan.rows.iter().all(|r| r.of.is_none_or(|i| lanes[i] == r.lane)));
        found
    }

    #[test]
    fn rows_of_several_lanes_are_computed_together_in_the_order_of_lanes() {
        assert_eq!(calls(&[3, 1, 2], &[]), [vec![1, 2, 3]]);
        assert_eq!(calls(&[7], &[]), [vec![7]]);
    }

    #[test]
    fn a_lane_with_several_rows_has_a_call_of_its_own() {
        assert_eq!(calls(&[3, 1, 1, 2, 1], &[]), [vec![2, 3], vec![1, 1, 1]]);
        assert_eq!(calls(&[5, 5, 2, 2], &[]), [vec![5, 5], vec![2, 2]]);
    }

    #[test]
    fn small_gaps_are_filled_where_there_is_room() {
        assert_eq!(calls(&[0, 2, 3], &[]), [vec![0, -2, 2, 3]]);
        assert_eq!(calls(&[0, 2, 3], &[1]), [vec![0], vec![2, 3]]);
        assert_eq!(calls(&[0, 6], &[]), [vec![0], vec![6]], "too wide");
        assert_eq!(calls_with(0, &[3, 1, 0], &[]), [vec![0, 1], vec![3]], "never");
        assert_eq!(calls(&[2, 0, 1, 1], &[]), [vec![0, -2, 2], vec![1, 1]], "also with a lane that comes later");
    }
}
