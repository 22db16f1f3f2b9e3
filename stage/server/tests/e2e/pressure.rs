//! Random requests through a chain of three stages whose caches are small: beginnings of earlier ones, edits in the middle, the same
//! again, clients that leave, stages that are killed. Every answer is the text of a cold run in the precise setting.
//!
//! `SPLITMODEL_REQUESTS=10000` asks for more of tiny models, and `SPLITMODEL_SAMPLE_REQUESTS=300` of the sample model.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use splitmodel_control::config::{CacheType, FlashAttention};
use splitmodel_gguf::tiny::Arch;

use crate::harness::chain::Chain;
use crate::harness::client::{Client, request, with};
use crate::harness::models::{prompt, random, tiny_of, tiny_prompt};
use crate::harness::plan::Plan;
use crate::harness::reference::Case;
use crate::harness::until;

const CLIENTS: usize = 6;

/// Tokens for a seed, so many.
type Text = fn(u64, usize) -> Vec<i32>;

/// What is asked: the reference's body, and how.
struct Asked {
    /// With log-probabilities, so that ties show.
    case: Case,
    body: Value,
    /// Tokens after which the client leaves.
    leaves: Option<usize>,
}

/// `count` requests that have much in common.
fn bodies(seed: u64, count: usize, text: Text) -> Vec<Value> {
    let mut random = random(seed);
    let mut below = move |n: usize| random() as usize % n;
    let mut earlier: Vec<Value> = Vec::new();
    for i in 0..count {
        let again = (i > 0 && below(8) == 0).then(|| earlier[i - 1 - below(i.min(6))].clone());
        let body = again.unwrap_or_else(|| {
            let mut tokens: Vec<i32> = match i > 0 && below(5) > 0 {
                true => serde_json::from_value(earlier[i - 1 - below(i.min(12))]["prompt"].clone()).unwrap(),
                false => text(seed + i as u64, 20 + below(130)),
            };
            tokens.truncate(1 + below(tokens.len()).max(below(tokens.len())));
            tokens.extend(text(seed + i as u64 + 1, 1 + below(40)));
            if below(5) == 0 {
                let at = below(tokens.len());
                tokens[at] = text(seed + i as u64 + 2, 1)[0];
            }
            tokens.truncate(200);
            request(1, &tokens, 2 + below(11))
        });
        earlier.push(body);
    }
    earlier
}

fn settings(plan: &mut Plan) {
    plan.engine.flash_attn = FlashAttention::Off;
    plan.engine.cache_type_k = CacheType::F32;
    plan.engine.cache_type_v = CacheType::F32;
    plan.scheduling.prefill_chunk = Some(48);
    plan.scheduling.prefill_chunk_shared = Some(24);
}

/// What a process without caches answers, to each by itself.
async fn cold(plan: &Plan, bodies: Vec<Value>) -> Vec<Case> {
    let mut plan = plan.clone();
    plan.cuts = vec![0, *plan.cuts.last().unwrap()];
    plan.kv_cache.enabled = false;
    let mut chain = Chain::start(&plan).await;
    let mut cases: Vec<Case> = Vec::new();
    for body in bodies {
        let known = cases.iter().rev().take(12).find(|c| c.body == body).map(|c| c.answer.clone());
        let answer = match known {
            Some(answer) => answer,
            None => chain.client.ask(&body).await,
        };
        cases.push(Case { body, answer });
    }
    chain.end().await;
    cases
}

/// Asks, and checks the answer. Whether a tie may have hidden a difference.
async fn one(client: &Client, asked: &Asked) -> bool {
    if let Some(tokens) = asked.leaves {
        let mut stream = client.open(&asked.body).await;
        stream.tokens(tokens).await;
        return false;
    }
    let answer = client.ask(&asked.body).await;
    let what = asked.body.to_string();
    match asked.body["logprobs"].is_null() {
        true => !asked.case.check_text(&answer, &what),
        false => {
            asked.case.check(&answer, &what);
            false
        }
    }
}

