//! The sampler against a plain implementation that sorts everything.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use splitmodel_sampling::{GenerationConfig, SamplingError, SessionSampler, Token};

/// What the sampler must do, written for reading.
struct Naive<'a> {
    config: &'a GenerationConfig,
    rows: &'a [Token],
}

impl Naive<'_> {
    fn biased(&self, logits: &[f32]) -> Vec<f32> {
        let mut values = logits.to_vec();
        for &(token, bias) in &self.config.logit_bias {
            values[token as usize] += if bias <= -100.0 { f32::NEG_INFINITY } else { bias };
        }
        values
    }

    fn penalised(&self, logits: &[f32]) -> Vec<f32> {
        let c = self.config;
        let mut values = self.biased(logits);
        let window = if c.penalty_last_n < 0 { self.rows.len() } else { c.penalty_last_n as usize };
        let recent = &self.rows[self.rows.len() - window.min(self.rows.len())..];
        let generated = &self.rows[(c.prompt_tokens as usize).min(self.rows.len())..];
        for (token, value) in values.iter_mut().enumerate() {
            if recent.contains(&(token as Token)) {
                *value = if *value > 0.0 { *value / c.repeat_penalty } else { *value * c.repeat_penalty };
            }
            let count = generated.iter().filter(|t| **t == token as Token).count();
            if count > 0 {
                *value -= c.presence_penalty + c.frequency_penalty * count as f32;
            }
        }
        values
    }

    fn ranked(values: &[f32]) -> Vec<(Token, f32)> {
        let mut all: Vec<_> =
            values.iter().enumerate().map(|(t, v)| (t as Token, *v)).filter(|(_, v)| v.is_finite()).collect();
        all.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0)));
        all
    }

    /// The candidates left by the filters, in the order in which the draw walks them.
    fn kept(&self, logits: &[f32]) -> Vec<(Token, f32)> {
        let c = self.config;
        let mut list = Self::ranked(&self.penalised(logits));
        let max = list[0].1;
        if c.top_k > 0 {
            list.truncate(c.top_k as usize);
        }
        let min_p_keeps = list.iter().take_while(|(_, v)| c.min_p == 0.0 || *v >= max + c.min_p.ln()).count();
        if c.top_p < 1.0 {
            let total: f64 = list.iter().map(|(_, v)| f64::from((v - max).exp())).sum();
            let mut sum = 0.0;
            let cut = list.iter().position(|(_, v)| {
                sum += f64::from((v - max).exp());
                sum >= f64::from(c.top_p) * total
            });
            list.truncate(cut.map_or(list.len(), |i| i + 1));
        }
        list.truncate(min_p_keeps.max(1));
        if (c.top_k == 0 || c.top_k as usize >= logits.len()) && c.top_p >= 1.0 && c.min_p == 0.0 {
            list.sort_by_key(|(t, _)| *t);
        }
        list
    }

    fn log_probs(&self, logits: &[f32]) -> Vec<f64> {
        let values = self.biased(logits);
        let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = values.iter().map(|v| f64::from(v - max).exp()).sum();
        values.iter().map(|v| f64::from(v - max) - sum.ln()).collect()
    }
}

/// The random number of a position, as a stage of another build must have it.
fn uniform(seed: u64, position: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    let golden = 0x9e37_79b9_7f4a_7c15u64;
    let key = mix(seed.wrapping_add(golden));
    let bits = mix(mix(key ^ (position + 1).wrapping_mul(golden)).wrapping_add(key));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

const VOCAB: usize = 300;

fn config() -> impl Strategy<Value = GenerationConfig> {
    let bias =
        prop::collection::btree_map(0..VOCAB as Token, prop_oneof![Just(-100f32), Just(100f32), -5f32..5.0], 0..6);
    let penalties = (
        prop_oneof![Just(1f32), 0.5f32..2.0],
        prop_oneof![Just(0f32), -2f32..2.0],
        prop_oneof![Just(0f32), -2f32..2.0],
        prop_oneof![Just(-1), 0..20i32],
    );
    let filters = (
        prop_oneof![Just(0u32), 1..400u32],
        prop_oneof![Just(1f32), 0f32..1.0],
        prop_oneof![Just(0f32), 0f32..1.0],
        prop_oneof![Just(0f32), 0.01f32..3.0],
    );
    (bias, penalties, filters, any::<u64>(), 0..12u32, 0..5u8).prop_map(
        |(bias, (repeat_penalty, presence_penalty, frequency_penalty, penalty_last_n), f, seed, prompt_tokens, top)| {
            GenerationConfig {
                prompt_tokens,
                seed,
                temperature: f.3,
                top_k: f.0,
                top_p: f.1,
                min_p: f.2,
                repeat_penalty,
                presence_penalty,
                frequency_penalty,
                penalty_last_n,
                logit_bias: bias.into_iter().collect(),
                top_logprobs: top,
                ..GenerationConfig::default()
            }
        },
    )
}

/// Coarse steps make ties; −∞ stands for what a model masks itself.
fn logits() -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(
        prop_oneof![8 => -12f32..12.0, 2 => (-20..20i32).prop_map(|v| v as f32 / 4.0), 1 => Just(f32::NEG_INFINITY)],
        VOCAB,
    )
}

