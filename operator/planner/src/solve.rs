//! Search for the cuts: exact, over legal ranges and devices in their order.

use std::cell::Cell;
use std::ops::Range;

use splitmodel_gguf::ModelFacts;

use crate::{Device, MemoryModel, PlanOptions, StageBytes, options::MAX_STAGES};

/// A stage on a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) device: usize,
    pub(crate) layers: Range<u32>,
}

/// What is minimised over the stages of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Goal {
    /// Cost of the slowest stage, all fitting.
    Cost,
    /// Bytes missing at the worst stage.
    Shortfall,
}

/// Bit `s`: a prefix of the layers can be held by `s` stages.
type Counts = u128;

/// One search.
pub(crate) struct Search<'a> {
    pub(crate) memory: &'a MemoryModel,
    devices: &'a [Device],
    usable: Vec<Option<u64>>,
    /// Whether one stage may hold `first..end`, at `first * (n + 1) + end`; absent: every range.
    legal: Option<Vec<bool>>,
    n: u32,
    /// Ranges looked at, for tests of the work done.
    pub(crate) steps: Cell<u64>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        facts: &ModelFacts,
        memory: &'a MemoryModel,
        devices: &'a [Device],
        options: &PlanOptions,
    ) -> Self {
        Self {
            memory,
            devices,
            usable: devices.iter().map(|d| d.usable(options.headroom)).collect(),
            legal: legal_ranges(facts),
            n: facts.n_layers,
            steps: Cell::new(0),
        }
    }

    /// The same search with every cut allowed; `None` where that is the case already.
    pub(crate) fn without_rules(&self) -> Option<Self> {
        self.legal.as_ref()?;
        Some(Self {
            memory: self.memory,
            devices: self.devices,
            usable: self.usable.clone(),
            legal: None,
            n: self.n,
            steps: Cell::new(0),
        })
    }

    pub(crate) fn usable(&self, device: usize) -> Option<u64> {
        self.usable[device]
    }

    pub(crate) fn is_legal(&self, range: &Range<u32>) -> bool {
        self.legal.as_ref().is_none_or(|l| l[(range.start * (self.n + 1) + range.end) as usize])
    }

    /// Seconds, in the unit of the devices' speeds, that a stage takes for a token.
    pub(crate) fn cost(&self, device: usize, range: &Range<u32>) -> f64 {
        self.cost_of(device, &self.memory.stage(range.clone()))
    }

    /// Bytes that a stage needs beyond what its device may give.
    pub(crate) fn shortfall(&self, device: usize, range: &Range<u32>) -> u64 {
        self.shortfall_of(device, &self.memory.stage(range.clone()))
    }

    fn cost_of(&self, device: usize, bytes: &StageBytes) -> f64 {
        bytes.weights as f64 / self.devices[device].speed
    }

    fn shortfall_of(&self, device: usize, bytes: &StageBytes) -> u64 {
        self.usable[device].map_or(0, |usable| bytes.on_device(self.devices[device].host).saturating_sub(usable))
    }

    /// Grows with the range, so a search over ends may stop at the first that is too large.
    fn measure(&self, goal: Goal, device: usize, range: &Range<u32>) -> f64 {
        self.steps.set(self.steps.get() + 1);
        let bytes = self.memory.stage(range.clone());
        match (goal, self.shortfall_of(device, &bytes)) {
            (Goal::Shortfall, missing) => missing as f64,
            (Goal::Cost, 0) => self.cost_of(device, &bytes),
            (Goal::Cost, _) => f64::INFINITY,
        }
    }

    /// Counts of stages that fit on the devices; bit 0 is never set.
    pub(crate) fn fitting_counts(&self) -> Counts {
        let reach = self.reach(Goal::Cost, f64::MAX, None).0;
        reach[self.devices.len()][self.n as usize] & !1
    }

    /// Counts of stages that the cuts and the number of devices allow, whatever fits; bit 0 is never set.
    pub(crate) fn possible_counts(&self) -> Counts {
        let most = self.devices.len().min(MAX_STAGES as usize);
        let kept: Counts = ((1 << most) - 1) << 1;
        if self.legal.is_none() {
            return kept & ((1 << (self.n.min(MAX_STAGES) + 1)) - 1);
        }
        let mut counts = vec![0; self.n as usize + 1];
        counts[0] = 1;
        for end in 1..=self.n {
            for first in (0..end).filter(|first| self.is_legal(&(*first..end))) {
                counts[end as usize] |= (counts[first as usize] << 1) & kept;
            }
        }
        counts[self.n as usize]
    }

    /// `reach[d][i]`: how many stages on the first `d` devices can hold the first `i` layers, as far as `count` can still be
    /// reached; and the least measure above `limit` that was turned down.
    fn reach(&self, goal: Goal, limit: f64, count: Option<u32>) -> (Vec<Vec<Counts>>, f64) {
        let n = self.n as usize;
        let mut reach = vec![vec![0; n + 1]; self.devices.len() + 1];
        let mut next = f64::INFINITY;
        reach[0][0] = 1;
        for d in 0..self.devices.len() {
            let useful = self.useful(d, count);
            for i in 0..=n {
                let here = reach[d][i] & useful;
                if here == 0 {
                    continue;
                }
                reach[d + 1][i] |= here;
                for end in i as u32 + 1..=self.n {
                    let range = i as u32..end;
                    let measure = self.measure(goal, d, &range);
                    if measure > limit {
                        next = next.min(measure);
                        break;
                    }
                    if self.is_legal(&range) {
                        reach[d + 1][end as usize] |= (here << 1) & ((1 << (MAX_STAGES + 1)) - 1);
                    }
                }
            }
        }
        (reach, next)
    }

    /// Stage counts before device `d` from which `count` can still be reached.
    fn useful(&self, d: usize, count: Option<u32>) -> Counts {
        let Some(count) = count else { return Counts::MAX };
        let at_least = (count as usize).saturating_sub(self.devices.len() - d);
        let up_to: Counts = (1 << (count + 1)) - 1;
        up_to & !((1 << at_least) - 1)
    }

    /// The plan of `count` stages whose largest measure is least; among those the one with the least sum of squares.
    pub(crate) fn best(&self, goal: Goal, count: u32) -> Option<Vec<Placed>> {
        let limit = self.least_limit(goal, count)?;
        Some(self.most_even(goal, limit, count))
    }

    fn least_limit(&self, goal: Goal, count: u32) -> Option<f64> {
        // From below and doubling: passes with small limits look at few ranges.
        let speed: f64 = self.devices.iter().map(|d| d.speed).sum();
        let mut limit = match goal {
            Goal::Cost => self.memory.stage(0..self.n).weights as f64 / speed,
            Goal::Shortfall => 0.0,
        };
        let mut low = 0.0f64;
        let mut high = f64::INFINITY;
        loop {
            let (reach, next) = self.reach(goal, limit, Some(count));
            if reach[self.devices.len()][self.n as usize] & (1 << count) != 0 {
                // No plan lies between the largest measure of one found here and the limit.
                high = self.largest(goal, &self.trace(&reach, goal, limit, count));
            } else if next.is_infinite() {
                return None;
            } else {
                low = next;
            }
            if low >= high {
                return Some(high);
            }
            limit = if high.is_finite() {
                let middle = low + (high - low) / 2.0;
                // Below `high` strictly, or the search would not end.
                if middle < high { middle } else { low }
            } else {
                low.max(limit * 2.0)
            };
        }
    }

    fn largest(&self, goal: Goal, plan: &[Placed]) -> f64 {
        plan.iter().map(|p| self.measure(goal, p.device, &p.layers)).fold(0.0, f64::max)
    }

    /// Some plan within `limit`, from the end back.
    fn trace(&self, reach: &[Vec<Counts>], goal: Goal, limit: f64, count: u32) -> Vec<Placed> {
        let mut plan = Vec::new();
        let (mut end, mut left) = (self.n, count);
        for d in (0..self.devices.len()).rev() {
            if reach[d][end as usize] & self.useful(d, Some(count)) & (1 << left) != 0 {
                continue;
            }
            let useful = self.useful(d, Some(count));
            let found = (0..end).rev().find(|first| {
                let range = *first..end;
                left > 0
                    && reach[d][*first as usize] & useful & (1 << (left - 1)) != 0
                    && self.is_legal(&range)
                    && self.measure(goal, d, &range) <= limit
            });
            if let Some(first) = found {
                plan.push(Placed { device: d, layers: first..end });
                (end, left) = (first, left - 1);
            }
        }
        plan.reverse();
        plan
    }

    /// Least sum of squared measures among the plans of `count` stages within `limit`, which exist.
    fn most_even(&self, goal: Goal, limit: f64, count: u32) -> Vec<Placed> {
        let (n, width, devices) = (self.n as usize, count as usize + 1, self.devices.len());
        let at = |d: usize, i: usize, s: usize| (d * (n + 1) + i) * width + s;
        let mut best = vec![f64::INFINITY; (devices + 1) * (n + 1) * width];
        best[at(0, 0, 0)] = 0.0;
        for d in 0..devices {
            let lowest = (count as usize).saturating_sub(devices - d);
            for i in 0..=n {
                for s in lowest..width {
                    let here = best[at(d, i, s)];
                    let skip = &mut best[at(d + 1, i, s)];
                    *skip = skip.min(here);
                }
                let live = best[at(d, i, lowest)..at(d, i, width - 1)].iter().any(|v| v.is_finite());
                for end in i + 1..=n {
                    let range = i as u32..end as u32;
                    let measure = if live { self.measure(goal, d, &range) } else { f64::INFINITY };
                    if measure > limit {
                        break;
                    }
                    if self.is_legal(&range) {
                        for s in lowest..width - 1 {
                            let sum = best[at(d, i, s)] + measure * measure;
                            let there = &mut best[at(d + 1, end, s + 1)];
                            *there = there.min(sum);
                        }
                    }
                }
            }
        }
        let mut plan = Vec::new();
        let (mut end, mut s) = (n, count as usize);
        for d in (0..devices).rev() {
            let value = best[at(d + 1, end, s)];
            // A device is left out where that makes no difference.
            if best[at(d, end, s)] == value {
                continue;
            }
            let found = (0..end).rev().find(|first| {
                let range = *first as u32..end as u32;
                s > 0 && best[at(d, *first, s - 1)].is_finite() && self.is_legal(&range) && {
                    let measure = self.measure(goal, d, &range);
                    measure <= limit && best[at(d, *first, s - 1)] + measure * measure == value
                }
            });
            if let Some(first) = found {
                plan.push(Placed { device: d, layers: first as u32..end as u32 });
                (end, s) = (first, s - 1);
            }
        }
        plan.reverse();
        plan
    }
}

/// `None` where every range may be a stage.
fn legal_ranges(facts: &ModelFacts) -> Option<Vec<bool>> {
    let n = facts.n_layers;
    let every_cut = (1..n).all(|l| facts.legal_cuts.contains(&l));
    let needs = facts.needs.windowed || facts.needs.attention || facts.needs.recurrent;
    if every_cut && !needs && facts.special_layer_counts.is_empty() {
        return None;
    }
    let mut cut = vec![false; n as usize + 1];
    cut[0] = true;
    cut[n as usize] = true;
    for &layer in facts.legal_cuts.iter().filter(|l| **l < n) {
        cut[layer as usize] = true;
    }
    let mut legal = vec![false; ((n + 1) * (n + 1)) as usize];
    for first in (0..n).filter(|l| cut[*l as usize]) {
        for end in (first + 1..=n).filter(|l| cut[*l as usize]) {
            legal[(first * (n + 1) + end) as usize] = facts.check_range(first, end).is_ok();
        }
    }
    Some(legal)
}
