//! A long prompt goes through while answers run, and none of them starves.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use splitmodel_chain::schedule::Op;

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::history::{self, Sent};
use crate::harness::models::{prompt, tokenizer};
use crate::harness::plan::Plan;
use crate::replay;

const LONG: u64 = 450;
const RUNNING: [u64; 3] = [451, 452, 453];
/// Rows of prompts that may be in flight while answers run.
const SHARED: usize = 64;

#[tokio::test(flavor = "multi_thread")]
async fn running_streams_are_not_starved_by_a_long_prompt() {
    let mut plan = Plan::sample(&[0, 15, 27, 30]);
    plan.schedule = true;
    plan.engine.context_length = 2048;
    plan.scheduling.prefill_chunk_shared = Some(SHARED as u32);
    let mut chain = Chain::start(&plan).await;
    let running: Vec<_> = RUNNING
        .iter()
        .map(|&seed| {
            let client = chain.client.clone();
            tokio::spawn(async move {
                let prompt = prompt(seed, 20);
                let answer = client.ask(&request(seed, &prompt, 140)).await;
                Sent { seed, prompt, answer }
            })
        })
        .collect();
    chain.until_status(0, "answers to run", |s| s.generated_tokens > 60).await;
    let began = Instant::now();
    let long = prompt(LONG, 2000);
    let answer = chain.client.ask(&request(LONG, &long, 4)).await;
    let mut sent = vec![Sent { seed: LONG, prompt: long, answer }];
    for task in running {
        sent.push(task.await.unwrap());
    }
    chain.until_lanes(0).await;
    chain.end().await;

    let ops = history::operations(&chain.schedule());
    assert_eq!(history::check(&ops, &sent, tokenizer()), 4);
    let (first, last) = check_schedule(&ops, plan.stages());
    report(&sent, began, last - first + 1);
    replay::replays(chain.schedule(), plan.model, &sent).await;
}

/// Checks the frames while the long prompt and the answers run together. Gives the first and the last of them.
fn check_schedule(ops: &[Op], stages: usize) -> (usize, usize) {
    let mut sessions: HashMap<u64, (u64, i32)> = HashMap::new();
    let mut frames: Vec<(Vec<u64>, usize, usize)> = Vec::new();
    for op in ops {
        match op {
            Op::Config { session, config, .. } => {
                let number = |field: &str| config[field].as_u64().unwrap();
                sessions.insert(*session, (number("seed"), number("prompt_tokens") as i32));
            }
            Op::Decode { rows, .. } => {
                let (mut answers, mut prompts, mut long) = (Vec::new(), 0, 0);
                for row in rows {
                    let (seed, length) = sessions[&row.0];
                    match row.3 < length {
                        true => prompts += 1,
                        false => answers.push(seed),
                    }
                    long += usize::from(seed == LONG && row.3 < length);
                }
                frames.push((answers, prompts, long));
            }
            _ => {}
        }
    }
    let first = frames.iter().position(|f| f.2 > 0).unwrap();
    let end = frames.iter().rposition(|f| f.2 > 0).unwrap();
    let last_answer = |seed| frames.iter().rposition(|f| f.0.contains(&seed)).unwrap();
    // Where the first of the answers ends, the prompt gets more room.
    let together = RUNNING.map(last_answer).into_iter().min().unwrap().min(end);
    assert!(together > first + 50, "the answers ran beside the prompt for {} frames only", together - first);
    for seed in RUNNING {
        let at: Vec<_> = (first..=together).filter(|i| frames[*i].0.contains(&seed)).collect();
        let gap = at.windows(2).map(|w| w[1] - w[0]).max().unwrap();
        assert!(gap <= stages, "an answer's next row came {gap} frames later, with {stages} in flight");
    }
    for (i, window) in frames[first..=together].windows(stages).enumerate() {
        let rows: usize = window.iter().map(|f| f.1).sum();
        assert!(rows <= SHARED, "{rows} prompt rows in flight from frame {}", first + i);
        assert!(window.iter().all(|f| !f.0.is_empty()), "a frame without answers' rows from {}", first + i);
    }
    (first, end)
}

/// Prints pauses between tokens, with and without the prompt, which began at `began` and took `frames` frames.
fn report(sent: &[Sent], began: Instant, frames: usize) {
    let came = sent[0].answer.pieces[0].at;
    let pauses = |from: Option<Instant>, to: Instant| {
        let mut pauses = Vec::new();
        for sent in &sent[1..] {
            let at = sent.answer.pieces.iter().map(|p| p.at).filter(|at| from.is_none_or(|f| *at > f) && *at < to);
            let at: Vec<_> = at.collect();
            pauses.extend(at.windows(2).map(|w| w[1] - w[0]));
        }
        pauses.sort_unstable();
        [50, 95].map(|percent| pauses.get(pauses.len() * percent / 100).copied().unwrap_or(Duration::ZERO))
    };
    let (undisturbed, disturbed) = (pauses(None, began), pauses(Some(began), came));
    let frame = (came - began) / u32::try_from(frames).unwrap();
    println!(
        "pauses between tokens, median and 95 %: {undisturbed:.1?} undisturbed, {disturbed:.1?} beside a long prompt, which took \
         {frames} frames, one every {frame:.1?}"
    );
}
