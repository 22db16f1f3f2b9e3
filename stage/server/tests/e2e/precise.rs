//! In the precise setting the text of a chain under load is that of one undisturbed process.

use std::time::{Duration, Instant};

use crate::harness::chain::Chain;
use crate::harness::client::{Answer, Piece, request};
use crate::harness::models::prompt;
use crate::harness::plan::Plan;
use crate::harness::reference::{self, Case};

/// All cases at once, with clients around them that come and go.
async fn check(cuts: &[u32], chunk: u32, shared: u32) {
    let cases = reference::cases().await;
    let mut plan = Plan::precise(cuts);
    plan.scheduling.prefill_chunk = Some(chunk);
    plan.scheduling.prefill_chunk_shared = Some(shared);
    let mut chain = Chain::start(&plan).await;
    let leaves = |seed: u64, length: usize, ms: u64| {
        let client = chain.client.clone();
        tokio::spawn(async move {
            let body = request(seed, &prompt(seed, length), 300);
            let gone = tokio::time::timeout(Duration::from_millis(ms), client.ask(&body)).await;
            assert!(gone.is_err(), "300 tokens came in {ms} ms");
        })
    };
    let around = [leaves(950, 9, 1500), leaves(951, 70, 700), leaves(952, 33, 300)];
    let what = format!("{} stages, chunks of {chunk} and {shared}", plan.stages());
    let asked = cases.iter().map(|case| tokio::spawn(case.ask(chain.client.clone(), what.clone().leak())));
    for task in asked.collect::<Vec<_>>().into_iter().chain(around) {
        task.await.unwrap();
    }
    chain.until_lanes(0).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_loaded_stage_gives_the_undisturbed_texts() {
    check(&[0, 30], 48, 16).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_loaded_stages_give_the_undisturbed_texts() {
    check(&[0, 23, 30], 512, 64).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_loaded_stages_give_the_undisturbed_texts() {
    check(&[0, 15, 27, 30], 19, 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_loaded_stages_give_the_undisturbed_texts() {
    check(&[0, 2, 11, 18, 29, 30], 31, 23).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_chain_gives_the_texts_of_a_cold_one() {
    let cases = reference::cases().await;
    let mut plan = Plan::precise(&[0, 15, 27, 30]);
    plan.kv_cache.min_tokens = 8;
    plan.kv_cache.max_entries = 3;
    let mut chain = Chain::start(&plan).await;
    for round in ["cold", "warm", "warm again"] {
        for case in cases {
            case.ask(chain.client.clone(), round).await;
        }
    }
    let beside = cases.iter().map(|case| tokio::spawn(case.ask(chain.client.clone(), "warm and beside others")));
    for task in beside.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert!(chain.client.metric("splitmodel_cached_tokens_total").await > 0.0);
    // A stage that comes back has nothing; the others agree with it.
    chain.stages[1].kill();
    chain.restart(1);
    for case in cases {
        case.ask(chain.client.clone(), "after a loss").await;
    }
    chain.until_lanes(0).await;
    chain.end().await;
}

#[test]
fn other_texts_are_found_out_and_ties_are_not() {
    let answer = |tokens: [&str; 3], gap: f64| Answer {
        text: tokens.concat(),
        pieces: tokens.map(|t| Piece { text: t.to_owned(), gap: Some(gap), at: Instant::now() }).to_vec(),
        finish: Some("length".to_owned()),
        done: true,
        ..Answer::default()
    };
    let case = |gap| Case { body: serde_json::json!({}), answer: answer(["a", "b", "c"], gap) };
    assert_eq!(case(0.5).difference(&answer(["a", "b", "c"], 0.1)), None);
    assert!(case(0.5).difference(&answer(["a", "x", "c"], 0.0)).unwrap().contains("token 1"));
    assert_eq!(case(0.0009).difference(&answer(["a", "x", "y"], 0.5)), None);
    assert!(case(0.001).difference(&answer(["a", "x", "y"], 0.5)).is_some());
    let mut short = answer(["a", "b", "c"], 0.5);
    short.pieces.pop();
    assert!(case(0.0).difference(&short).is_some(), "a cut answer");
}
