//! Chains whose model is on a server: what crosses the network, and what an interruption costs.

use std::sync::atomic::Ordering::Relaxed;

use splitmodel_control::{Phase, StageStatus};
use splitmodel_gguf::{Model, Package, SlicePlan};

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::files::{Seen, Served, Server};
use crate::harness::models::{cache, tiny};
use crate::harness::plan::Plan;
use crate::harness::{PATIENCE, until};

const CUTS: [u32; 4] = [0, 3, 6, 8];
const PROMPT: [i32; 4] = [30, 31, 32, 33];
/// What is fetched again at most: the header, the first kilobytes of the file and samples of tensors.
const HEADER: u64 = 400_000;
/// Bytes that may be on their way, or not yet noted, when a stage is killed.
const LOST: u64 = 500_000;

/// Path of the model as stage `stage` asks for it.
fn path(stage: usize) -> String {
    format!("/models/of-stage-{stage}/resolve/main/m.gguf")
}

/// A chain of three whose stages know the model by names of their own, with an empty cache.
async fn spawn(server: &Server, slices: &tempfile::TempDir) -> Chain {
    let bytes = std::fs::read(tiny(1)).unwrap();
    for stage in 0..3 {
        server.shared.put(&path(stage), Served::new(bytes.clone()));
    }
    let env = vec![("HF_ENDPOINT", server.url(""))];
    let plan = Plan { slices: slices.path().to_owned(), env, ..Plan::tiny(&CUTS) };
    let digest = Model::open(tiny(1)).unwrap().digest().to_owned();
    Chain::spawn_with(&plan, |configs| {
        for (stage, config) in configs.iter_mut().enumerate() {
            config.model.source = format!("hf://models/of-stage-{stage}/m.gguf");
            config.model.digest = Some(digest.clone());
        }
    })
}

fn of(server: &Server, stage: usize) -> Vec<Seen> {
    server.shared.seen().into_iter().filter(|s| s.path == path(stage)).collect()
}

fn sent(seen: &[Seen]) -> u64 {
    seen.iter().map(|s| s.sent.load(Relaxed)).sum()
}

/// Bytes of the packages of a stage, and of the part of them that lies on the server.
fn wanted(stage: usize) -> (u64, u64) {
    let model = Model::open(tiny(1)).unwrap();
    let slice = Package::Stage { first: CUTS[stage], end: CUTS[stage + 1] };
    let bytes = |package| SlicePlan::new(&model, package).unwrap().total_bytes();
    let far = bytes(slice) + if stage == 0 { bytes(Package::Embedding) } else { 0 };
    (far + if stage == 1 { 0 } else { bytes(Package::Tokenizer) }, far)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_that_is_killed_while_it_downloads_goes_on_and_every_stage_brings_its_slice_only() {
    let (server, slices) = (Server::start(), tempfile::tempdir_in(cache()).unwrap());
    server.shared.pace.store(250_000, Relaxed);
    let mut chain = spawn(&server, &slices).await;
    let half = |s: &StageStatus| s.total_bytes > 0 && s.fetched_bytes > s.total_bytes / 2;
    let before = chain.until_status(1, "half of it there", half).await;
    assert_eq!((before.phase(), before.total_bytes), (Phase::Fetching, wanted(1).0));
    chain.stages[1].kill();
    let first = of(&server, 1);
    chain.restart(1);
    let after = chain.until_status(1, "bytes again", |s| s.fetched_bytes > 0).await;
    assert!(after.fetched_bytes + LOST > before.fetched_bytes, "{} of {before:?}", after.fetched_bytes);
    // The chain is formed once, when the last stage is ready.
    chain.ready().await;
    server.shared.pace.store(0, Relaxed);
    chain.client.ask(&request(1, &PROMPT, 20)).await.complete();
    for stage in 0..3 {
        let (seen, (total, far)) = (of(&server, stage), wanted(stage));
        let (again, headers) = if stage == 1 { (LOST, 2 * HEADER) } else { (0, HEADER) };
        println!("stage {stage}: {} bytes in {} requests for a slice of {far}", sent(&seen), seen.len());
        assert!(sent(&seen) <= far + headers + again, "stage {stage}: {} bytes, slice of {far}", sent(&seen));
        assert_eq!(chain.status(stage).await.fetched_bytes, total);
    }
    let second = &of(&server, 1)[first.len()..];
    let begun = |seen: &[Seen]| seen.iter().max_by_key(|s| s.range.end - s.range.start).unwrap().range.start;
    assert!(begun(second) > begun(&first) + 300_000, "{first:?} and then {second:?}");

    // With its slice on disk a stage needs nobody.
    drop(server);
    chain.stages[2].kill();
    chain.restart(2);
    chain.until_linked().await;
    chain.ready().await;
    chain.client.ask(&request(1, &PROMPT, 20)).await.complete();
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_lives_as_long_as_bytes_come_however_slowly() {
    use splitmodel_control::health::{HealthChecker, Probe};
    let (server, slices) = (Server::start(), tempfile::tempdir_in(cache()).unwrap());
    server.shared.pace.store(50_000, Relaxed);
    let mut chain = spawn(&server, &slices).await;
    let mut health = HealthChecker::new(&chain.configs[0].health.bind.to_string(), PATIENCE).unwrap();
    let mut bytes = 0;
    for _ in 0..5 {
        let status = chain.until_status(0, "more bytes", |s| s.fetched_bytes > bytes).await;
        bytes = status.fetched_bytes;
        assert_eq!(status.phase(), Phase::Fetching);
        assert!(health.check(Probe::Liveness).await.unwrap());
        assert!(!health.check(Probe::Readiness).await.unwrap());
    }
    assert!(chain.stages.iter_mut().all(|s| s.runs()));
    server.shared.pace.store(0, Relaxed);
    chain.ready().await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_fetched_ends_the_stage_with_the_reason() {
    use crate::harness::process::last_words;
    let (server, slices) = (Server::start(), tempfile::tempdir_in(cache()).unwrap());
    let mut chain = spawn(&server, &slices).await;
    chain.stages[1].kill();
    server.shared.files.lock().unwrap().remove(&path(1));
    chain.restart(1);
    assert_eq!(chain.stages[1].exit().await.code(), Some(3));
    let words = std::fs::read_to_string(last_words(chain.dir(), 1)).unwrap();
    assert!(words.contains("HTTP 404") && words.contains("of-stage-1"), "{words}");
    assert_eq!(until("a log", async || Some(chain.stages[1].log())).await.matches("HTTP 404").count(), 1);
    // Put right, it comes back by itself, and the others have waited.
    server.shared.put(&path(1), Served::new(std::fs::read(tiny(1)).unwrap()));
    chain.restart(1);
    chain.ready().await;
    chain.end().await;
    assert_eq!(std::fs::read_to_string(last_words(chain.dir(), 0)).unwrap_or_default(), "");
}
