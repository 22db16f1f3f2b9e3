//! SIGTERM drains: what runs is finished, nothing new is begun, the exit code is 0.

use std::time::Duration;

use serde_json::Value;
use splitmodel_control::Phase;

use crate::harness::chain::Chain;
use crate::harness::client::{Stream, request};
use crate::harness::models::prompt;
use crate::harness::plan::Plan;
use crate::harness::until;

const CUTS: [u32; 4] = [0, 15, 27, 30];

async fn streams(chain: &Chain, count: u64, tokens: usize) -> Vec<Stream> {
    let mut streams = Vec::new();
    for seed in 600..600 + count {
        streams.push(chain.client.open(&request(seed, &prompt(seed, 12), tokens)).await);
    }
    for stream in &mut streams {
        stream.tokens(2).await;
    }
    streams
}

async fn finish(streams: Vec<Stream>, tokens: usize) {
    for stream in streams {
        let answer = stream.rest().await.complete();
        assert_eq!((answer.pieces.len(), answer.finish.as_deref()), (tokens, Some("length")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_first_stage_finishes_its_streams_and_refuses_new_requests() {
    let mut chain = Chain::start(&Plan::sample(&CUTS)).await;
    let running = streams(&chain, 2, 40).await;
    chain.stages[0].terminate();
    chain.until_status(0, "draining", |s| s.phase() == Phase::Draining).await;
    let (status, body) = chain.client.try_open(&request(610, &[1], 4)).await.err().expect("refused");
    assert_eq!(status, 503, "{body}");
    assert!(body["error"]["message"].as_str().unwrap().contains("shutting down"), "{body}");
    finish(running, 40).await;
    assert!(chain.stages[0].exit().await.success());
    // The others live on and take the next first stage.
    chain.restart(0);
    chain.ready().await;
    chain.client.ask(&request(611, &prompt(611, 9), 3)).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_chain_finishes_its_streams_first() {
    let mut chain = Chain::start(&Plan::sample(&CUTS)).await;
    let running = streams(&chain, 3, 30).await;
    for stage in [1, 2, 0] {
        chain.stages[stage].terminate();
    }
    finish(running, 30).await;
    for stage in &mut chain.stages {
        assert!(stage.exit().await.success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_terminated_middle_stage_lets_streams_finish() {
    let mut plan = Plan::sample(&CUTS);
    plan.scheduling.drain_grace_s = 25;
    let mut chain = Chain::start(&plan).await;
    let running = streams(&chain, 2, 25).await;
    chain.stages[1].terminate();
    finish(running, 25).await;
    assert!(chain.stages[1].exit().await.success());
    chain.restart(1);
    chain.ready().await;
    chain.client.ask(&request(611, &prompt(611, 9), 3)).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_grace() {
    let mut chain = Chain::start(&Plan::sample(&CUTS)).await;
    let mut running = streams(&chain, 1, 900).await;
    chain.stages[0].terminate();
    chain.until_status(0, "draining", |s| s.phase() == Phase::Draining).await;
    chain.stages[0].terminate();
    let answer = running.remove(0).rest().await;
    assert!(answer.pieces.len() < 900);
    let error = answer.error.expect("an error event");
    assert!(error["message"].as_str().unwrap().contains("shutting down"), "{error}");
    assert!(answer.done);
    assert!(chain.stages[0].exit().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_stream_is_not_lost_when_the_process_ends_right_after_it() {
    for round in 0..5 {
        let mut plan = Plan::tiny(&[0, 8]);
        plan.engine.context_length = 4096;
        let mut chain = Chain::start(&plan).await;
        let mut stream = chain.client.open(&request(round, &[30, 31, 32], 300 + 100 * round as usize)).await;
        stream.tokens(1).await;
        chain.stages[0].terminate();
        let answer = stream.rest().await.complete();
        assert_eq!(answer.pieces.len(), 300 + 100 * round as usize);
        assert!(chain.stages[0].exit().await.success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_ends_with_the_program_that_started_it() {
    let mut chain = Chain::start(&Plan::tiny(&[0, 3, 8])).await;
    for stage in &mut chain.stages {
        stage.close_stdin();
    }
    for stage in &mut chain.stages {
        assert!(stage.exit().await.success());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn json_logs_are_json_and_carry_request_ids() {
    let mut plan = Plan::tiny(&[0, 3, 8]);
    plan.json_logs = true;
    let mut chain = Chain::start(&plan).await;
    let mut stream = chain.client.try_open_as(&request(1, &[40, 41], 5), Some("my-request-7")).await.unwrap();
    while stream.next().await {}
    stream.answer.complete();
    let gone = chain.client.try_open_as(&request(2, &[40, 41], 900), Some("my-request-8")).await.unwrap();
    drop(gone);
    chain.until_lanes(0).await;
    until("the end of both answers in the log", async || {
        (chain.stages[0].log().matches("answer ended").count() == 2).then_some(())
    })
    .await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    chain.end().await;
    for stage in &chain.stages {
        let log = stage.log();
        assert!(log.lines().count() > 1, "{log}");
        for line in log.lines() {
            let value: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
            for field in ["timestamp", "level", "message"] {
                assert!(value[field].is_string(), "{field} is missing: {line}");
            }
        }
    }
    let log = chain.stages[0].log();
    for id in ["my-request-7", "my-request-8"] {
        for message in ["admitted", "answer ended"] {
            let found = log.lines().any(|l| l.contains(message) && l.contains(id));
            assert!(found, "no line `{message}` of {id} in\n{log}");
        }
    }
}
