//! Each class of error reaches a client as its status and body, and none of them ends a connection that others use.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::harness::chain::Chain;
use crate::harness::client::{Client, Running, request, with};
use crate::harness::models::{cache, prompt};
use crate::harness::plan::Plan;
use crate::harness::until;

const CUTS: [u32; 4] = [0, 15, 27, 30];

/// A refusal's status, type, code and whether it says when to come back.
type Refusal = (u16, String, String, bool);

async fn refusal(client: &Client, body: Value) -> Refusal {
    refusal_and_words(client, body).await.0
}

/// A refusal and its message.
async fn refusal_and_words(client: &Client, body: Value) -> (Refusal, String) {
    let (status, after, body) = client.refused(&with(body, json!({"stream": false}))).await;
    let word = |key: &str| body["error"][key].as_str().unwrap_or("-").to_owned();
    println!("{status}: {body}");
    ((status, word("type"), word("code"), after.is_some()), word("message"))
}

fn error(status: u16, kind: &str, code: &str, again: bool) -> Refusal {
    (status, kind.to_owned(), code.to_owned(), again)
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_unsupported_and_busy_disturb_nobody() {
    let mut plan = Plan::sample(&CUTS);
    (plan.engine.lanes, plan.scheduling.max_queue, plan.scheduling.admission_deadline_s) = (1, 1, 2);
    let mut chain = Chain::start(&plan).await;
    let formation = chain.status(0).await.formation;
    let client = chain.client.clone();
    // Found out by the last stage only: the schema wants `null`, and every token that could begin it is forbidden.
    let bans: serde_json::Map<String, Value> = (0..49_152).map(|t| (t.to_string(), json!(-100))).collect();
    let schema = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}});
    let more = json!({"logit_bias": bans, "response_format": schema, "ignore_eos": false});
    let nothing = with(request(1, &prompt(1, 9), 4), more);
    assert_eq!(refusal(&client, nothing).await, error(400, "invalid_request_error", "-", false));
    let over = refusal(&client, request(1, &prompt(1, 1024), 4)).await;
    assert_eq!(over, error(400, "invalid_request_error", "context_length_exceeded", false));
    let unsupported = refusal(&client, with(request(1, &[1], 4), json!({"suffix": "an end"}))).await;
    assert_eq!(unsupported, error(400, "invalid_request_error", "unsupported_parameter", false));
    // One lane, one place in the queue: the second waits until its deadline, the third is not let in.
    let mut running = Running::read(client.open(&request(2, &prompt(2, 5), 900)).await);
    running.tokens(1).await;
    let waits = {
        let client = client.clone();
        tokio::spawn(async move { refusal(&client, request(3, &[1], 4)).await })
    };
    chain.until_status(0, "one to wait", |s| s.queued == 1).await;
    assert_eq!(
        refusal(&client, request(4, &[1], 4)).await,
        error(429, "rate_limit_error", "rate_limit_exceeded", true)
    );
    assert_eq!(waits.await.unwrap(), error(503, "service_unavailable_error", "timeout", true));
    assert_eq!(running.rest().await.complete().pieces.len(), 900);
    assert_eq!(chain.status(0).await.formation, formation, "an error broke the chain");
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_cannot_compute_fails_its_request_only() {
    let mut plan = Plan::sample(&CUTS);
    // Less room than four sessions may want: the fifth hundred of the second one finds none.
    (plan.engine.context_length, plan.engine.n_ctx) = (1024, Some(1024));
    plan.kv_cache.enabled = false;
    let mut chain = Chain::start(&plan).await;
    let formation = chain.status(0).await.formation;
    let mut running = Running::read(chain.client.open(&request(5, &prompt(5, 600), 200)).await);
    running.tokens(1).await;
    // Asked once only: the stages try it several times, and the answer that holds the cells must outlast them.
    let (failed, why) = refusal_and_words(&chain.client, request(6, &prompt(6, 900), 4)).await;
    assert_eq!(failed, error(500, "server_error", "backend_error", false));
    assert!(why.contains("KV cache is full") && why.contains("stage"), "{why}");
    assert_eq!(running.rest().await.complete().pieces.len(), 200);
    chain.client.ask(&request(7, &prompt(7, 200), 4)).await;
    assert_eq!(chain.status(0).await.formation, formation, "an error broke the chain");
    chain.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fails_is_told_and_the_chain_lives_on() {
    let dir = tempfile::tempdir_in(cache()).unwrap();
    let mut plan = Plan::sample(&CUTS);
    plan.slices = dir.path().join("slices");
    let mut chain = Chain::start(&plan).await;
    let formation = chain.status(0).await.formation;
    // The table of embeddings is read row by row: cut it short under the running stage.
    let files = std::fs::read_dir(plan.slices.join("entries")).unwrap().map(|e| e.unwrap().path());
    let about = |p: &PathBuf| std::fs::read_to_string(p.with_extension("json")).is_ok_and(|t| t.contains("embedding"));
    let table = files.filter(|p| p.extension().is_some_and(|e| e == "gguf")).find(about).unwrap();
    let whole = std::fs::read(&table).unwrap();
    let file = std::fs::File::options().write(true).open(&table).unwrap();
    file.set_len(whole.len() as u64 / 2).unwrap();
    let failed = refusal(&chain.client, request(8, &[40_000, 45_000, 48_000], 4)).await;
    assert_eq!(failed, error(500, "server_error", "io_error", false));
    // The disk is well again.
    std::fs::write(&table, whole).unwrap();
    until("an answer", async || (chain.client.whole(request(9, &[40_000], 4)).await.0 == 200).then_some(())).await;
    assert_eq!(chain.status(0).await.formation, formation, "an error broke the chain");
    chain.end().await;
}
