//! Bodies that are nearly requests, the same every run: each gets a whole answer or a typed refusal, never a 5xx.

use crate::support::{Server, bytes};
use serde_json::{Value, json};

const BODIES: usize = 5_000;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

fn seeds() -> Vec<(&'static str, Value)> {
    let function = json!({"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}});
    vec![
        (
            "/v1/chat/completions",
            json!({
                "model": "fake-model", "stream": true, "stream_options": {"include_usage": true},
                "messages": [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": [{"type": "text", "text": "Grüße 🎉"}], "name": "x"},
                    {"role": "assistant", "content": "ok"},
                    {"role": "user", "content": "go on"},
                ],
                "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7, "n": 2, "max_tokens": 5,
                "stop": ["x", "é"], "logit_bias": {"5": 1, "300": -100}, "logprobs": true, "top_logprobs": 2,
                "presence_penalty": 0.5, "frequency_penalty": -0.5, "repeat_penalty": 1.1, "repeat_last_n": 64,
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "model": "owner/alias", "messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 4,
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
                "tools": [{"type": "function", "function": function}], "tool_choice": "none", "user": "u",
                "chat_template_kwargs": {"a": [1, null]},
            }),
        ),
        (
            "/v1/completions",
            json!({
                "model": "fake-model", "prompt": ["a", "b"], "echo": true, "logprobs": 1, "best_of": 2, "n": 1,
                "max_tokens": 3, "stop": "q", "suffix": null, "stream": false,
            }),
        ),
        ("/v1/completions", json!({"model": "fake-model", "prompt": [[1, 2, 300], [65]], "stream": true})),
        ("/tokenize", json!({"content": "Hello", "add_special": true, "with_pieces": true})),
        ("/detokenize", json!({"tokens": [72, 300, 257]})),
    ]
}

fn odd(random: &mut Random) -> Value {
    let all = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1e308),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(0.1),
        json!(""),
        json!("\u{0}"),
        json!("{% for x in range(9) %}{{ x }}"),
        json!("<|im_end|>"),
        json!("x".repeat(700)),
        json!([]),
        json!({}),
        json!([[[[]]]]),
        json!({"type": "text"}),
        json!([1, "a", null]),
    ];
    all[random.below(all.len())].clone()
}

/// Exchanges or removes one value somewhere in `value`.
fn change(value: &mut Value, random: &mut Random) {
    let deeper = random.below(3) > 0;
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            let key = fields.keys().nth(random.below(fields.len())).unwrap().clone();
            match random.below(8) {
                0 => drop(fields.remove(&key)),
                1 => drop(fields.insert(format!("{key}_"), odd(random))),
                _ if deeper => change(&mut fields[&key], random),
                _ => fields[&key] = odd(random),
            }
        }
        Value::Array(items) if !items.is_empty() => {
            let at = random.below(items.len());
            match random.below(8) {
                0 => drop(items.remove(at)),
                1 => items.push(items[at].clone()),
                _ if deeper => change(&mut items[at], random),
                _ => items[at] = odd(random),
            }
        }
        other => *other = odd(random),
    }
}

fn body(seed: &Value, random: &mut Random) -> Vec<u8> {
    let mut value = seed.clone();
    for _ in 0..random.below(4) {
        change(&mut value, random);
    }
    let mut text = value.to_string().into_bytes();
    if random.below(3) == 0 {
        for _ in 0..=random.below(3) {
            let at = random.below(text.len());
            match random.below(4) {
                0 => text.truncate(at),
                1 => text.insert(at, b"{}[]\",:\\0e-"[random.below(11)]),
                2 => text.push(b' '),
                _ if text.is_empty() => {}
                _ => text[at] = random.next() as u8,
            }
        }
    }
    text
}

#[tokio::test]
async fn nearly_requests_are_answered_or_refused() {
    let server = Server::start(|_| bytes("ok")).await;
    let mut random = Random(3);
    let (mut good, mut refused) = (0, 0);
    for _ in 0..BODIES {
        let (path, seed) = &seeds()[random.below(seeds().len())];
        let body = body(seed, &mut random);
        let answer = server.raw("POST", path, &[("content-type", "application/json")], &body).await;
        let what = || format!("{path} {}: {answer:?}", String::from_utf8_lossy(&body));
        match answer.status {
            200 if answer.header("content-type").unwrap().starts_with("text/event-stream") => {
                good += usize::from(!answer.chunks().is_empty());
            }
            200 => good += usize::from(answer.ok().is_object()),
            400..500 => {
                answer.error(answer.status);
                refused += 1;
            }
            _ => panic!("{}", what()),
        }
    }
    assert_eq!(good + refused, BODIES);
    assert!(good > BODIES / 20 && refused > BODIES / 20, "{good} answered, {refused} refused");
}
