//! A stage dies and comes back: running streams go on to the undisturbed text.

use std::time::{Duration, Instant};

use crate::harness::chain::Chain;
use crate::harness::plan::Plan;
use crate::harness::reference;
use crate::harness::until;

const CUTS: [u32; 4] = [0, 15, 27, 30];

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_on_when_the_middle_and_the_last_stage_die_and_return() {
    let cases = &reference::cases().await[..3];
    let mut chain = Chain::start(&Plan::precise(&CUTS)).await;
    let mut streams = Vec::new();
    for case in cases {
        streams.push(chain.client.open(&case.body).await);
    }
    for (tokens, stage) in [(5, 1), (14, 2), (20, 1)] {
        for stream in &mut streams {
            stream.tokens(tokens).await;
        }
        chain.stages[stage].kill();
        let begun = Instant::now();
        chain.not_ready().await;
        // While it is away a new request may come: it waits.
        chain.restart(stage);
        chain.ready().await;
        println!("stage {stage} was away for {:.1?}", begun.elapsed());
    }
    for (case, stream) in cases.iter().zip(streams) {
        let answer = tokio::time::timeout(Duration::from_secs(100), stream.rest()).await.unwrap().complete();
        case.check(&answer, "after three deaths");
    }
    chain.until_lanes(0).await;
    chain.until_linked().await;
    assert_eq!(chain.client.metric("splitmodel_formations").await, 4.0);
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_for_a_broken_chain_and_get_an_answer() {
    let case = &reference::cases().await[3];
    let mut chain = Chain::start(&Plan::precise(&CUTS)).await;
    chain.stages[2].kill();
    chain.not_ready().await;
    let (client, body) = (chain.client.clone(), case.body.clone());
    let waiting = tokio::spawn(async move { client.ask(&body).await });
    chain.until_status(0, "a request waits", |s| s.queued == 1).await;
    chain.restart(2);
    case.check(&waiting.await.unwrap(), "after a wait");
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_stage_that_dies_leaves_nothing_behind() {
    let cases = &reference::cases().await[..2];
    let mut chain = Chain::start(&Plan::precise(&CUTS)).await;
    let mut stream = chain.client.open(&cases[0].body).await;
    stream.tokens(4).await;
    chain.stages[0].kill();
    assert!(!stream.rest().await.done, "the stream was cut");
    for stage in 1..3 {
        // Nobody tells them to free the lane: the lost connection does.
        chain.until_status(stage, "free lanes", |s| s.lanes_used == 0).await;
    }
    chain.restart(0);
    chain.ready().await;
    chain.until_linked().await;
    cases[1].ask(chain.client.clone(), "after the first stage's death").await;
    chain.until_lanes(0).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_that_does_not_come_back_ends_streams_with_an_error() {
    let mut plan = Plan::tiny(&[0, 3, 8]);
    plan.scheduling.recovery_deadline_s = 2;
    plan.engine.context_length = 4096;
    let mut chain = Chain::start(&plan).await;
    let prompt: Vec<i32> = (20..60).collect();
    let mut stream = chain.client.open(&crate::harness::client::request(1, &prompt, 4000)).await;
    stream.tokens(3).await;
    chain.stages[1].kill();
    let answer = stream.rest().await;
    let error = answer.error.expect("an error event");
    assert!(error["message"].as_str().unwrap().contains("did not come back"), "{error}");
    assert!(answer.done && answer.finish.is_none(), "a clean end");
    let refused = chain.client.try_open(&crate::harness::client::request(2, &prompt, 4)).await;
    assert_eq!(refused.err().expect("no chain, no answer").0, 503);
    chain.restart(1);
    chain.ready().await;
    until("an answer", async || chain.client.try_open(&crate::harness::client::request(3, &prompt, 4)).await.ok())
        .await;
    chain.until_lanes(0).await;
    chain.end().await;
}
