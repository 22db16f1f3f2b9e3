//! A client that goes away frees its lane on every stage, and nobody else notices.

use std::time::Duration;

use serde_json::json;

use crate::harness::chain::Chain;
use crate::harness::client::{request, with};
use crate::harness::models::prompt;
use crate::harness::plan::Plan;
use crate::harness::until;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_lane_on_every_stage() {
    let mut plan = Plan::sample(&[0, 15, 27, 30]);
    plan.engine.lanes = 2;
    plan.engine.context_length = 2048;
    plan.scheduling.prefill_chunk_shared = 24;
    let mut chain = Chain::start(&plan).await;
    let mut witness = chain.client.open(&request(800, &prompt(800, 20), 1500)).await;
    witness.tokens(2).await;

    // While it is answered, streamed.
    let mut leaver = chain.client.open(&request(801, &prompt(801, 20), 1000)).await;
    leaver.tokens(3).await;
    chain.until_lanes(2).await;
    drop(leaver);
    chain.until_lanes(1).await;

    // While it is answered, not streamed.
    let (client, body) = (chain.client.clone(), request(802, &prompt(802, 20), 1000));
    let whole = tokio::spawn(async move { client.whole(body).await });
    chain.until_lanes(2).await;
    whole.abort();
    chain.until_lanes(1).await;

    // While its prompt goes through.
    let before = witness.answer.pieces.len();
    let (client, body) = (chain.client.clone(), request(803, &prompt(803, 1900), 20));
    let prefilling = tokio::spawn(async move { client.ask(&body).await });
    chain.until_lanes(2).await;
    prefilling.abort();
    chain.until_lanes(1).await;

    // While it waits for a lane, streamed and not.
    let mut second = chain.client.open(&request(804, &prompt(804, 5), 1000)).await;
    second.tokens(1).await;
    for stream in [true, false] {
        let (client, body) = (chain.client.clone(), request(805, &prompt(805, 5), 10));
        let body = with(body, json!({"stream": stream, "logprobs": null}));
        let queued = tokio::spawn(async move { client.try_open(&body).await.map(|_| ()) });
        chain.until_status(0, "one waits", |s| s.queued == 1 && s.lanes_used == 2).await;
        queued.abort();
        chain.until_status(0, "none waits", |s| s.queued == 0 && s.lanes_used == 2).await;
    }
    drop(second);
    chain.until_lanes(1).await;

    // The witness never stopped.
    witness.tokens(before + 3).await;
    drop(witness);
    chain.until_lanes(0).await;
    assert_eq!(chain.client.metric("splitmodel_kv_cells_used").await, 0.0);
    until("no answer to be counted as active", async || {
        (chain.client.metric("splitmodel_answers_active").await == 0.0).then_some(())
    })
    .await;
    // What was freed serves the next one.
    chain.client.ask(&request(806, &prompt(806, 12), 5)).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    chain.end().await;
}
