//! A stage dies and comes back, hangs, is cut off or restarted: running streams go on to the undisturbed text.

use std::time::{Duration, Instant};

use serde_json::json;
use splitmodel_control::{Phase, StageConfig};
use splitmodel_engine::Tokenizer;

use crate::harness::chain::Chain;
use crate::harness::client::{Running, request, with};
use crate::harness::history::{self, Sent};
use crate::harness::models::{prompt, tiny_prompt};
use crate::harness::plan::Plan;
use crate::harness::proxy::Proxy;
use crate::harness::reference;
use crate::harness::until;
use crate::replay;

const CUTS: [u32; 4] = [0, 15, 27, 30];

/// Puts a cable of its own between each stage and where it sends.
fn cables(configs: &mut [StageConfig]) -> Vec<Proxy> {
    let lay = |address: &mut Option<String>| {
        let address = address.as_mut()?;
        let proxy = Proxy::start(address.parse().unwrap());
        *address = proxy.address.to_string();
        Some(proxy)
    };
    let all = configs.iter_mut().map(|c| lay(&mut c.link.downstream).or_else(|| lay(&mut c.link.return_to)).unwrap());
    all.collect()
}

/// What befell the chain, and when what was away was back, for the figures.
struct Fault {
    what: String,
    begun: Instant,
    back: Instant,
}

/// Eight streams of all kinds through three stages, in the precise setting.
struct Scene {
    chain: Chain,
    cables: Vec<Proxy>,
    streams: Vec<Running>,
    faults: Vec<Fault>,
    /// Tokens that every stream must have before the next fault.
    due: usize,
}

impl Scene {
    async fn start() -> Self {
        let cases = reference::long_cases().await;
        let mut plan = Plan::precise(&CUTS);
        plan.engine.lanes = 8;
        plan.scheduling.drain_grace_s = 1;
        let mut proxies = Vec::new();
        let chain = Chain::spawn_with(&plan, |configs| {
            proxies = cables(configs);
            configs[0].api.as_mut().unwrap().keep_alive_ms = 100;
        });
        chain.ready().await;
        let mut streams = Vec::new();
        for case in cases {
            streams.push(Running::read(chain.client.open(&case.body).await));
        }
        Self { chain, cables: proxies, streams, faults: Vec::new(), due: 0 }
    }

    /// Waits until every stream is at least five tokens further than at the fault before, and sees that none has ended.
    async fn advance(&mut self) {
        self.due += 5;
        for stream in &mut self.streams {
            stream.tokens(self.due).await;
        }
        let counts: Vec<_> = self.streams.iter().map(Running::count).collect();
        assert!(counts.iter().all(|n| *n < reference::LONG), "{counts:?} tokens: some stream is not disturbed");
    }

    async fn formation(&self) -> u64 {
        self.chain.status(0).await.formation
    }

    /// Waits for the formation after `before`.
    async fn formed_after(&self, before: u64) {
        self.chain.until_status(0, "the next formation", |s| s.formation > before).await;
    }

    /// Starts a stage that has ended, and waits until its slice is loaded.
    async fn bring_back(&mut self, stage: usize, what: &str, begun: Instant) {
        self.chain.restart(stage);
        let mut statuses = self.chain.control(stage).await.watch(Duration::from_millis(1)).await.unwrap();
        while statuses.next().await.unwrap().expect("the stage lives").phase() < Phase::Loaded {}
        self.faults.push(Fault { what: format!("stage {stage} {what}"), begun, back: Instant::now() });
    }

    /// SIGKILL; the stage stays away for a time.
    async fn kill(&mut self, stage: usize, away: Duration) {
        self.advance().await;
        let (before, begun) = (self.formation().await, Instant::now());
        self.chain.stages[stage].kill();
        self.chain.not_ready().await;
        tokio::time::sleep(away).await;
        self.bring_back(stage, "killed", begun).await;
        self.formed_after(before).await;
    }

    /// SIGTERM in mid-stream, with a grace that is too short for the streams.
    async fn restart(&mut self, stage: usize) {
        self.advance().await;
        let (before, begun) = (self.formation().await, Instant::now());
        self.chain.stages[stage].terminate();
        assert!(self.chain.stages[stage].exit().await.success());
        self.bring_back(stage, "restarted", begun).await;
        self.formed_after(before).await;
    }

