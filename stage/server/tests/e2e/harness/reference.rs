//! The undisturbed run that texts are compared with: the precise setting, one stage, one request at a time.

use serde_json::{Value, json};
use tokio::sync::OnceCell;

use super::chain::Chain;
use super::client::{Answer, Client, request, with};
use super::models::prompt;
use super::plan::Plan;

/// Difference of log-probabilities below which either of two tokens is right.
const TIE: f64 = 1e-3;

/// A request and the answer it gets from an undisturbed single stage.
pub struct Case {
    pub body: Value,
    pub answer: Answer,
}

/// Greedy and sampled, short and long.
fn bodies() -> Vec<Value> {
    let plain = json!({"temperature": 0.8, "top_p": 0.9});
    let penalties = json!({"temperature": 1.1, "min_p": 0.03, "repeat_penalty": 1.2, "frequency_penalty": 0.3});
    vec![
        request(901, &prompt(901, 60), 36),
        with(request(902, &prompt(902, 25), 36), plain),
        with(request(903, &prompt(903, 40), 36), penalties),
        request(904, &prompt(904, 1), 16),
        request(905, &prompt(905, 110), 16),
    ]
}

/// Tokens of each of the long answers.
pub const LONG: usize = 64;

/// Eight long answers of all kinds: greedy, sampled, with penalties, and bound by a schema that they do not fill.
fn long_bodies() -> Vec<Value> {
    let item = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "count"],
        "properties": {"name": {"type": "string", "maxLength": 10}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    });
    let list = json!({"type": "array", "minItems": 12, "maxItems": 12, "items": item});
    let schema = json!({"type": "json_schema", "json_schema": {"name": "list", "schema": list}});
    let bound = json!({"ignore_eos": false, "response_format": schema});
    let kinds = [
        (45, json!({})),
        (120, json!({})),
        (30, json!({"temperature": 0.8, "top_p": 0.9})),
        (1, json!({"temperature": 1.2, "top_k": 50})),
        (60, json!({"temperature": 1.1, "min_p": 0.03, "repeat_penalty": 1.2, "frequency_penalty": 0.3})),
        (20, json!({"presence_penalty": 0.8, "repeat_penalty": 1.1, "logit_bias": {"260": -5, "28": 2.5}})),
        (35, bound.clone()),
        (50, with(bound, json!({"temperature": 0.7, "repeat_penalty": 1.05}))),
    ];
    let body = |(seed, (length, more))| with(request(seed, &prompt(seed, length), LONG), more);
    (920..).zip(kinds).map(body).collect()
}

async fn undisturbed(bodies: Vec<Value>) -> Vec<Case> {
    let mut chain = Chain::start(&Plan::precise(&[0, 30])).await;
    let mut cases = Vec::new();
    for body in bodies {
        let answer = chain.client.ask(&body).await;
        cases.push(Case { body, answer });
    }
    chain.end().await;
    cases
}

/// The reference, made once.
pub async fn cases() -> &'static [Case] {
    static CASES: OnceCell<Vec<Case>> = OnceCell::const_new();
    CASES.get_or_init(|| undisturbed(bodies())).await
}

/// Eight long answers, made once.
pub async fn long_cases() -> &'static [Case] {
    static CASES: OnceCell<Vec<Case>> = OnceCell::const_new();
    CASES.get_or_init(|| undisturbed(long_bodies())).await
}

impl Case {
    /// What of `got` is not as in the undisturbed answer. After a tie anything may follow.
    pub fn difference(&self, got: &Answer) -> Option<String> {
        let want = &self.answer;
        for (i, (a, b)) in want.pieces.iter().zip(&got.pieces).enumerate() {
            if a.text != b.text {
                let differ = || format!("token {i} is {:?}, alone it is {:?}, ahead by {:?}", b.text, a.text, a.gap);
                return a.gap.is_none_or(|gap| gap >= TIE).then(differ);
            }
        }
        let end = |a: &Answer| (a.pieces.len(), a.text.clone(), a.finish.clone());
        (end(want) != end(got)).then(|| format!("{:?} instead of {:?}", end(got), end(want)))
    }

    /// Checks that `got` is the undisturbed answer.
    pub fn check(&self, got: &Answer, what: &str) {
        assert_eq!(self.difference(got), None, "{what}");
    }

    /// Checks that `got`, of which no single tokens are known, has the undisturbed text, or that a tie was met; says whether there
    /// was none.
    pub fn check_text(&self, got: &Answer, what: &str) -> bool {
        let tie = self.answer.pieces.iter().any(|p| p.gap.is_none_or(|gap| gap < TIE));
        assert!(tie || got.text == self.answer.text, "{what}: {:?} instead of {:?}", got.text, self.answer.text);
        assert_eq!(got.finish, self.answer.finish, "{what}");
        !tie
    }

    /// Asks a chain for it and checks the text.
    pub async fn ask(&self, client: Client, what: &str) {
        self.check(&client.ask(&self.body).await, what);
    }
}
