//! A stage dies and comes back: running streams go on to the undisturbed text.

use std::time::{Duration, Instant};

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::tiny_prompt;
use crate::harness::plan::Plan;
use crate::harness::reference;
use crate::harness::until;

const CUTS: [u32; 4] = [0, 15, 27, 30];

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_on_when_the_middle_and_the_last_stage_die_and_return() {
    let (cases, long) = (&reference::cases().await[..3], &reference::cases().await[4]);
    let mut plan = Plan::precise(&CUTS);
    plan.scheduling.prefill_chunk_shared = 8;
    let mut chain = Chain::start(&plan).await;
    let mut streams = Vec::new();
    let mut late = Vec::new();
    for case in cases {
        streams.push(chain.client.open(&case.body).await);
    }
    for (tokens, stage) in [(5, 1), (14, 2), (20, 1)] {
        for stream in &mut streams {
            stream.tokens(tokens).await;
        }
        // Two more: the prompt of one is under way, the other waits for a lane.
        let ask = || tokio::spawn(long.ask(chain.client.clone(), "begun before a death"));
        let before = [ask(), ask()];
        chain.until_status(0, "a request waits", |s| s.queued > 0).await;
        chain.stages[stage].kill();
        late.extend(before);
        let begun = Instant::now();
        chain.not_ready().await;
        chain.restart(stage);
        chain.ready().await;
        println!("stage {stage} was away for {:.1?}", begun.elapsed());
    }
    for (case, stream) in cases.iter().zip(streams) {
        let answer = tokio::time::timeout(Duration::from_secs(100), stream.rest()).await.unwrap().complete();
        case.check(&answer, "after three deaths");
    }
    for task in late {
        task.await.unwrap();
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
    let (client, body) = (chain.client.clone(), case.body.clone());
    let leaves = tokio::spawn(async move { client.ask(&body).await });
    chain.until_status(0, "two requests wait", |s| s.queued == 2).await;
    leaves.abort();
    chain.until_status(0, "one has left", |s| s.queued == 1).await;
    chain.restart(2);
    case.check(&waiting.await.unwrap(), "after a wait");
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_that_stands_still_is_given_up_and_taken_back() {
    let case = &reference::cases().await[1];
    let mut plan = Plan::precise(&CUTS);
    plan.peer_deadline_ms = 2000;
    let mut chain = Chain::start(&plan).await;
    let mut stream = chain.client.open(&case.body).await;
    stream.tokens(4).await;
    chain.stages[1].signal("STOP");
    chain.not_ready().await;
    chain.stages[1].signal("CONT");
    chain.ready().await;
    let answer = tokio::time::timeout(Duration::from_secs(100), stream.rest()).await.unwrap().complete();
    case.check(&answer, "after a standstill");
    chain.until_lanes(0).await;
    chain.until_linked().await;
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
    let prompt = tiny_prompt(1, 40);
    let mut stream = chain.client.open(&request(1, &prompt, 4000)).await;
    stream.tokens(3).await;
    chain.stages[1].kill();
    let answer = stream.rest().await;
    let error = answer.error.expect("an error event");
    assert!(error["message"].as_str().unwrap().contains("did not come back"), "{error}");
    assert!(answer.done && answer.finish.is_none(), "a clean end");
    let refused = chain.client.try_open(&request(2, &prompt, 4)).await;
    assert_eq!(refused.err().expect("no chain, no answer").0, 503);
    chain.restart(1);
    chain.ready().await;
    until("an answer", async || chain.client.try_open(&request(3, &prompt, 4)).await.ok()).await;
    chain.until_lanes(0).await;
    chain.end().await;
}
