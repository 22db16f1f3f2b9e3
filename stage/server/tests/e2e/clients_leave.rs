//! A client that goes away frees its lane on every stage with the next frame, and nobody else notices.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::json;
use splitmodel_chain::schedule::Op;

use crate::harness::chain::Chain;
use crate::harness::client::{request, with};
use crate::harness::history;
use crate::harness::models::prompt;
use crate::harness::plan::Plan;
use crate::harness::until;

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_lane_on_every_stage() {
    let mut plan = Plan::sample(&[0, 15, 27, 30]);
    plan.schedule = true;
    plan.engine.lanes = 2;
    plan.engine.context_length = 2048;
    plan.scheduling.prefill_chunk_shared = Some(24);
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
    let logs = chain.configs.iter().map(|c| history::operations(c.schedule_log.as_deref().unwrap()));
    check_logs(&logs.collect::<Vec<_>>());
}

/// Session and lane of every seed, from the log of the last stage.
fn sessions(ops: &[Op]) -> HashMap<u64, (u64, u16)> {
    let config = |op: &Op| match op {
        Op::Config { session, lane, config } => Some((config["seed"].as_u64().unwrap(), (*session, *lane))),
        _ => None,
    };
    ops.iter().filter_map(config).collect()
}

/// Checks, on every stage, that lanes were freed within as many frames as can be under way when the client left, in decode as
/// in prefill; that nothing of a request in the queue came through; and that the witness had its turn throughout.
fn check_logs(logs: &[Vec<Op>]) {
    let under_way = logs.len();
    let sessions = sessions(logs.last().unwrap());
    assert!(!sessions.contains_key(&805), "what left the queue reached the last stage");
    for (stage, ops) in logs.iter().enumerate() {
        // (index, positions) of the frames with rows of a session.
        let frames = |session: u64| -> Vec<(usize, Vec<i32>)> {
            let of = |(i, op): (usize, &Op)| match op {
                Op::Decode { rows, .. } => Some((i, rows.iter().filter(|r| r.0 == session).map(|r| r.3).collect())),
                _ => None,
            };
            ops.iter().enumerate().filter_map(of).filter(|(_, rows): &(_, Vec<i32>)| !rows.is_empty()).collect()
        };
        for (seed, most) in [(801, 1020), (802, 1020), (803, 1899), (804, 1005)] {
            let (session, lane) = sessions[&seed];
            let frames = frames(session);
            let (last, rows) = frames.last().unwrap();
            assert!(rows.last().unwrap() < &most, "seed {seed} was not cut short at stage {stage}");
            // What is kept of it may stay for the next one.
            let freed = |op: &Op| matches!(op, Op::SeqRm { lane: l, to: -1, .. } if *l == lane);
            let end = ops[*last..].iter().position(freed).expect("the lane is freed");
            let between = ops[last + 1..last + end].iter().filter(|op| matches!(op, Op::Decode { .. })).count();
            println!("stage {stage}: seed {seed} ended at position {:?}, its lane {between} frames later", rows.last());
            assert!(between <= under_way, "{between} frames with a lane that nobody used");
        }
        let turns: Vec<_> = frames(sessions[&800].0).into_iter().map(|(i, _)| i).collect();
        for pair in turns.windows(2) {
            let passed = ops[pair[0]..pair[1]].iter().filter(|op| matches!(op, Op::Decode { .. })).count();
            assert!(passed <= 2 * under_way, "{passed} frames without the witness at stage {stage}");
        }
    }
}
