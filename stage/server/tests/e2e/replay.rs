//! Point of departure for everything else: what a chain computed equals, bit for bit, what one unsplit process computes
//! from the same schedule, and every lane held exactly its session's history.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use splitmodel_chain::schedule::Op;
use splitmodel_engine::Tokenizer;
use splitmodel_server::replay::{self, ReplayFailure};

use crate::harness::chain::Chain;
use crate::harness::client::{Answer, Client, request, with};
use crate::harness::history::{self, Sent};
use crate::harness::models::{self, prompt, tiny_prompt};
use crate::harness::plan::Plan;

/// When a client leaves.
#[derive(Clone, Copy)]
enum Leave {
    AtTheEnd,
    /// This long after it asked.
    After(Duration),
    /// With so many tokens.
    Tokens(usize),
}

struct Load {
    seed: u64,
    prompt: Vec<i32>,
    tokens: usize,
    more: Value,
    leave: Leave,
}

fn load(seed: u64, length: usize, tokens: usize) -> Load {
    Load { seed, prompt: prompt(seed, length), tokens, more: json!({}), leave: Leave::AtTheEnd }
}

fn sampling() -> Value {
    json!({
        "temperature": 0.9, "top_p": 0.95, "top_k": 60, "min_p": 0.02, "repeat_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.1, "logit_bias": {"260": -5, "28": 2.5},
    })
}

fn grammar() -> Value {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "count"],
        "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    });
    json!({
        "ignore_eos": false,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}},
    })
}

/// Eight clients of all kinds.
fn mixed(seed: u64) -> Vec<Load> {
    let after = |ms| Leave::After(Duration::from_millis(ms));
    vec![
        load(seed, 1, 24),
        Load { more: sampling(), ..load(seed + 1, 100, 20) },
        Load { more: grammar(), ..load(seed + 2, 33, 48) },
        Load { leave: Leave::Tokens(5), ..load(seed + 3, 64, 200) },
        // These four wait for a lane first.
        Load { leave: after(400), ..load(seed + 4, 260, 20) },
        Load { leave: after(30), ..load(seed + 5, 90, 20) },
        Load { more: sampling(), ..load(seed + 6, 160, 12) },
        load(seed + 7, 70, 12),
    ]
}

async fn run(client: Client, load: Load) -> Sent {
    let body = with(request(load.seed, &load.prompt, load.tokens), load.more);
    let answer = match load.leave {
        Leave::AtTheEnd => client.ask(&body).await,
        Leave::Tokens(count) => {
            let mut stream = client.open(&body).await;
            stream.tokens(count).await;
            stream.answer
        }
        Leave::After(time) => {
            let gone = tokio::time::timeout(time, client.ask(&body)).await;
            gone.unwrap_or_else(|_| Answer::default())
        }
    };
    Sent { seed: load.seed, prompt: load.prompt, answer }
}

/// Runs all of `loads` at once.
async fn all(client: &Client, loads: Vec<Load>) -> Vec<Sent> {
    let tasks: Vec<_> = loads.into_iter().map(|l| tokio::spawn(run(client.clone(), l))).collect();
    let mut sent = Vec::new();
    for task in tasks {
        sent.push(task.await.unwrap());
    }
    sent
}

/// Serves `waves` of clients with the chain of `plan` and compares what it did with the unsplit model.
async fn check(mut plan: Plan, waves: Vec<Vec<Load>>) -> Vec<Op> {
    plan.schedule = true;
    plan.scheduling.prefill_chunk = Some(128);
    plan.scheduling.prefill_chunk_shared = Some(24);
    let mut chain = Chain::start(&plan).await;
    let begun = Instant::now();
    let mut sent = Vec::new();
    for wave in waves {
        sent.extend(all(&chain.client, wave).await);
    }
    chain.until_lanes(0).await;
    chain.end().await;
    let served = begun.elapsed();
    let ops = history::operations(&chain.schedule());
    let compared = history::check(&ops, &sent, &Tokenizer::load(&plan.model).unwrap());
    assert!(compared >= sent.iter().filter(|s| s.answer.done).count());
    for done in sent.iter().filter(|s| s.answer.text.starts_with('{')) {
        let value: Value = serde_json::from_str(&done.answer.text).unwrap();
        assert!(value["name"].is_string() && value["count"].is_u64(), "{value}");
    }
    println!("{} stages served in {served:.1?}", plan.stages());
    replays(chain.schedule(), plan.model, &sent).await;
    ops
}

