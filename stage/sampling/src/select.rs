//! Choosing among logits: scanning, ranking, filters and the draw. No full sort of a vocabulary.

use std::cmp::Ordering;

use crate::Token;

/// A token with its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) logit: f32,
    pub(crate) token: Token,
}

/// Best first; equal logits by token id.
fn rank(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.token.cmp(&b.token))
}

/// The two best values of a vocabulary.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scan {
    /// Lowest id among the largest values.
    pub(crate) best: usize,
    pub(crate) max: f32,
    pub(crate) second: f32,
}

/// One pass over `values`; an error names the first index that is NaN or +∞.
pub(crate) fn scan(values: &[f32]) -> Result<Scan, usize> {
    let mut scan = Scan { best: 0, max: f32::NEG_INFINITY, second: f32::NEG_INFINITY };
    for (i, &v) in values.iter().enumerate() {
        if v > scan.second || v.is_nan() {
            if v.is_nan() || v == f32::INFINITY {
                return Err(i);
            }
            if v > scan.max {
                scan = Scan { best: i, max: v, second: scan.max };
            } else {
                scan.second = v;
            }
        }
    }
    Ok(scan)
}

/// Log-sum-exp and entropy (nats) of the softmax of `values`, whose largest is `max` (finite).
pub(crate) fn log_sum_and_entropy(values: &[f32], max: f32) -> (f64, f64) {
    let (mut sum, mut weighted) = (0f64, 0f64);
    for &v in values {
        let delta = v - max;
        let weight = f64::from(delta.exp());
        if weight > 0.0 {
            sum += weight;
            weighted += weight * f64::from(delta);
        }
    }
    let log_sum = sum.ln();
    (f64::from(max) + log_sum, (log_sum - weighted / sum).max(0.0))
}

/// The `n` best of `values` in rank order, −∞ left out.
pub(crate) fn best(values: &[f32], n: usize, out: &mut Vec<Candidate>) {
    out.clear();
    if n == 0 {
        return;
    }
    let mut floor = f32::NEG_INFINITY;
    for (i, &logit) in values.iter().enumerate() {
        if logit > floor {
            // Later ids rank behind equal earlier ones.
            let at = out.partition_point(|c| c.logit >= logit);
            if out.len() == n {
                out.pop();
            }
            out.insert(at, Candidate { logit, token: i as Token });
            if out.len() == n {
                floor = out[n - 1].logit;
            }
        }
    }
}

/// The filters of one session.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Filters {
    /// 0 is off.
    pub(crate) top_k: usize,
    /// 1 is off.
    pub(crate) top_p: f64,
    /// 0 is off.
    pub(crate) min_p: f32,
}

/// Scratch space of filters and draws.
#[derive(Debug, Default)]
pub(crate) struct Selector {
    candidates: Vec<Candidate>,
    weights: Vec<f32>,
}

impl Selector {
    /// Draws a token: `top_k`, `top_p`, `min_p`, then the softmax at `temperature` (> 0) by inverse transform of `u` in
    /// [0, 1). Filtered candidates are walked by rank, an unfiltered vocabulary by id. `max` is the largest value and
    /// finite.
    pub(crate) fn draw(&mut self, values: &[f32], max: f32, filters: Filters, temperature: f32, u: f64) -> Token {
        let by_k = filters.top_k > 0 && filters.top_k < values.len();
        let by_p = filters.top_p < 1.0;
        let by_min = filters.min_p > 0.0;
        if !(by_k || by_p || by_min) {
            return self.draw_from(values.iter().copied().zip(0..), max, temperature, u);
        }
        // −∞ + anything stays below every logit that counts.
        let floor = if by_min { max + filters.min_p.ln() } else { f32::NEG_INFINITY };
        // top_p's total counts what min_p removes later, so only one of the two may go first.
        let early = if by_k && by_p { f32::NEG_INFINITY } else { floor };
        let live = |v: f32| v > f32::NEG_INFINITY && v >= early;
        let candidates = &mut self.candidates;
        candidates.clear();
        candidates.extend(
            values.iter().zip(0..).filter(|(v, _)| live(**v)).map(|(&logit, token)| Candidate { logit, token }),
        );
        if by_k && filters.top_k < candidates.len() {
            candidates.select_nth_unstable_by(filters.top_k - 1, rank);
            candidates.truncate(filters.top_k);
        }
        if by_p {
            let total: f64 = if by_k {
                candidates.iter().map(|c| f64::from((c.logit - max).exp())).sum()
            } else {
                values.iter().map(|v| f64::from((v - max).exp())).sum()
            };
            keep_top_p(candidates, max, filters.top_p * total);
        } else {
            candidates.sort_unstable_by(rank);
        }
        let kept = candidates.partition_point(|c| c.logit >= floor);
        candidates.truncate(kept.max(1));
        let candidates = std::mem::take(&mut self.candidates);
        let token = self.draw_from(candidates.iter().map(|c| (c.logit, c.token)), max, temperature, u);
        self.candidates = candidates;
        token
    }

    fn draw_from(
        &mut self,
        pairs: impl Iterator<Item = (f32, Token)> + Clone,
        max: f32,
        temperature: f32,
        u: f64,
    ) -> Token {
        self.weights.clear();
        self.weights.extend(pairs.clone().map(|(logit, _)| ((logit - max) / temperature).exp()));
        let total: f64 = self.weights.iter().map(|w| f64::from(*w)).sum();
        let target = u * total;
        let mut sum = 0f64;
        let mut last = 0;
        for (&weight, (_, token)) in self.weights.iter().zip(pairs) {
            if weight > 0.0 {
                sum += f64::from(weight);
                last = token;
                if sum > target {
                    break;
                }
            }
        }
        last
    }
}

/// Sorts as much of `candidates` as is needed to reach `mass` and drops the rest; keeps at least one.
fn keep_top_p(candidates: &mut Vec<Candidate>, max: f32, mass: f64) {
    let mut sum = 0f64;
    let mut start = 0;
    let mut block = 128;
    while start < candidates.len() {
        let end = (start + block).min(candidates.len());
        if end < candidates.len() {
            candidates[start..].select_nth_unstable_by(end - start - 1, rank);
        }
        candidates[start..end].sort_unstable_by(rank);
        for i in start..end {
            sum += f64::from((candidates[i].logit - max).exp());
            if sum >= mass {
                candidates.truncate(i + 1);
                return;
            }
        }
        start = end;
        block *= 8;
    }
}