fn rows() -> impl Strategy<Value = Vec<Token>> {
    prop::collection::vec(0..VOCAB as Token, 1..40)
}

fn sampler(config: &GenerationConfig, rows: &[Token]) -> SessionSampler {
    let mut sampler = SessionSampler::new(config.clone(), None).unwrap();
    for (position, token) in rows.iter().enumerate() {
        sampler.commit(position as i32, *token).unwrap();
    }
    sampler
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn token_is_the_reference_token(config in config(), logits in logits(), rows in rows()) {
        let naive = Naive { config: &config, rows: &rows };
        let got = sampler(&config, &rows).sample(rows.len() as i32 - 1, &logits, false).unwrap();
        let kept = naive.kept(&logits);
        if config.temperature == 0.0 {
            prop_assert_eq!(got.token, Naive::ranked(&naive.penalised(&logits))[0].0);
            return Ok(());
        }
        let max = kept.iter().map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max);
        let weight = |v: f32| f64::from(((v - max) / config.temperature).exp());
        let total: f64 = kept.iter().map(|(_, v)| weight(*v)).sum();
        let mut left = uniform(config.seed, rows.len() as u64) * total;
        let at = kept.iter().position(|(_, v)| {
            left -= weight(*v);
            left < 0.0
        });
        // A number on the very border of two intervals may fall to either side.
        if left.abs() > 1e-9 * total {
            prop_assert_eq!(got.token, kept[at.unwrap()].0);
        }
        prop_assert!(got.logprob.is_nan() && got.entropy.is_nan() && got.top.is_empty());
    }

    #[test]
    fn log_probabilities_are_the_reference_ones(config in config(), logits in logits(), rows in rows()) {
        let naive = Naive { config: &config, rows: &rows };
        let got = sampler(&config, &rows).sample(rows.len() as i32 - 1, &logits, true).unwrap();
        let expected = naive.log_probs(&logits);
        prop_assert!((f64::from(got.logprob) - expected[got.token as usize]).abs() < 1e-4);
        let entropy: f64 = expected.iter().filter(|l| l.is_finite()).map(|l| -l.exp() * l).sum();
        prop_assert!((f64::from(got.entropy) - entropy).abs() < 1e-4);
        let ranked = Naive::ranked(&naive.biased(&logits));
        prop_assert_eq!(got.margin, ranked[0].1 - ranked[1].1);
        prop_assert_eq!(got.top.len(), usize::from(config.top_logprobs));
        for ((token, logprob), (t, _)) in got.top.iter().zip(&ranked) {
            prop_assert_eq!(token, t);
            prop_assert!((f64::from(*logprob) - expected[*t as usize]).abs() < 1e-4);
        }
    }

    #[test]
    fn going_back_equals_never_having_gone(
        config in config(), logits in logits(), rows in rows(), other in rows(), at in any::<prop::sample::Index>(),
    ) {
        let cut = at.index(rows.len() + 1);
        let mut used = sampler(&config, &rows);
        used.sample(rows.len() as i32 - 1, &logits, true).unwrap();
        used.truncate(cut as i32).unwrap();
        prop_assert_eq!(used.next_position(), cut as i32);
        let mut text = rows[..cut].to_vec();
        for token in other {
            used.commit(text.len() as i32, token).unwrap();
            text.push(token);
        }
        // Recommitting below the end goes back by itself.
        let again = cut.min(text.len() - 1);
        used.commit(again as i32, 5).unwrap();
        text.truncate(again);
        text.push(5);
        let mut fresh = sampler(&config, &text);
        let last = text.len() as i32 - 1;
        prop_assert_eq!(used.sample(last, &logits, false).unwrap().token, fresh.sample(last, &logits, false).unwrap().token);
        prop_assert_eq!(
            format!("{:?}", used.sample(last, &logits, true).unwrap()),
            format!("{:?}", fresh.sample(last, &logits, true).unwrap())
        );
    }

    #[test]
    fn rebuilt_from_history_equals_continuous(
        config in config(), logits in logits(), rows in rows(), at in any::<prop::sample::Index>(),
    ) {
        let cut = at.index(rows.len() + 1);
        let rebuilt_config = GenerationConfig { history: rows[..cut].to_vec(), ..config.clone() };
        let mut rebuilt = SessionSampler::new(rebuilt_config, None).unwrap();
        for (position, token) in rows.iter().enumerate().skip(cut) {
            rebuilt.commit(position as i32, *token).unwrap();
        }
        let last = rows.len() as i32 - 1;
        let expected = sampler(&config, &rows).sample(last, &logits, true).unwrap();
        prop_assert_eq!(format!("{:?}", rebuilt.sample(last, &logits, true).unwrap()), format!("{expected:?}"));
    }

    #[test]
    fn any_logits_and_rows_give_a_token_or_an_error(
        config in config(), bits in prop::collection::vec(any::<u32>(), 0..40), rows in rows(),
    ) {
        let logits: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        match sampler(&config, &rows).sample(rows.len() as i32 - 1, &logits, true) {
            Ok(sample) => {
                prop_assert!(logits[sample.token as usize] > f32::NEG_INFINITY);
                prop_assert!(logits.iter().all(|v| !v.is_nan() && *v < f32::INFINITY));
            }
            Err(SamplingError::BadLogit { token, .. }) => prop_assert!(logits[token].is_nan() || logits[token] > 1e30),
            Err(SamplingError::NothingAllowed { .. } | SamplingError::BiasOutsideVocabulary { .. }) => {}
            Err(other) => prop_assert!(false, "{other}"),
        }
    }
}

