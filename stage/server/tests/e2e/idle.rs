//! An idle chain uses no CPU.

use std::time::Duration;

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::prompt;
use crate::harness::plan::Plan;

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_chain_uses_less_than_one_percent_of_a_core_per_stage() {
    let mut chains = Vec::new();
    for threads in [1, 2] {
        let mut plan = Plan::sample(&[0, 15, 27, 30]);
        plan.engine.threads = Some(threads);
        let chain = Chain::start(&plan).await;
        // Threads have worked, with one row and with many.
        chain.client.ask(&request(1, &prompt(1, 40), 4)).await;
        chains.push(chain);
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let ticks = || -> Vec<u64> { chains.iter().flat_map(|c| &c.stages).map(|s| s.cpu_ticks()).collect() };
    let before = ticks();
    tokio::time::sleep(Duration::from_secs(5)).await;
    let used: Vec<u64> = ticks().iter().zip(&before).map(|(a, b)| a - b).collect();
    println!("CPU of idle stages in 5 s, in units of 10 ms: {used:?} (one thread, then two)");
    assert!(used.iter().all(|t| *t < 5), "1 % of 5 s is 5 units of 10 ms: {used:?}");
    for chain in &mut chains {
        chain.end().await;
    }
}
