//! An engine that never answers, in a chain of one: no process is needed, only that nobody works off its queue.

use std::sync::Arc;
use std::time::Duration;

use splitmodel_chain::scheduler::{Limits, Request};
use splitmodel_control::{Phase, StageStatus, StatusHub};
use splitmodel_link::setup::InstanceId;
use splitmodel_server::coordinator::{Coordinator, Deadlines};
use splitmodel_server::engine;
use splitmodel_server::metrics::Metrics;
use splitmodel_server::wiring::{Identity, Parts, Wiring};
use tokio_util::sync::CancellationToken;

use crate::harness::models::cache;
use crate::harness::plan::Plan;
use crate::harness::until;

#[tokio::test]
async fn an_engine_that_does_not_answer_shows_in_the_status() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let config = Plan::tiny(&[0, 8]).configs(dir.path()).remove(0);
    let (queue, _nobody_works_these_off) = engine::queue();
    let (status, shutdown) = (StatusHub::new(StageStatus::default()), CancellationToken::new());
    let limits = Limits {
        lanes: 1,
        context: 64,
        max_in_flight: 1,
        max_rows: 8,
        prefill_chunk: 8,
        prefill_chunk_shared: 8,
        max_queue: 1,
        max_attempts: 1,
        cells: 4096,
        cache: splitmodel_cache::Settings::default(),
    };
    let minute = Duration::from_secs(60);
    let deadlines = Deadlines { admission: minute, recovery: minute, step: Duration::ZERO, probe: minute };
    let probe = Request { prompt: vec![1], max_tokens: 1, ..Request::default() };
    let coordinator = Coordinator::new(limits, deadlines, queue.clone(), probe, false);
    let identity = Identity {
        instance: InstanceId(1),
        model: String::new(),
        n_embd: 1,
        n_ctx: 64,
        lanes: 2,
        llama_cpp: String::new(),
    };
    let parts = Parts {
        queue,
        status: status.clone(),
        metrics: Arc::new(Metrics::new(0, Arc::default(), Arc::default())),
        conditioning: Arc::default(),
        tls: None,
        shutdown: shutdown.clone(),
    };
    let links = tokio::spawn(Arc::new(Wiring::new(&config, identity, parts)).run(Some(coordinator.clone())));
    until("the chain of one", async || (status.snapshot().phase() == Phase::Linked).then_some(())).await;
    assert_eq!(status.snapshot().last_error, "");
    until("an error", async || {
        coordinator.tick();
        status.snapshot().last_error.contains("the engine does not answer").then_some(())
    })
    .await;
    // The formation goes on: there is no other to be had.
    assert_eq!(status.snapshot().phase(), Phase::Linked);
    shutdown.cancel();
    links.await.unwrap().unwrap();
}
