//! The control service and the health service of each stage.

use std::time::{Duration, Instant};

use splitmodel_control::health::pb::HealthCheckRequest;
use splitmodel_control::health::pb::health_check_response::ServingStatus;
use splitmodel_control::health::pb::health_client::HealthClient;
use splitmodel_control::{ClientError, Conditioning, ControlClient, Phase};
use tonic::Code;
use tonic::transport::Endpoint;

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::{LAYERS, cache, prompt};
use crate::harness::plan::Plan;
use crate::harness::{PATIENCE, until};

const CUTS: [u32; 4] = [0, 15, 27, 30];

#[tokio::test(flavor = "multi_thread")]
async fn the_status_shows_a_stage_from_fetching_to_serving() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let mut plan = Plan::precise(&CUTS);
    plan.slices = dir.path().join("slices"); // nothing is there: everything is fetched
    let mut chain = Chain::spawn(&plan);
    let watch = |stage: usize| {
        let address = chain.configs[stage].control.bind.to_string();
        let end = if stage == 0 { Phase::Serving } else { Phase::Linked };
        tokio::spawn(async move {
            let begun = Instant::now();
            let mut control = loop {
                match ControlClient::connect(&address, PATIENCE).await {
                    Ok(control) => break control,
                    Err(_) => assert!(begun.elapsed() < PATIENCE),
                }
            };
            let mut stream = control.watch(Duration::from_millis(1)).await.unwrap();
            let mut seen = Vec::new();
            loop {
                let status = stream.next().await.unwrap().expect("the stage lives");
                let done = status.phase() == end;
                seen.push(status);
                if done {
                    return seen;
                }
            }
        })
    };
    let watchers: Vec<_> = (0..3).map(watch).collect();
    for (stage, watcher) in watchers.into_iter().enumerate() {
        let seen = tokio::time::timeout(PATIENCE, watcher).await.unwrap().unwrap();
        let mut phases: Vec<_> = seen.iter().map(|s| s.phase()).collect();
        phases.dedup();
        println!("stage {stage}: {phases:?} in {} statuses", seen.len());
        assert!(phases.is_sorted(), "{phases:?}");
        for phase in [Phase::Fetching, Phase::Loading] {
            assert!(phases.contains(&phase), "{phase:?} is not in {phases:?}");
        }
        assert!(seen.is_sorted_by_key(|s| s.fetched_bytes));
        let under_way = seen.iter().filter(|s| s.fetched_bytes > 0 && s.fetched_bytes < s.total_bytes);
        assert!(under_way.count() > 1, "no progress was seen");
        let last = seen.last().unwrap();
        assert_eq!(last.fetched_bytes, last.total_bytes);
        let layers = u64::from(CUTS[stage + 1] - CUTS[stage]);
        assert!(last.total_bytes > layers * 10_000_000, "{} bytes for {layers} layers", last.total_bytes);
        assert_eq!((last.first_layer, last.end_layer, last.n_layers), (CUTS[stage], CUTS[stage + 1], LAYERS));
        assert_eq!((last.stage, last.stages, last.lanes, last.chain.as_str()), (stage as u32, 3, 4, "e2e"));
        let memory = last.memory.as_ref().unwrap();
        assert!(memory.weights > layers * 10_000_000 && memory.kv > 0 && memory.compute > 0, "{memory:?}");
        assert_eq!((last.last_error.as_str(), last.activations.as_str()), ("", "f32"));
        assert!(last.formation > 0 && last.instance.len() == 32 && !last.version.is_empty());
    }
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_measure_the_chain_and_injected_delays() {
    let mut chain = Chain::start(&Plan::sample(&CUTS)).await;
    let mut first = chain.control(0).await;
    let best = async |control: &mut ControlClient| {
        let mut best = Duration::MAX;
        for _ in 0..8 {
            best = best.min(control.probe().await.unwrap());
        }
        best
    };
    let plain = best(&mut first).await;
    let delay = Duration::from_millis(40);
    let mut previous = plain;
    for stage in 0..3 {
        let mut control = chain.control(stage).await;
        control.set_conditioning(Conditioning { delay, bytes_per_second: 0 }).await.unwrap();
        let now = best(&mut first).await;
        println!("round trip with {} delayed hops: {now:.1?}, before {previous:.1?}", stage + 1);
        assert!(now >= delay * (stage as u32 + 1), "{now:?}");
        previous = now;
    }
    for stage in 0..3 {
        chain.control(stage).await.set_conditioning(Conditioning::default()).await.unwrap();
    }
    assert!(best(&mut first).await < delay);

    // 100 rows of 576 floats at 100 kB/s: 2.3 s.
    let body = request(1, &prompt(1, 101), 1);
    let slow = Conditioning { delay: Duration::ZERO, bytes_per_second: 100_000 };
    first.set_conditioning(slow).await.unwrap();
    let begun = Instant::now();
    let answer = chain.client.ask(&body).await;
    assert!(begun.elapsed() > Duration::from_secs(2), "{:?}", begun.elapsed());
    first.set_conditioning(Conditioning::default()).await.unwrap();
    assert_eq!(chain.client.ask(&body).await.text, answer.text);

    // Told to form anew, it does; a formation that is over is not ended twice.
    let formation = chain.status(0).await.formation;
    assert!(first.form_again(formation, "a test").await.unwrap());
    assert_eq!(chain.client.ask(&body).await.text, answer.text);
    assert_eq!(chain.status(0).await.formation, formation + 1);
    assert!(!first.form_again(formation, "a test").await.unwrap());
    assert_eq!(chain.client.ask(&body).await.text, answer.text);
    assert_eq!(chain.status(0).await.formation, formation + 1);
    let refused = chain.control(1).await.form_again(formation, "a test").await.unwrap_err();
    assert!(matches!(&refused, ClientError::Refused { code: Code::Unimplemented, .. }), "{refused}");

    let refused = chain.control(1).await.probe().await.unwrap_err();
    assert!(matches!(&refused, ClientError::Refused { code: Code::Unimplemented, .. }), "{refused}");
    chain.stages[2].kill();
    chain.not_ready().await;
    let refused = first.probe().await.unwrap_err();
    assert!(matches!(&refused, ClientError::Refused { code: Code::Unavailable, .. }), "{refused}");
    chain.restart(2);
    chain.ready().await;
    best(&mut first).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn drain_by_the_control_service_finishes_streams_and_ends_the_process() {
    let mut plan = Plan::tiny(&[0, 3, 8]);
    plan.engine.context_length = 4096;
    let mut chain = Chain::start(&plan).await;
    let mut stream = chain.client.open(&request(1, &[30, 31, 32], 2000)).await;
    stream.tokens(1).await;
    let mut control = chain.control(0).await;
    let mut watch = control.watch(Duration::from_millis(1)).await.unwrap();
    control.drain(None).await.unwrap();
    assert_eq!(stream.rest().await.complete().pieces.len(), 2000);
    assert!(chain.stages[0].exit().await.success());
    let mut last = None;
    while let Ok(Some(status)) = watch.next().await {
        last = Some(status.phase());
    }
    assert_eq!(last, Some(Phase::Draining));

    // Without a grace, at once.
    chain.control(1).await.drain(Some(Duration::ZERO)).await.unwrap();
    assert!(chain.stages[1].exit().await.success());
}

async fn health(address: &str, service: &str) -> Result<ServingStatus, tonic::Status> {
    let channel = Endpoint::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let request = HealthCheckRequest { service: service.to_owned() };
    HealthClient::new(channel).check(request).await.map(|r| r.into_inner().status())
}

#[tokio::test(flavor = "multi_thread")]
async fn health_has_a_port_of_its_own_and_serves_nothing_else() {
    use ServingStatus::{NotServing, Serving};
    let mut chain = Chain::start(&Plan::tiny(&[0, 3, 8])).await;
    let addresses: Vec<_> = chain.configs.iter().map(|c| c.health.bind.to_string()).collect();
    for address in &addresses {
        for service in ["startup", "liveness", "readiness", ""] {
            assert_eq!(health(address, service).await.unwrap(), Serving, "{service} at {address}");
        }
        assert_eq!(health(address, "other").await.unwrap_err().code(), Code::NotFound);
        let mut control = ControlClient::connect(address, PATIENCE).await.unwrap();
        let refused = control.status().await.unwrap_err();
        assert!(matches!(&refused, ClientError::Refused { code: Code::Unimplemented, .. }), "{refused}");
    }
    let control = chain.configs[0].control.bind.to_string();
    assert_eq!(health(&control, "readiness").await.unwrap_err().code(), Code::Unimplemented);

    chain.stages[1].kill();
    chain.not_ready().await;
    let turned = async |want| {
        until("readiness", async || (health(&addresses[0], "readiness").await.unwrap() == want).then_some(())).await;
    };
    turned(NotServing).await;
    for service in ["startup", "liveness"] {
        assert_eq!(health(&addresses[0], service).await.unwrap(), Serving);
    }
    chain.restart(1);
    turned(Serving).await;
    chain.end().await;
}
