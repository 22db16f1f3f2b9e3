//! Grammars over a byte-level vocabulary.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::{Value, json};
use splitmodel_sampling::{GenerationConfig, GrammarFactory, GrammarSpec, SamplingError, SessionSampler, Token};

const EOS: Token = 256;
const END_OF_TURN: Token = 257;

/// All bytes, two end tokens, a control token without a piece, some merges (one ends inside a character).
fn pieces() -> Vec<Vec<u8>> {
    let mut pieces: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
    pieces.extend([b"</s>".to_vec(), b"<|end|>".to_vec(), Vec::new()]);
    pieces.extend(
        ["{\"", "\":", "\"}", "red", "blue", " ", "  ", "\n", "true", "the sea"].map(|s| s.as_bytes().to_vec()),
    );
    pieces.push("🎉".as_bytes()[..3].to_vec());
    pieces.push(vec![b' '; 2000]);
    pieces
}

fn factory() -> GrammarFactory {
    GrammarFactory::new(pieces(), &[EOS, END_OF_TURN]).unwrap()
}

fn spec(schema: Value) -> GrammarSpec {
    GrammarSpec::JsonSchema(schema)
}

fn object(properties: Value) -> Value {
    let required: Vec<_> = properties.as_object().unwrap().keys().cloned().collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// Deterministic logits that differ by position: a model that knows nothing of the grammar.
fn noise(position: i32, seed: u64) -> Vec<f32> {
    let mut state = seed ^ (position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..pieces().len() + 5)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1u64 << 22) as f32
        })
        .collect()
}

struct Run {
    tokens: Vec<Token>,
    text: String,
    ended: bool,
}

/// Generates after a prompt of two tokens until an end token or `limit`.
fn generate(config: &GenerationConfig, seed: u64, limit: usize) -> Run {
    let config = GenerationConfig { prompt_tokens: 2, ..config.clone() };
    let mut sampler = SessionSampler::new(config, Some(&factory())).unwrap();
    sampler.commit(0, 258).unwrap();
    sampler.commit(1, 120).unwrap();
    let mut run = Run { tokens: vec![], text: String::new(), ended: false };
    let mut bytes = Vec::new();
    for position in 1..1 + limit as i32 {
        let sample = sampler.sample(position, &noise(position, seed), true).unwrap();
        assert!(sample.logprob.is_finite());
        run.tokens.push(sample.token);
        if [EOS, END_OF_TURN].contains(&sample.token) {
            run.ended = true;
            break;
        }
        bytes.extend_from_slice(&pieces()[sample.token as usize]);
        sampler.commit(position + 1, sample.token).unwrap();
    }
    run.text = String::from_utf8_lossy(&bytes).into_owned();
    run
}

fn config(grammar: GrammarSpec) -> GenerationConfig {
    GenerationConfig { grammar: Some(grammar), temperature: 0.0, ..GenerationConfig::default() }
}

#[test]
fn an_enum_with_emoji_is_forced() {
    let values = ["🎉👩‍👩‍👧‍👦🇯🇵✅🚀", "grün", "日本"];
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..30 {
        for temperature in [0.0, 2.0] {
            let grammar = spec(object(json!({"colour": {"type": "string", "enum": values}})));
            let run = generate(&GenerationConfig { temperature, seed, ..config(grammar) }, seed, 300);
            assert!(run.ended, "{}", run.text);
            let value: Value = serde_json::from_str(&run.text).unwrap();
            let colour = value["colour"].as_str().unwrap().to_owned();
            assert!(values.contains(&colour.as_str()), "{colour}");
            seen.insert(colour);
        }
    }
    assert_eq!(seen.len(), values.len());
}

