//! Threads of an idle slice sleep: on a node that serves several stages they must not eat the others' cores.
#![allow(clippy::unwrap_used, reason = "test code")]
#![cfg(target_os = "linux")]

mod common;

use common::{Chain, config, prompt, run, whole};
use splitmodel_engine::EngineConfig;

/// CPU time of this process, in ticks of 10 ms.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn idle_threads_use_no_cpu() {
    let config = EngineConfig { threads: 3, threads_batch: 2, ..config() };
    let mut chain = Chain(vec![whole(&config)]);
    let tokens = prompt();
    chain.decode(&run(0, 0, &tokens)).unwrap();
    chain.decode(&[(0, tokens.len() as i32, tokens[0], true)]).unwrap();
    let before = ticks();
    assert!(before > 0);
    std::thread::sleep(std::time::Duration::from_secs(1));
    let used = ticks() - before;
    assert!(used <= 10, "{used} ticks of CPU in an idle second");
}
