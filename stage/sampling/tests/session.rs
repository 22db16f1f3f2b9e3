//! Rows, biases, ties and refusals.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use splitmodel_sampling::{GenerationConfig, GrammarSpec, SamplingError, SessionSampler};

fn greedy() -> GenerationConfig {
    GenerationConfig { temperature: 0.0, ..GenerationConfig::default() }
}

fn with_row(config: GenerationConfig) -> SessionSampler {
    let mut sampler = SessionSampler::new(config, None).unwrap();
    sampler.commit(0, 1).unwrap();
    sampler
}

#[test]
fn lowest_id_wins_ties() {
    let sample = with_row(greedy()).sample(0, &[1.0, 3.0, 3.0, 3.0], true).unwrap();
    assert_eq!((sample.token, sample.margin), (1, 0.0));
    assert_eq!(with_row(greedy()).sample(0, &[-0.0, 0.0, -0.0], false).unwrap().token, 0);
}

#[test]
fn bias_bans_and_forces() {
    let banned = GenerationConfig { logit_bias: vec![(1, -100.0)], top_logprobs: 5, ..greedy() };
    let sample = with_row(banned).sample(0, &[1.0, 90.0, 0.5], true).unwrap();
    assert_eq!(sample.token, 0);
    assert_eq!(sample.top.iter().map(|t| t.0).collect::<Vec<_>>(), [0, 2], "a banned token is no alternative");
    let logits: Vec<f32> = (0..50_000).map(|i| (i % 40) as f32).collect();
    let forced = GenerationConfig { logit_bias: vec![(7, 100.0)], temperature: 2.0, top_logprobs: 1, ..greedy() };
    let mut sampler = with_row(forced);
    for seed_position in 1..200 {
        sampler.commit(seed_position, 7).unwrap();
        let sample = sampler.sample(seed_position, &logits, true).unwrap();
        assert_eq!(sample.token, 7);
        assert!(sample.logprob > -1e-6 && sample.logprob <= 0.0);
        assert_eq!(sample.top[0], (7, sample.logprob));
    }
}

#[test]
fn everything_banned_is_an_error() {
    let bias = vec![(0, -100.0), (1, -100.0)];
    for temperature in [0.0, 1.0] {
        let config = GenerationConfig { logit_bias: bias.clone(), temperature, ..greedy() };
        assert_eq!(with_row(config).sample(0, &[1.0, 2.0], true), Err(SamplingError::NothingAllowed { position: 0 }));
    }
    assert_eq!(with_row(greedy()).sample(0, &[], false), Err(SamplingError::NothingAllowed { position: 0 }));
}

#[test]
fn unusable_logits_are_an_error() {
    for bad in [f32::NAN, f32::INFINITY] {
        for temperature in [0.0, 1.0] {
            let config = GenerationConfig { temperature, logit_bias: vec![(2, -100.0)], ..greedy() };
            let error = with_row(config).sample(0, &[1.0, 2.0, bad], false).unwrap_err();
            assert!(matches!(error, SamplingError::BadLogit { token: 2, position: 0, .. }), "{error}");
        }
    }
}

#[test]
fn penalties_see_what_they_should() {
    // Prompt 1 2, generated 3 3.
    let rows = [1, 2, 3, 3];
    let sample = |config: GenerationConfig, logits: &[f32]| {
        let mut sampler = SessionSampler::new(GenerationConfig { prompt_tokens: 2, ..config }, None).unwrap();
        rows.iter().enumerate().for_each(|(p, t)| sampler.commit(p as i32, *t).unwrap());
        sampler.sample(3, logits, false).unwrap().token
    };
    // Presence and frequency: generated tokens only.
    let presence = GenerationConfig { presence_penalty: 2.0, ..greedy() };
    assert_eq!(sample(presence.clone(), &[0.0, 5.0, 4.0, 5.5]), 1);
    assert_eq!(sample(presence, &[0.0, 0.0, 5.0, 7.5]), 3);
    let frequency = GenerationConfig { frequency_penalty: 1.0, ..greedy() };
    assert_eq!(sample(frequency.clone(), &[0.0, 5.0, 0.0, 7.5]), 3);
    assert_eq!(sample(frequency, &[0.0, 5.0, 0.0, 6.5]), 1);
    // Repeat: prompt too, as far as the window reaches.
    let repeat = GenerationConfig { repeat_penalty: 2.0, penalty_last_n: -1, ..greedy() };
    assert_eq!(sample(repeat.clone(), &[3.0, 5.0, 5.5, 5.5]), 0);
    assert_eq!(sample(GenerationConfig { penalty_last_n: 3, ..repeat.clone() }, &[3.0, 5.0, 5.5, 5.5]), 1);
    assert_eq!(sample(GenerationConfig { penalty_last_n: 0, ..repeat.clone() }, &[3.0, 5.0, 5.5, 5.5]), 2);
    assert_eq!(sample(repeat, &[-3.0, -2.0, -2.0, -2.0]), 0, "negative logits are multiplied");
}