    async fn stand_still(&mut self, stage: usize, time: Duration) {
        self.advance().await;
        let begun = Instant::now();
        self.chain.stages[stage].signal("STOP");
        tokio::time::sleep(time).await;
        self.chain.stages[stage].signal("CONT");
        self.faults.push(Fault { what: format!("stage {stage} stopped for {time:?}"), begun, back: Instant::now() });
    }

    async fn cut(&mut self, link: usize) {
        self.advance().await;
        let (before, begun) = (self.formation().await, Instant::now());
        assert_eq!(self.cables[link].cut(), 1);
        self.faults.push(Fault { what: format!("link of stage {link} cut"), begun, back: begun });
        self.formed_after(before).await;
    }

    /// Reads all streams to their ends, which must be those of the undisturbed run.
    async fn end(mut self) {
        let mut answers = Vec::new();
        for stream in self.streams {
            answers.push(stream.rest().await.complete());
        }
        for fault in &self.faults {
            let tokens = answers.iter().flat_map(|a| &a.pieces).map(|p| p.at).filter(|at| *at > fault.back);
            let next = tokens.min().expect("tokens came after the fault");
            let (from_begin, from_back) = (next - fault.begun, next - fault.back);
            println!("{}: next token {from_begin:.2?} after it, {from_back:.2?} after all was there again", fault.what);
            assert!(from_back < Duration::from_secs(60), "generous");
        }
        for (case, answer) in reference::long_cases().await.iter().zip(&answers) {
            case.check(answer, "after all faults");
            assert!(answer.comments > 0, "a client that was told nothing meanwhile");
        }
        self.chain.until_lanes(0).await;
        self.chain.until_linked().await;
        self.chain.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_streams_go_on_when_the_middle_and_the_last_stage_are_killed() {
    let mut scene = Scene::start().await;
    // The longer a stage is away, the longer the pauses in which it is looked for.
    for (stage, seconds) in [(1, 0), (2, 0), (1, 5), (2, 5)] {
        scene.kill(stage, Duration::from_secs(seconds)).await;
    }
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_streams_go_on_after_a_standstill_and_cut_connections() {
    let mut scene = Scene::start().await;
    for stage in [1, 2] {
        scene.stand_still(stage, Duration::from_secs(5)).await;
    }
    for link in [0, 1, 2] {
        scene.cut(link).await;
    }
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_streams_go_on_when_every_stage_but_the_first_is_restarted() {
    let mut scene = Scene::start().await;
    for stage in [1, 2] {
        scene.restart(stage).await;
    }
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_after_faults_replays_bit_for_bit() {
    let mut plan = Plan::sample(&CUTS);
    plan.schedule = true;
    plan.scheduling.prefill_chunk = Some(128);
    plan.scheduling.prefill_chunk_shared = Some(24);
    let mut proxies = Vec::new();
    let mut chain = Chain::spawn_with(&plan, |configs| proxies = cables(configs));
    chain.ready().await;
    let sampling = json!({"temperature": 0.9, "top_p": 0.95, "repeat_penalty": 1.1, "presence_penalty": 0.2});
    let kinds = [(750, 30, json!({})), (751, 150, sampling.clone()), (752, 1, json!({})), (753, 64, sampling)];
    let mut running = Vec::new();
    for (seed, length, more) in kinds {
        let prompt = prompt(seed, length);
        let body = with(request(seed, &prompt, 60), more);
        running.push((seed, prompt, Running::read(chain.client.open(&body).await)));
    }
    // The last stage, whose log is replayed, lives on.
    for (fault, due) in [8, 16, 24, 32].into_iter().enumerate() {
        for (_, _, stream) in &mut running {
            stream.tokens(due).await;
        }
        let before = chain.status(0).await.formation;
        match fault {
            0 => {
                chain.stages[1].kill();
                chain.restart(1);
            }
            1 => assert_eq!(proxies[1].cut(), 1),
            2 => assert_eq!(proxies[2].cut(), 1),
            _ => {
                chain.stages[2].signal("STOP");
                tokio::time::sleep(Duration::from_secs(1)).await;
                chain.stages[2].signal("CONT");
                continue;
            }
        }
        chain.until_status(0, "the next formation", |s| s.formation > before).await;
    }
    let mut sent = Vec::new();
    for (seed, prompt, stream) in running {
        sent.push(Sent { seed, prompt, answer: stream.rest().await.complete() });
    }
    chain.until_lanes(0).await;
    chain.end().await;
    let ops = history::operations(&chain.schedule());
    assert_eq!(history::check(&ops, &sent, &Tokenizer::load(&plan.model).unwrap()), 4);
    replay::replays(chain.schedule(), plan.model, &sent).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_falls_silent_is_given_up() {
    let mut plan = Plan::tiny(&[0, 2, 5, 8]);
    plan.peer_deadline_ms = 2000;
    plan.engine.context_length = 4096;
    let mut proxies = Vec::new();
    let mut chain = Chain::spawn_with(&plan, |configs| proxies = cables(configs));
    chain.ready().await;
    for (link, proxy) in proxies.iter().enumerate() {
        let body = request(link as u64, &tiny_prompt(1, 40), 4000);
        let mut stream = chain.client.open(&body).await;
        stream.tokens(3).await;
        let (before, begun) = (chain.status(0).await.formation, Instant::now());
        proxy.fall_silent();
        chain.until_status(0, "the next formation", |s| s.formation > before).await;
        println!("link of stage {link}: formed again {:.1?} after it fell silent", begun.elapsed());
        let there = stream.answer.pieces.len();
        stream.tokens(there + 20).await;
        drop(stream);
        chain.until_lanes(0).await;
    }
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_go_on_when_the_middle_and_the_last_stage_die_and_return() {
    let (cases, long) = (&reference::cases().await[..3], &reference::cases().await[4]);
    let mut plan = Plan::precise(&CUTS);
    plan.scheduling.prefill_chunk_shared = Some(8);
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
    // Longer than a stage's status may be old.
    let body = with(cases[0].body.clone(), json!({"max_tokens": 900, "logit_bias": {"0": -100, "2": -100}}));
    let mut stream = chain.client.open(&body).await;
    stream.tokens(4).await;
    for stage in 1..3 {
        chain.until_status(stage, "a lane in use", |s| s.lanes_used == 1).await;
    }
    let begun = Instant::now();
    chain.stages[0].kill();
    assert!(!stream.rest().await.done, "the stream was cut");
    for stage in 1..3 {
        // Nobody tells them to free the lane: the lost connection does.
        chain.until_status(stage, "free lanes", |s| s.lanes_used == 0).await;
        println!("stage {stage} shows no lane in use {:.1?} after the death of stage 0", begun.elapsed());
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "generous: it is to take 2 s");
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
    let first = chain.status(0).await.instance;
    let begun = Instant::now();
    chain.stages[1].kill();
    chain.not_ready().await;
    println!("not ready {:.1?} after the death", begun.elapsed());
    // What comes now waits, as what runs does.
    let (client, body) = (chain.client.clone(), request(2, &prompt, 4));
    let waiting = tokio::spawn(async move { client.refused(&body).await });
    chain.until_status(0, "a request waits", |s| s.queued == 1 || s.lanes_used == 0).await;
    let answer = stream.rest().await;
    println!("an error event {:.1?} after the death, with a deadline of 2 s", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(30), "generous");
    let error = answer.error.expect("an error event");
    assert!(error["message"].as_str().unwrap().contains("did not come back"), "{error}");
    assert!(answer.done && answer.finish.is_none(), "a clean end");
    for refused in [waiting.await.unwrap(), chain.client.refused(&request(3, &prompt, 4)).await] {
        let (status, retry_after, body) = refused;
        assert_eq!(status, 503, "{body}");
        assert!(retry_after.is_some_and(|s| s.parse::<u32>().is_ok_and(|s| s > 0)), "{body}");
        assert_eq!(body["error"]["type"], "service_unavailable_error");
    }
    assert_eq!(chain.client.status("/ready").await, Some(503));
    chain.until_status(0, "no lane in use", |s| s.lanes_used == 0 && s.queued == 0).await;
    chain.restart(1);
    chain.ready().await;
    until("an answer", async || chain.client.try_open(&request(4, &prompt, 4)).await.ok()).await;
    chain.until_lanes(0).await;
    assert_eq!(chain.status(0).await.instance, first, "stage 0 lived on");
    chain.end().await;
}