#[test]
fn schemas_are_enforced_and_end() {
    let schemas = [
        object(json!({"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}})),
        object(json!({"a": object(json!({"b": object(json!({"c": {"type": "boolean"}}))}))})),
        object(json!({"xs": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}})),
        object(json!({"code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}})),
        object(json!({"v": {"anyOf": [{"type": "null"}, {"enum": ["on", "off"]}]}})),
        object(json!({"s": {"type": "string", "minLength": 2, "maxLength": 5}})),
    ];
    for schema in schemas {
        for seed in 0..5 {
            let run = generate(&config(spec(schema.clone())), seed, 400);
            assert!(run.ended, "{schema}: {}", run.text);
            let value: Value = serde_json::from_str(&run.text).unwrap();
            let wanted: Vec<_> = schema["properties"].as_object().unwrap().keys().collect();
            assert_eq!(value.as_object().unwrap().keys().collect::<Vec<_>>(), wanted, "{}", run.text);
        }
    }
}

#[test]
fn regex_and_lark_are_enforced() {
    let run = generate(&config(GrammarSpec::Regex("(yes|no)-[0-9]{2}".into())), 3, 50);
    assert!(run.ended && (run.text.starts_with("yes-") || run.text.starts_with("no-")), "{}", run.text);
    let run = generate(&config(GrammarSpec::Lark("start: \"red\" | \"blue\"".into())), 4, 50);
    assert!(run.ended && ["red", "blue"].contains(&run.text.as_str()), "{}", run.text);
    let run = generate(&config(GrammarSpec::JsonObject), 5, 60);
    assert!(run.text.trim_start().starts_with('{'), "{}", run.text);
}

#[test]
fn white_space_is_bounded() {
    // A model that wants nothing but blanks.
    let schema = object(json!({"a": {"type": "boolean"}, "b": {"type": "boolean"}}));
    let settings = GenerationConfig { prompt_tokens: 1, history: vec![258], ..config(spec(schema)) };
    let mut sampler = SessionSampler::new(settings, Some(&factory())).unwrap();
    let mut logits = noise(0, 0);
    let is_blank = |piece: &Vec<u8>| piece.iter().all(u8::is_ascii_whitespace);
    pieces().iter().enumerate().filter(|(_, p)| is_blank(p)).for_each(|(i, _)| logits[i] = 50.0);
    let mut text = Vec::new();
    for position in 0..400 {
        let token = sampler.sample(position, &logits, false).unwrap().token;
        if [EOS, END_OF_TURN].contains(&token) {
            break;
        }
        text.extend_from_slice(&pieces()[token as usize]);
        sampler.commit(position + 1, token).unwrap();
    }
    let text = String::from_utf8(text).unwrap();
    assert!(serde_json::from_str::<Value>(&text).is_ok(), "{text}");
}

#[test]
fn broken_and_unsupported_schemas_are_refused_with_the_reason() {
    let factory = factory();
    let bad = [
        json!({"type": "no-such-type"}),
        json!({"$ref": "#/$defs/missing"}),
        json!({"type": "object", "properties": 5}),
        object(json!({"s": {"type": "string", "pattern": "(["}})),
        object(json!({"s": {"type": "string", "pattern": "^(?=.*[0-9])[a-z0-9]{3}$"}})),
        object(json!({"xs": {"type": "array", "items": {"enum": ["x"]}, "minItems": 2, "uniqueItems": true}})),
        object(json!({"s": {"enum": ["a", "b"], "not": {"const": "a"}}})),
        // Switching enforcement off is not the caller's choice.
        json!({"type": "object", "uniqueItems": true, "not": {}, "x-guidance": {"lenient": true}}),
        json!(true),
        json!([1]),
    ];
    for schema in bad {
        match factory.check(&spec(schema.clone())) {
            Err(SamplingError::InvalidGrammar { kind: "JSON schema", reason }) => {
                assert!(!reason.is_empty() && !reason.contains("backtrace"), "{schema}: {reason}");
            }
            other => panic!("{schema}: {other:?}"),
        }
    }
    for (grammar, kind) in [
        (GrammarSpec::Regex("(".into()), "regular expression"),
        (GrammarSpec::Lark("start: nope".into()), "Lark grammar"),
    ] {
        match factory.check(&grammar) {
            Err(SamplingError::InvalidGrammar { kind: k, .. }) => assert_eq!(k, kind),
            other => panic!("{grammar:?}: {other:?}"),
        }
    }
    assert_eq!(factory.check(&GrammarSpec::JsonObject), Ok(()));
}

#[test]
fn deep_schemas_do_not_bring_the_process_down() {
    let mut schema = json!({"type": "boolean"});
    for _ in 0..100 {
        schema = object(json!({"a": schema}));
    }
    // Enforced or refused, but answered.
    drop(factory().check(&spec(schema)));
}

#[test]
fn a_draft_outside_the_grammar_can_be_taken_back() {
    let factory = factory();
    let history = vec![258];
    let settings = GenerationConfig { prompt_tokens: 1, history, ..config(GrammarSpec::Regex("ab+c".into())) };
    let mut sampler = SessionSampler::new(settings, Some(&factory)).unwrap();
    sampler.commit(1, i32::from(b'a')).unwrap();
    sampler.commit(2, i32::from(b'z')).unwrap();
    sampler.commit(3, i32::from(b'z')).unwrap();
    assert_eq!(sampler.sample(3, &noise(3, 0), false), Err(SamplingError::OffGrammar { position: 2 }));
    sampler.commit(2, i32::from(b'b')).unwrap();
    let next = sampler.sample(2, &noise(2, 0), false).unwrap();
    assert!([i32::from(b'b'), i32::from(b'c')].contains(&next.token) && !next.grammar_end);
    sampler.commit(3, i32::from(b'c')).unwrap();
    let end = sampler.sample(3, &noise(3, 0), false).unwrap();
    assert!(end.grammar_end && [EOS, END_OF_TURN].contains(&end.token));
    // The end taken, then taken back.
    sampler.commit(4, END_OF_TURN).unwrap();
    assert!(sampler.sample(4, &noise(4, 0), false).unwrap().grammar_end);
    sampler.commit(5, i32::from(b'x')).unwrap();
    assert_eq!(sampler.sample(5, &noise(5, 0), false), Err(SamplingError::OffGrammar { position: 5 }));
    sampler.truncate(3).unwrap();
    assert_eq!(sampler.sample(2, &noise(2, 0), false).unwrap().token, next.token);
}

#[test]
fn a_ban_does_not_outlast_the_grammar() {
    let bans = vec![(EOS, -100.0), (END_OF_TURN, -100.0)];
    let run = generate(&GenerationConfig { logit_bias: bans, ..config(GrammarSpec::Regex("ab".into())) }, 1, 10);
    assert!(run.ended && run.text == "ab");
    let banned =
        GenerationConfig { logit_bias: vec![(i32::from(b'b'), -100.0)], ..config(GrammarSpec::Regex("ab".into())) };
    let mut sampler =
        SessionSampler::new(GenerationConfig { history: vec![i32::from(b'a')], ..banned }, Some(&factory())).unwrap();
    assert_eq!(sampler.sample(0, &noise(0, 0), false), Err(SamplingError::NothingAllowed { position: 0 }));
}

#[test]
fn a_sessions_own_end_tokens_end_too() {
    let settings = GenerationConfig {
        eog: vec![i32::from(b'!')],
        history: vec![i32::from(b'a')],
        ..config(GrammarSpec::Regex("ab?".into()))
    };
    let mut sampler = SessionSampler::new(settings, Some(&factory())).unwrap();
    let mut logits = vec![0f32; pieces().len()];
    logits[usize::from(b'!')] = 9.0;
    assert_eq!(sampler.sample(0, &logits, false).unwrap().token, i32::from(b'!'));
    sampler.commit(1, i32::from(b'!')).unwrap();
    assert!(sampler.sample(1, &logits, false).unwrap().grammar_end);
}

#[test]
fn unusable_vocabularies_are_refused() {
    for (pieces, eog) in [
        (vec![], vec![]),
        (vec![vec![b'a']], vec![]),
        (vec![vec![b'a']], vec![1]),
        (vec![vec![b'a']], vec![-1]),
        (vec![vec![b'a'; 900]; 5000], vec![0]),
    ] {
        assert!(matches!(GrammarFactory::new(pieces, &eog), Err(SamplingError::InvalidVocabulary(_))));
    }
    // Equal and empty pieces are common in real vocabularies.
    GrammarFactory::new(vec![vec![], vec![b'a'], vec![b'a'], vec![]], &[3]).unwrap();
}

fn is_shared<T: Send + Sync + Clone>() {}

#[test]
fn factories_are_shared_and_samplers_move() {
    is_shared::<GrammarFactory>();
    fn moves<T: Send>() {}
    moves::<SessionSampler>();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Going back anywhere and rebuilding from any cut give the tokens of the undisturbed run.
    #[test]
    fn rollback_and_rebuild_change_nothing(seed in any::<u64>(), back in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>()) {
        let schema = object(json!({
            "xs": {"type": "array", "items": {"enum": ["é", "red", 12]}, "minItems": 1, "maxItems": 4},
            "v": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 500}]}
        }));
        let settings = GenerationConfig { temperature: 1.5, seed, prompt_tokens: 2, repeat_penalty: 1.1, ..config(spec(schema)) };
        let whole = generate(&settings, seed, 200);
        prop_assert!(whole.ended);
        let rows: Vec<Token> = [258, 120].into_iter().chain(whole.tokens.iter().copied()).collect();
        let check = |sampler: &mut SessionSampler, from: usize| {
            for position in from.max(1)..rows.len() - 1 {
                let sample = sampler.sample(position as i32, &noise(position as i32, seed), false).unwrap();
                assert_eq!(sample.token, rows[position + 1]);
                sampler.commit(position as i32 + 1, sample.token).unwrap();
            }
        };
        // Rebuilt.
        let cut = 2 + cut.index(rows.len() - 2);
        let history = GenerationConfig { history: rows[..cut].to_vec(), ..settings };
        let mut sampler = SessionSampler::new(history, Some(&factory())).unwrap();
        check(&mut sampler, cut - 1);
        // Taken back from the very end, end token included, past a wrong draft.
        let back = 2 + back.index(rows.len() - 2);
        sampler.truncate(back as i32).unwrap();
        sampler.commit(back as i32, i32::from(b'~')).unwrap();
        sampler.truncate(back as i32).unwrap();
        check(&mut sampler, back - 1);
    }
}