/// Over many positions each candidate is drawn as often as the reference's distribution says, and nothing else is.
#[test]
fn draws_follow_the_distribution() {
    let logits: Vec<f32> = (0..VOCAB).map(|i| ((i * 7919) % 97) as f32 / 12.0).collect();
    let base = GenerationConfig { temperature: 0.8, ..GenerationConfig::default() };
    let variants = [
        base.clone(),
        GenerationConfig { top_k: 12, seed: 1, ..base.clone() },
        GenerationConfig { top_p: 0.4, seed: 2, ..base.clone() },
        GenerationConfig { min_p: 0.3, seed: 3, ..base.clone() },
        GenerationConfig { top_k: 40, top_p: 0.8, min_p: 0.05, seed: 4, temperature: 1.7, ..base.clone() },
        GenerationConfig { logit_bias: vec![(3, 2.0), (96, -100.0)], top_k: 20, seed: 5, ..base },
    ];
    const DRAWS: i32 = 40_000;
    for config in variants {
        let mut sampler = SessionSampler::new(config.clone(), None).unwrap();
        let mut counts = vec![0u32; VOCAB];
        for position in 0..DRAWS {
            sampler.commit(position, 0).unwrap();
            counts[sampler.sample(position, &logits, false).unwrap().token as usize] += 1;
        }
        let kept = Naive { config: &config, rows: &[] }.kept(&logits);
        let weights: Vec<f64> =
            kept.iter().map(|(_, v)| (f64::from(*v) / f64::from(config.temperature)).exp()).collect();
        let total: f64 = weights.iter().sum();
        let (mut chi, mut cells, mut drawn) = (0.0, 0.0, 0);
        for ((token, _), weight) in kept.iter().zip(&weights) {
            let expected = weight / total * f64::from(DRAWS);
            let count = counts[*token as usize];
            drawn += count;
            if expected >= 5.0 {
                chi += (f64::from(count) - expected).powi(2) / expected;
                cells += 1.0;
            }
        }
        assert_eq!(drawn, DRAWS as u32, "a token outside the candidates was drawn: {config:?}");
        // Four standard deviations of χ².
        assert!(chi < cells + 4.0 * f64::sqrt(2.0 * cells) + 4.0, "χ² {chi} over {cells} cells: {config:?}");
    }
}

/// The draw is a function of seed and position only, whatever was drawn before.
#[test]
fn draws_depend_on_seed_and_position_only() {
    let logits: Vec<f32> = (0..50).map(|i| (i % 7) as f32).collect();
    let config = GenerationConfig { seed: 42, ..GenerationConfig::default() };
    let text = |mut sampler: SessionSampler, from: i32, until: i32| -> Vec<Token> {
        (from..until)
            .map(|position| {
                sampler.commit(position, 1).unwrap();
                sampler.sample(position, &logits, false).unwrap().token
            })
            .collect()
    };
    let whole = text(SessionSampler::new(config.clone(), None).unwrap(), 0, 60);
    let half = GenerationConfig { history: vec![1; 30], ..config.clone() };
    assert_eq!(text(SessionSampler::new(half, None).unwrap(), 30, 60), whole[30..]);
    let other = text(SessionSampler::new(GenerationConfig { seed: 43, ..config }, None).unwrap(), 0, 60);
    assert_ne!(other, whole);
}
