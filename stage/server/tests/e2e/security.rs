//! Who is let into a chain, and what the others are told.

use std::time::Duration;

use splitmodel_control::ControlClient;
use splitmodel_control::config::Activations;
use splitmodel_link::setup::Role;
use splitmodel_link::{LinkError, dial};

use crate::harness::certificates::Authority;
use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::{cache, tiny};
use crate::harness::peer;
use crate::harness::plan::Plan;

const PROMPT: [i32; 4] = [30, 31, 32, 33];

fn plan() -> Plan {
    Plan::tiny(&[0, 2, 5, 8])
}

/// Waits until the first stage's last error has all of `words`; every process lives on, and no chain is formed.
async fn refused(chain: &mut Chain, stage: usize, words: &[&str]) {
    let what = format!("an error with {words:?}");
    let status = chain.until_status(stage, &what, |s| words.iter().all(|w| s.last_error.contains(w))).await;
    println!("stage {stage} says: {}", status.last_error);
    assert_eq!(chain.client.status("/ready").await, Some(503));
    assert!(chain.stages.iter_mut().all(|s| s.runs()));
}

/// Restarts a stage with the configuration it should have had: the chain forms and answers.
async fn put_right(mut chain: Chain, stage: usize, right: splitmodel_control::StageConfig) {
    chain.stages[stage].terminate();
    assert!(chain.stages[stage].exit().await.success());
    chain.configs[stage] = right;
    chain.restart(stage);
    chain.ready().await;
    chain.until_linked().await;
    chain.client.ask(&request(1, &PROMPT, 5)).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_with_certificates_serves_and_lets_nobody_else_in() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let open = Chain::start(&plan()).await;
    let want = open.client.ask(&request(1, &PROMPT, 20)).await;
    drop(open);
    let plan = Plan { tls: Some(Authority::new(dir.path(), "right").chain(3)), ..plan() };
    let mut chain = Chain::start(&plan).await;
    assert_eq!(chain.client.ask(&request(1, &PROMPT, 20)).await.text, want.text);
    chain.status(2).await;

    let stranger = Authority::new(dir.path(), "stranger").stage(0, 3);
    let wait = Duration::from_secs(20);
    let address = chain.configs[1].control.bind.to_string();
    let mut tries = Vec::new();
    match ControlClient::connect_tls(&address, "stage-1.e2e", &stranger, wait).await {
        Ok(mut control) => tries.push(control.status().await.map(|_| ())),
        Err(e) => tries.push(Err(e)),
    }
    match ControlClient::connect(&address, wait).await {
        Ok(mut control) => tries.push(control.status().await.map(|_| ())),
        Err(e) => tries.push(Err(e)),
    }
    assert!(tries.iter().all(Result::is_err), "{tries:?}");
    let plain = dial(chain.configs[1].link.bind, &peer::dialer(peer::setup(&chain, Role::Data, 0)))
        .await
        .expect_err("not let in");
    println!("plain TCP to a stage with certificates: {plain}");
    chain.client.ask(&request(2, &PROMPT, 5)).await;
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_with_a_certificate_of_another_authority_is_refused() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let plan = Plan { tls: Some(Authority::new(dir.path(), "right").chain(3)), ..plan() };
    let wrong = Authority::new(dir.path(), "wrong").stage(1, 3);
    let mut right = None;
    let mut chain = Chain::spawn_with(&plan, |configs| {
        right = Some(configs[1].clone());
        configs[1].link.tls = Some(wrong);
    });
    refused(&mut chain, 0, &["stage 1 at", "not signed by our CA"]).await;
    put_right(chain, 1, right.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_with_another_stages_certificate_is_refused() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let certificates = Authority::new(dir.path(), "right").chain(3);
    let plan = Plan { tls: Some(certificates.clone()), ..plan() };
    let mut right = None;
    let mut chain = Chain::spawn_with(&plan, |configs| {
        right = Some(configs[2].clone());
        configs[2].link.tls = Some(certificates[1].clone());
    });
    refused(&mut chain, 1, &["stage 2 at", "not for \"stage-2.e2e\""]).await;
    put_right(chain, 2, right.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stage_of_another_model_is_refused_with_both_digests() {
    let other = tiny(2);
    let digests = [tiny(1), other.clone()].map(|m| splitmodel_gguf::Model::open(m).unwrap().digest().to_owned());
    let mut right = None;
    let mut chain = Chain::spawn_with(&plan(), |configs| {
        right = Some(configs[1].clone());
        configs[1].model.source = other.display().to_string();
    });
    refused(&mut chain, 0, &["stage 1 at", "model", &digests[0], &digests[1]]).await;
    put_right(chain, 1, right.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stages_with_unlike_settings_are_refused_with_both_values() {
    // Cells: 4 × 1024 and 4 × 2048, and 256 of the probe.
    type Change = fn(&mut splitmodel_control::StageConfig);
    let unlike: [(Change, &[&str]); 4] = [
        (|c| c.engine.context_length = 2048, &["n_ctx", "4096", "8192"]),
        (|c| c.engine.n_ubatch = 256, &["n_ubatch", "512", "256"]),
        (|c| c.link.activations = Activations::F16, &["activations", "f32", "f16"]),
        (|c| c.layers = [3, 5], &["layers", "2", "3"]),
    ];
    for (change, words) in unlike {
        let mut plan = plan();
        plan.scheduling.prefill_chunk = Some(128);
        let mut right = None;
        let mut chain = Chain::spawn_with(&plan, |configs| {
            right = Some(configs[1].clone());
            change(&mut configs[1]);
        });
        refused(&mut chain, 0, words).await;
        put_right(chain, 1, right.unwrap()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_with_another_llama_cpp_is_refused_with_both_versions() {
    let mut chain = Chain::start(&plan()).await;
    let mut old = peer::dialer(peer::setup(&chain, Role::Data, 0));
    old.setup.versions.llama_cpp = "b1".to_owned();
    let error = dial(chain.configs[1].link.bind, &old).await.expect_err("not let in");
    let text = error.to_string();
    println!("{text}");
    assert!(matches!(error, LinkError::Refused(_)), "{text}");
    assert!(text.contains("\"b1\"") || text.contains("b1"), "{text}");
    assert!(text.contains(&splitmodel_engine::llama_version()), "{text}");
    // The chain did not notice.
    chain.client.ask(&request(2, &PROMPT, 5)).await;
    assert_eq!(chain.client.metric("splitmodel_formations").await, 1.0);
    chain.end().await;
}