/// Checks that the unsplit model computes the same, bit for bit, from a schedule in which `sent` was served.
pub async fn replays(log: PathBuf, model: PathBuf, sent: &[Sent]) {
    let begun = Instant::now();
    let result = tokio::task::spawn_blocking(move || replay::run(&log, &model).unwrap()).await.unwrap();
    println!(
        "replay of {} frames, {} rows: {} rows of logits, {} samples in {:.1?}",
        result.batches,
        result.rows,
        result.compared,
        result.sampled,
        begun.elapsed()
    );
    assert_eq!(result.mismatches, []);
    let tokens: usize = sent.iter().map(|s| s.answer.pieces.len()).sum();
    assert!(result.compared >= tokens && result.sampled >= tokens && tokens > 0, "{result:?}, {tokens} tokens");
    assert!(!result.dropped, "no stage drops rows without a fault");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_stage_computes_what_one_process_computes() {
    let alone = vec![load(100, 5, 16)];
    check(Plan::sample(&[0, 30]), vec![alone, mixed(110)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_uneven_stages_compute_what_one_process_computes() {
    check(Plan::sample(&[0, 23, 30]), vec![mixed(200)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn five_uneven_stages_compute_what_one_process_computes() {
    let mut plan = Plan::sample(&[0, 2, 11, 18, 29, 30]);
    plan.engine.lanes = 8;
    check(plan, vec![mixed(500), vec![load(520, 20, 8)]]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_uneven_stages_compute_what_one_process_computes() {
    check(Plan::sample(&[0, 15, 27, 30]), vec![mixed(300)]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_that_begin_alike_share_cells() {
    // In the cache itself, and as copies.
    for (cuts, max_bytes) in [(&[0, 30][..], 0), (&[0, 15, 27, 30], 0), (&[0, 15, 27, 30], 1 << 30)] {
        let mut plan = Plan::sample(cuts);
        plan.kv_cache.max_bytes = max_bytes;
        let alike = |seed: u64, tail: usize| {
            let prompt = [prompt(970, 300), prompt(seed, tail)].concat();
            Load { prompt, ..load(seed, 1, 12) }
        };
        // The second wave meets what the first left behind, the third what the second did, cancelled ones included.
        let waves = vec![
            vec![alike(971, 20)],
            vec![
                alike(972, 30),
                Load { more: sampling(), ..alike(973, 70) },
                Load { more: grammar(), tokens: 48, ..alike(974, 10) },
                Load { leave: Leave::Tokens(4), ..alike(975, 50) },
                load(976, 90, 9),
            ],
            vec![Load { more: sampling(), ..alike(977, 40) }, alike(978, 5)],
        ];
        let ops = check(plan, waves).await;
        let lanes = 4; // residents come after
        let restored = ops.windows(2).filter_map(|pair| match pair {
            [_, Op::SeqCp { from, to, end, .. }] if *from >= lanes && *to < lanes => Some(*end),
            [Op::LoadState { .. }, Op::SeqRm { from, .. }] => Some(*from),
            _ => None,
        });
        let restored: Vec<_> = restored.collect();
        assert_eq!(restored.len(), 6, "{restored:?}");
        assert!(restored.iter().all(|n| *n >= 300), "{restored:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_of_four_thousand_tokens_replay_at_any_number_of_stages() {
    for cuts in [&[0, 8][..], &[0, 1, 8], &[0, 2, 7, 8], &[0, 1, 2, 5, 7, 8]] {
        let mut plan = Plan::tiny(cuts);
        plan.engine.context_length = 4096;
        plan.engine.n_ctx = Some(3 * 4096);
        let tiny =
            |seed, length, tokens, leave| Load { prompt: tiny_prompt(seed, length), leave, ..load(seed, 1, tokens) };
        let after = |ms| Leave::After(Duration::from_millis(ms));
        let mut wave = vec![
            tiny(701, 4000, 90, Leave::AtTheEnd),
            tiny(702, 1, 400, Leave::AtTheEnd),
            Load { more: sampling(), ..tiny(703, 900, 200, Leave::AtTheEnd) },
            tiny(704, 30, 1000, Leave::Tokens(40)),
            tiny(705, 3500, 20, after(150)),
            tiny(706, 2500, 20, after(20)),
            tiny(707, 60, 300, Leave::AtTheEnd),
            Load { more: sampling(), ..tiny(708, 129, 300, Leave::AtTheEnd) },
        ];
        for load in &mut wave {
            load.more["logit_bias"] = json!({});
        }
        check(plan, vec![wave]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_that_lies_is_found_out() {
    let mut plan = Plan::tiny(&[0, 3, 8]);
    plan.schedule = true;
    let mut chain = Chain::start(&plan).await;
    chain.client.ask(&request(700, &tiny_prompt(700, 40), 10)).await;
    chain.end().await;
    let log = chain.schedule();
    let model = plan.model.clone();
    let clean = replay::run(&log, &model).unwrap();
    assert_eq!(clean.mismatches, []);
    assert!(clean.compared > 10, "{clean:?}");

    let text = std::fs::read_to_string(&log).unwrap();
    let (head, ops) = text.split_once('\n').unwrap();
    let ops: Vec<Op> = ops.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let lie = |change: &mut dyn FnMut(&mut Op) -> bool| -> PathBuf {
        let mut ops = ops.clone();
        assert!(ops.iter_mut().rev().any(change), "nothing to change");
        let path = chain.dir().join("lie.jsonl");
        let lines: Vec<_> = ops.iter().map(|op| serde_json::to_string(op).unwrap()).collect();
        std::fs::write(&path, format!("{head}\n{}\n", lines.join("\n"))).unwrap();
        path
    };
    let run = |path: &Path| replay::run(path, &model);

    let digest = lie(&mut |op| {
        let Op::Decode { logits, .. } = op else { return false };
        let Some(l) = logits.first_mut() else { return false };
        let last = if l.digest.ends_with('0') { "1" } else { "0" };
        l.digest.replace_range(63.., last);
        true
    });
    assert_eq!(run(&digest).unwrap().mismatches.len(), 1);

    let sampled = lie(&mut |op| {
        let Op::Decode { logits, .. } = op else { return false };
        logits.first_mut().is_some_and(|l| {
            l.token ^= 1;
            true
        })
    });
    assert_eq!(run(&sampled).unwrap().mismatches.len(), 1);

    // Another prompt token: every row after it differs.
    let token = lie(&mut |op| {
        let Op::Decode { rows, .. } = op else { return false };
        rows.iter_mut().find(|r| r.3 == 7).is_some_and(|r| {
            r.4 += 1;
            true
        })
    });
    assert!(run(&token).unwrap().mismatches.len() >= 10);

    // A row in a lane of another session: the shadow sees it before anything is computed.
    let lane = lie(&mut |op| {
        let Op::Decode { rows, .. } = op else { return false };
        rows.first_mut().is_some_and(|r| {
            r.3 += 1;
            true
        })
    });
    assert!(matches!(run(&lane).unwrap_err(), ReplayFailure::Shadow(_)));

    let other = models::tiny(2);
    assert!(matches!(replay::run(&log, &other).unwrap_err(), ReplayFailure::Model { .. }));
}
