//! A stage that comes back without what it kept: stage 0 still has its part of a prompt, gives its activations, and computes none of it
//! again.

use serde_json::Value;
use splitmodel_control::config::{CacheType, FlashAttention};
use splitmodel_gguf::tiny::Arch;

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::{prompt, tiny_of, tiny_prompt};
use crate::harness::plan::Plan;
use crate::harness::reference::Case;
use crate::harness::until;

const ANSWER: usize = 12;

/// What stage 0 says of a metric with this label.
async fn labelled(chain: &Chain, name: &str, label: &str) -> f64 {
    let url = format!("http://{}/metrics", chain.configs[0].metrics.unwrap().bind);
    let text = reqwest::get(url).await.unwrap().text().await.unwrap();
    let line = text.lines().find(|l| l.starts_with(name) && l.contains(label));
    line.unwrap_or_else(|| panic!("no {name} with {label} in {text}")).rsplit_once(' ').unwrap().1.parse().unwrap()
}

/// Rows that stage 0 computed, and those whose activations it gave.
async fn rows(chain: &Chain) -> (f64, f64) {
    let computed = labelled(chain, "splitmodel_chain_rows_total", "of=\"0\"").await;
    (computed, chain.client.metric("splitmodel_kv_refilled_tokens_total").await)
}

/// Kills a stage, and waits until the chain is formed with its successor.
async fn replace(chain: &mut Chain, stage: usize) {
    chain.until_lanes(0).await;
    let formations = chain.client.metric("splitmodel_formations_total").await;
    chain.stages[stage].kill();
    chain.restart(stage);
    let formed = async || (chain.client.metric("splitmodel_formations_total").await > formations).then_some(());
    until("another formation", formed).await;
    chain.ready().await;
}

async fn check(mut plan: Plan, prompts: [Vec<i32>; 2]) {
    plan.engine.flash_attn = FlashAttention::Off;
    plan.engine.cache_type_k = CacheType::F32;
    plan.engine.cache_type_v = CacheType::F32;
    plan.kv_cache.min_tokens = 8;
    plan.kv_cache.shared_prefix_stride_tokens = 8;
    plan.kv_cache.activation_bytes = 64 << 20;
    let what = plan.model.display().to_string();
    let mut chain = Chain::start(&plan).await;
    let mut cases = Vec::new();
    for (seed, prompt) in (31..).zip(&prompts) {
        let body = request(seed, prompt, ANSWER);
        cases.push(Case { answer: chain.client.ask(&body).await, body });
    }
    let cases: &'static [Case] = cases.leak();
    assert!(labelled(&chain, "splitmodel_kv_activation_records_total", "stored").await >= 2.0, "{what}");

    for loser in [1, 2] {
        replace(&mut chain, loser).await;
        let before = rows(&chain).await;
        cases[0].ask(chain.client.clone(), &format!("{what} without what stage {loser} had")).await;
        chain.until_lanes(0).await;
        let after = rows(&chain).await;
        let (computed, given) = (after.0 - before.0, after.1 - before.1);
        let length = prompts[0].len() as f64;
        assert!(given >= 0.9 * length, "{what}, {loser}: {given} of {length} tokens were given");
        // What is behind the prefix, once more where the first attempt had begun with it.
        assert!(computed <= 2.0 * (length - given) + ANSWER as f64, "{what}, {loser}: {computed} rows were computed");

        // Two at once, in the same frames.
        replace(&mut chain, loser).await;
        let both = cases.iter().map(|case| tokio::spawn(case.ask(chain.client.clone(), "beside another")));
        for task in both.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        let all: usize = prompts.iter().map(Vec::len).sum();
        assert!(rows(&chain).await.1 - after.1 >= 0.9 * all as f64, "{what}, {loser}: both");
    }
    assert_eq!(labelled(&chain, "splitmodel_kv_refills_total", "missed").await, 0.0, "{what}");

    // Nothing is lost now: every stage begins with what it has.
    let before = rows(&chain).await.1;
    let (_, answer) = chain.client.whole(cases[0].body.clone()).await;
    let cached: &Value = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert!(cached.as_u64().unwrap() as f64 >= 0.9 * prompts[0].len() as f64, "{what}: {cached}");
    assert_eq!(rows(&chain).await.1, before);
    chain.until_lanes(0).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_stage_lost_is_not_computed_again_by_stage_0() {
    check(Plan::precise(&[0, 15, 27, 30]), [prompt(961, 300), prompt(962, 200)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nor_is_it_with_exact_states() {
    for (arch, cuts) in
        [(Arch::Gemma3, &[0, 2, 5, 8]), (Arch::FalconH1, &[0, 2, 5, 8]), (Arch::GraniteHybrid, &[0, 3, 6, 9])]
    {
        check(Plan::of(tiny_of(arch), cuts), [tiny_prompt(963, 200), tiny_prompt(964, 130)]).await;
    }
}