#[test]
fn rows_must_follow_each_other() {
    let mut sampler = with_row(greedy());
    assert_eq!(sampler.commit(2, 0), Err(SamplingError::PositionGap { expected: 1, got: 2 }));
    assert_eq!(sampler.next_position(), 1, "a refused row changes nothing");
    assert_eq!(sampler.commit(-1, 0), Err(SamplingError::InvalidRow { position: -1, token: 0 }));
    assert_eq!(sampler.commit(1, -2), Err(SamplingError::InvalidRow { position: 1, token: -2 }));
    assert_eq!(sampler.sample(1, &[0.0], false), Err(SamplingError::NotTheLastRow { last: Some(0), got: 1 }));
    let mut empty = SessionSampler::new(greedy(), None).unwrap();
    assert_eq!(empty.sample(0, &[0.0], false), Err(SamplingError::NotTheLastRow { last: None, got: 0 }));
    assert_eq!(empty.commit(3, 0), Err(SamplingError::PositionGap { expected: 0, got: 3 }));
}

#[test]
fn media_rows_share_positions_and_jump() {
    let mut sampler = with_row(GenerationConfig { repeat_penalty: 2.0, ..greedy() });
    for _ in 0..4 {
        sampler.commit(1, -1).unwrap();
    }
    sampler.commit(5, 0).unwrap();
    assert_eq!(sampler.next_position(), 6);
    assert_eq!(sampler.sample(5, &[3.0, 3.0, 2.0], false).unwrap().token, 2);
    sampler.truncate(1).unwrap();
    assert_eq!(sampler.next_position(), 1);
}

#[test]
fn truncate_beyond_the_end_does_nothing() {
    let mut sampler = with_row(greedy());
    sampler.truncate(9).unwrap();
    assert_eq!(sampler.next_position(), 1);
    sampler.truncate(-5).unwrap();
    assert_eq!(sampler.next_position(), 0);
}

#[test]
fn extreme_temperatures_and_filters() {
    let logits = [1.0, 2.0, -3.0, 1.9];
    for config in [
        GenerationConfig { temperature: 1e-30, ..greedy() },
        GenerationConfig { temperature: 1000.0, top_p: 0.0, ..greedy() },
        GenerationConfig { temperature: 1.0, top_p: 1e-6, ..greedy() },
        GenerationConfig { temperature: 1.0, min_p: 1.0, ..greedy() },
        GenerationConfig { temperature: 1.0, top_k: 1, ..greedy() },
    ] {
        for seed in 0..50 {
            let config = GenerationConfig { seed, ..config.clone() };
            assert_eq!(with_row(config.clone()).sample(0, &logits, false).unwrap().token, 1, "{config:?}");
        }
    }
}

#[test]
fn configs_are_checked() {
    let bad = [
        ("temperature", GenerationConfig { temperature: -0.1, ..greedy() }),
        ("temperature", GenerationConfig { temperature: f32::NAN, ..greedy() }),
        ("top_p", GenerationConfig { top_p: 1.1, ..greedy() }),
        ("min_p", GenerationConfig { min_p: -0.1, ..greedy() }),
        ("repeat_penalty", GenerationConfig { repeat_penalty: 0.0, ..greedy() }),
        ("presence_penalty", GenerationConfig { presence_penalty: f32::INFINITY, ..greedy() }),
        ("frequency_penalty", GenerationConfig { frequency_penalty: f32::NAN, ..greedy() }),
        ("penalty_last_n", GenerationConfig { penalty_last_n: -2, ..greedy() }),
        ("prompt_tokens", GenerationConfig { prompt_tokens: u32::MAX, ..greedy() }),
        ("logit_bias", GenerationConfig { logit_bias: vec![(0, 101.0)], ..greedy() }),
        ("logit_bias", GenerationConfig { logit_bias: vec![(0, 1.0), (0, 2.0)], ..greedy() }),
        ("logit_bias", GenerationConfig { logit_bias: vec![(-1, 1.0)], ..greedy() }),
        ("eog", GenerationConfig { eog: vec![-1], ..greedy() }),
        ("history", GenerationConfig { history: vec![-2], ..greedy() }),
    ];
    for (name, config) in bad {
        match SessionSampler::new(config, None) {
            Err(SamplingError::InvalidConfig { field, .. }) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let grammar = GenerationConfig { grammar: Some(GrammarSpec::JsonObject), ..greedy() };
    assert_eq!(SessionSampler::new(grammar, None).unwrap_err(), SamplingError::NoGrammarFactory);
    let outside = GenerationConfig { logit_bias: vec![(9, 1.0)], ..greedy() };
    assert_eq!(
        with_row(outside).sample(0, &[0.0; 4], false),
        Err(SamplingError::BiasOutsideVocabulary { token: 9, vocab: 4 })
    );
}

#[test]
fn json_of_the_config() {
    let config = GenerationConfig {
        prompt_tokens: 3,
        grammar: Some(GrammarSpec::Regex("a+".into())),
        logit_bias: vec![(5, -100.0)],
        history: vec![1, -1],
        ..greedy()
    };
    let json = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<GenerationConfig>(&json).unwrap(), config);
    let short: GenerationConfig = serde_json::from_str(r#"{"seed": 7, "grammar": "json_object"}"#).unwrap();
    assert_eq!((short.seed, short.grammar), (7, Some(GrammarSpec::JsonObject)));
    assert!(
        serde_json::from_str::<GenerationConfig>(r#"{"mirostat": 2}"#).unwrap_err().to_string().contains("mirostat")
    );
}
