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

/// The reference, made once.
pub async fn cases() -> &'static [Case] {
    static CASES: OnceCell<Vec<Case>> = OnceCell::const_new();
    CASES
        .get_or_init(|| async {
            let mut chain = Chain::start(&Plan::precise(&[0, 30])).await;
            let mut cases = Vec::new();
            for body in bodies() {
                let answer = chain.client.ask(&body).await;
                cases.push(Case { body, answer });
            }
            chain.end().await;
            cases
        })
        .await
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

    /// Asks a chain for it and checks the text.
    pub async fn ask(&self, client: Client, what: &str) {
        self.check(&client.ask(&self.body).await, what);
    }
}
