//! Certificates that are replaced while the chain serves.

use std::time::Duration;

use splitmodel_control::{Conditioning, ControlClient};
use splitmodel_link::setup::Role;
use splitmodel_link::tls::TlsError;
use splitmodel_link::{LinkError, TlsStore, dial};

use crate::harness::certificates::{Authority, Secret, name};
use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::cache;
use crate::harness::peer;
use crate::harness::plan::Plan;
use crate::harness::until;

const PROMPT: [i32; 4] = [30, 31, 32, 33];
const STAGES: usize = 3;

/// The last stage dies and returns while a stream runs.
async fn form_again(chain: &mut Chain) {
    chain.until_status(0, "the stream runs", |s| s.lanes_used == 1).await;
    chain.stages[2].kill();
    chain.not_ready().await;
    chain.restart(2);
    chain.ready().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_are_rotated_under_a_running_stream() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let (old, new) = (Authority::new(dir.path(), "old"), Authority::new(dir.path(), "new"));
    let (before, after) = (old.chain(STAGES), new.chain(STAGES));
    let mut secrets: Vec<_> =
        before.iter().enumerate().map(|(i, c)| Secret::new(dir.path().join(format!("secret-{i}")), c)).collect();
    let mut plan = Plan::tiny(&[0, 2, 5, 8]);
    plan.engine.context_length = 2048;
    plan.tls = Some(secrets.iter().map(|s| s.config(STAGES)).collect());
    let mut chain = Chain::start(&plan).await;
    // So that the stream outlives what follows.
    let mut control = chain.control(0).await;
    control.set_conditioning(Conditioning { delay: Duration::from_millis(4), bytes_per_second: 0 }).await.unwrap();
    let mut stream = chain.client.open(&request(1, &PROMPT, 2000)).await;
    stream.tokens(5).await;

    for (secret, files) in secrets.iter_mut().zip(&after) {
        secret.put(files);
    }
    stream.tokens(30).await;
    // A new connection shows the new certificate and wants one of its authority; one that runs stays.
    chain.status(1).await;
    control.status().await.unwrap();
    let mut stale = before[0].clone();
    stale.ca.clone_from(&after[0].ca);
    let address = chain.configs[1].control.bind.to_string();
    match ControlClient::connect_tls(&address, &name(1), &stale, Duration::from_secs(20)).await {
        Ok(mut control) => drop(control.status().await.expect_err("the old certificate")),
        Err(e) => println!("control service: {e}"),
    }
    for (to, role, from) in [(1, Role::Data, 0), (2, Role::Data, 1), (0, Role::Return, 2)] {
        let mut dialer = peer::dialer(peer::setup(&chain, role, from));
        let store = TlsStore::from_pem_files(&after[from].ca, &before[from].cert, &before[from].key).unwrap();
        dialer.tls = Some((store, name(to)));
        let error = dial(chain.configs[to].link.bind, &dialer).await.expect_err("the old certificate");
        println!("stage {to}: {error}");
        assert!(matches!(error, LinkError::Tls(TlsError::Rejected(_))), "{error}");
    }
    assert_eq!(chain.client.metric("splitmodel_formations").await, 1.0, "no link was lost");

    // The links of the next formation are made with the new ones, by stages that were never restarted.
    form_again(&mut chain).await;
    for stage in 0..2 {
        let log = chain.stages[stage].log();
        let told = log.lines().filter(|l| l.contains("certificates were replaced")).count();
        assert_eq!(told, 1, "stage {stage}: {log}");
    }

    // A half-written certificate: the last good one stays in use, and is enough for another formation.
    let half = dir.path().join("half.pem");
    let text = std::fs::read(&after[1].cert).unwrap();
    std::fs::write(&half, &text[..text.len() / 2]).unwrap();
    let mut broken = after[1].clone();
    broken.cert = half;
    secrets[1].put(&broken);
    form_again(&mut chain).await;
    let log = chain.stages[1].log();
    let warnings: Vec<_> = log.lines().filter(|l| l.contains("certificates cannot be used")).collect();
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("WARN") && warnings[0].contains("secret-1/tls.crt"), "{}", warnings[0]);

    secrets[1].put(&after[1]);
    control = chain.control(0).await;
    control.set_conditioning(Conditioning::default()).await.unwrap();
    let answer = stream.rest().await.complete();
    assert_eq!(answer.pieces.len(), 2000);
    until("the repaired certificate", async || chain.control(1).await.status().await.ok()).await;
    chain.end().await;
}