async fn check(mut plan: Plan, count: usize, text: Text, max_bytes: u64, activation_bytes: u64) {
    plan.kv_cache.min_tokens = 8;
    plan.kv_cache.max_entries = 6;
    plan.kv_cache.shared_prefix_stride_tokens = 32;
    plan.kv_cache.max_bytes = max_bytes;
    plan.kv_cache.activation_bytes = activation_bytes;
    let cases = cold(&plan, bodies(77, count, text)).await;
    let mut random = random(78);
    let mut below = move |n: usize| random() as usize % n;
    let asked: Vec<_> = cases
        .into_iter()
        .map(|case| {
            let most = case.answer.pieces.len();
            let leaves = (below(10) == 0).then(|| below(most));
            // First tokens of earlier answers are shown where no log-probabilities are asked for, the same again likewise.
            let plain = leaves.is_none() && case.body["prompt"].as_array().is_some_and(|p| p.len() % 2 == 0);
            let more = if plain { json!({"logprobs": null}) } else { json!({}) };
            Asked { body: with(case.body.clone(), more), case, leaves }
        })
        .collect();
    let asked: Arc<[Asked]> = asked.into();
    let mut chain = Chain::start(&plan).await;
    let next = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let (client, asked, next) = (chain.client.clone(), asked.clone(), next.clone());
            tokio::spawn(async move {
                let mut ties = 0;
                while let Some(asked) = asked.get(next.fetch_add(1, Ordering::Relaxed)) {
                    ties += usize::from(one(&client, asked).await);
                }
                ties
            })
        })
        .collect();
    // A stage is killed after each fifth of them, at least after each hundred.
    let fifth = (count / 5).clamp(1, 100);
    for (at, stage) in (1..count.div_ceil(fifth)).zip([1, 2].into_iter().cycle()) {
        until("requests to be asked", async || {
            let ended = clients.iter().all(|c| c.is_finished());
            (ended || next.load(Ordering::Relaxed) >= at * fifth).then_some(())
        })
        .await;
        chain.stages[stage].kill();
        chain.restart(stage);
        chain.ready().await;
    }
    let mut ties = 0;
    for client in clients {
        ties += client.await.unwrap();
    }
    assert!(ties * 8 <= count, "{ties} ties among {count} requests: they prove too little");
    chain.until_lanes(0).await;
    for name in ["cached_tokens_total", "kv_restored_tokens_total", "kv_evictions_total", "kv_replayed_tokens_total"] {
        let value = chain.client.metric(&format!("splitmodel_{name}")).await;
        println!("{name}: {value} in {count} requests");
        // Exact states are seldom those of a whole prompt, which a replay needs, and few requests seldom the same.
        assert!(value > 0.0 || name == "kv_replayed_tokens_total", "{name}");
    }
    assert_eq!(chain.client.metric("splitmodel_kv_cells_used").await, 0.0);
    if activation_bytes > 0 {
        let tokens = chain.client.metric("splitmodel_kv_refilled_tokens_total").await;
        println!("kv_refilled_tokens_total: {tokens} in {count} requests");
        assert!(chain.client.metric("splitmodel_kv_activation_bytes").await <= activation_bytes as f64);
        assert!(chain.client.metric("splitmodel_kv_activation_records_total").await > 0.0);
    }
    for config in &chain.configs {
        let metrics = Client::new(config.metrics.unwrap().bind);
        let bytes = metrics.metric("splitmodel_kv_state_bytes").await;
        assert!(bytes <= max_bytes as f64 && metrics.metric("splitmodel_kv_prefixes").await <= 6.0, "{bytes} bytes");
    }
    chain.end().await;
}

fn count(variable: &str, usual: usize) -> usize {
    std::env::var(variable).map_or(usual, |n| n.parse().unwrap())
}

async fn tiny(arch: Arch, activation_bytes: u64) {
    let mut plan = Plan::of(tiny_of(arch), &[0, 2, 5, 8]);
    settings(&mut plan);
    check(plan, count("SPLITMODEL_REQUESTS", 200), tiny_prompt, 400_000, activation_bytes).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_requests_to_a_dense_model_get_the_text_of_cold_runs() {
    tiny(Arch::Llama, 400_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_requests_to_a_windowed_model_get_the_text_of_cold_runs() {
    tiny(Arch::Gemma3, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_requests_to_a_hybrid_model_get_the_text_of_cold_runs() {
    tiny(Arch::FalconH1, 400_000).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn random_requests_to_the_sample_model_get_the_text_of_cold_runs() {
    check(Plan::precise(&[0, 15, 27, 30]), count("SPLITMODEL_SAMPLE_REQUESTS", 24), prompt, 20_000_000, 5_000_000)
        .await;
}
