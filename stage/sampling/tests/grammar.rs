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

#[test]
fn what_was_checked_is_not_compiled_again() {
    let factory = factory();
    let one = spec(object(json!({"a": {"enum": ["red"]}, "b": {"type": "integer"}})));
    let other = spec(object(json!({"b": {"type": "integer"}, "a": {"enum": ["red"]}})));
    assert!(!factory.is_compiled(&one));
    factory.check(&one).unwrap();
    assert!(factory.clone().is_compiled(&one));
    // The order of properties is the order in the text, where the build keeps it.
    let sorted = json!({"b": 1, "a": 2}).to_string().starts_with("{\"a\"");
    assert_eq!(factory.is_compiled(&other), sorted);
    // A refusal is not kept.
    let bad = spec(json!({"type": "no-such-type"}));
    factory.check(&bad).unwrap_err();
    assert!(!factory.is_compiled(&bad));
}

#[test]
fn sessions_of_one_compiled_grammar_do_not_touch_each_other() {
    let factory = factory();
    let config = config(spec(object(json!({"a": {"enum": ["red", "blue"]}}))));
    let mut one = SessionSampler::new(config.clone(), Some(&factory)).unwrap();
    let mut two = SessionSampler::new(config.clone(), Some(&factory)).unwrap();
    let text = b"{\"a\":\"red\"}";
    for (i, byte) in text.iter().enumerate() {
        one.commit(i as i32, i32::from(*byte)).unwrap();
    }
    // The first is at its end; the second still at its beginning, where nothing but `{` is allowed.
    let at = text.len() as i32 - 1;
    assert!([EOS, END_OF_TURN].contains(&one.sample(at, &noise(at, 1), false).unwrap().token));
    two.commit(0, i32::from(b'x')).unwrap();
    assert!(matches!(two.sample(0, &noise(0, 1), false), Err(SamplingError::OffGrammar { position: 0 })));
}

#[test]
fn only_so_many_grammars_are_kept() {
    let factory = factory();
    let grammars: Vec<GrammarSpec> = (0..70).map(|i| spec(json!({"const": i}))).collect();
    for grammar in &grammars[..64] {
        factory.check(grammar).unwrap();
    }
    assert!(factory.is_compiled(&grammars[0]), "used last now");
    for grammar in &grammars[64..] {
        factory.check(grammar).unwrap();
    }
    let kept: Vec<usize> = (0..70).filter(|i| factory.is_compiled(&grammars[*i])).collect();
    assert_eq!(kept, std::iter::once(0).chain(7..70).collect::<Vec<_>>());
}

#[test]
fn what_would_take_too_long_or_too_much_stack_is_refused_or_answered() {
    let factory = factory();
    let properties = |n: usize| (0..n).map(|i| (format!("p{i}"), json!(true))).collect::<serde_json::Map<_, _>>();
    let wide = json!({"type": "object", "properties": properties(10_000), "additionalProperties": false});
    let counts = json!({"type": "array", "items": {"type": "string"}, "minItems": 100_000_000});
    let steps = json!({"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]});
    for schema in [wide, counts, json!({"type": "integer", "multipleOf": 1_000_003}), steps] {
        assert!(matches!(factory.check(&spec(schema)), Err(SamplingError::InvalidGrammar { .. })));
    }
    // As deep as the bounds allow: on a small stack the compiler would fall through.
    let deep = |n: usize, link: &dyn Fn(String) -> Value| {
        let mut defs: serde_json::Map<_, _> =
            (0..n).map(|i| (format!("d{i}"), link(format!("#/$defs/d{}", i + 1)))).collect();
        defs.insert(format!("d{n}"), json!({"type": "boolean"}));
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    };
    let caller = std::thread::Builder::new().stack_size(512 << 10);
    let answered = caller.spawn(move || {
        factory.check(&spec(deep(2900, &|next| json!({"$ref": next})))).unwrap();
        factory.check(&spec(deep(700, &|next| object(json!({"x": {"$ref": next}}))))).unwrap();
        let list = properties(500);
        factory.check(&spec(json!({"type": "object", "properties": list, "additionalProperties": false}))).unwrap();
    });
    answered.unwrap().join().unwrap();
}

#[test]
fn refusals_are_in_words_for_those_who_wrote_the_grammar() {
    let factory = factory();
    let patterns: Vec<Value> = ('a'..'m').map(|c| json!({"pattern": format!("^.*{c}.*$")})).collect();
    let table = [
        (json!({"oneOf": [{"const": 1}, {"const": 2}]}), "`oneOf` is not supported; use `anyOf`"),
        (json!({"type": "object", "propertyNames": {}, "if": {}}), "these keywords are not supported: \"if\", "),
        (json!({"type": "no-such-type"}), "Invalid type: no-such-type"),
        (json!({"type": "string", "pattern": "(["}), "a regular expression cannot be read: unclosed character class"),
        (json!({"type": "string", "pattern": "^(?=a)"}), "a regular expression cannot be read: look-around"),
        (json!({"type": "string", "format": "no-such-format"}), "Unknown format: no-such-format"),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), "no value can match it: minLength (3) is greater"),
        (json!({"type": "string", "minLength": -3}), "Expected positive integer for 'minLength'"),
        (json!({"type": "string", "pattern": "^a$", "minLength": 3}), "no value can match it"),
        (json!({"$ref": "#"}), "no text can match it"),
        (json!({"$ref": "http://127.0.0.1/x.json"}), "`$ref` must lead to a place in the schema itself"),
        (json!({"$ref": "#/$defs/missing"}), "Reference segment '$defs' not found"),
        (json!({"type": "number", "minimum": -1e308, "maximum": 1e-308}), "the bounds of a number"),
        (json!({"type": "object", "properties": 5}), "properties must be an object"),
        (json!({"allOf": vec![json!({"properties": {"a": {}}}); 950]}), "too complex"),
        (json!({"type": "string", "allOf": patterns}), "`pattern`s hold at once"),
    ];
    let mut wrong = Vec::new();
    for (schema, words) in table {
        match factory.check(&spec(schema.clone())) {
            Err(SamplingError::InvalidGrammar { reason, .. })
                if reason.contains(words) && !reason.contains(['\n', '<', '>']) => {}
            other => wrong.push(format!("{words}: {other:?}")),
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
