//! Prefixes as files: a chain whose processes all start again begins where they ended, and what happened to the files meanwhile
//! changes no text.

use std::path::{Path, PathBuf};

use splitmodel_control::config::{CacheType, FlashAttention};
use splitmodel_gguf::tiny::Arch;

use crate::harness::chain::Chain;
use crate::harness::client::request;
use crate::harness::models::{cache, tiny_of, tiny_prompt};
use crate::harness::plan::Plan;

fn plan(arch: Arch, dir: &Path) -> Plan {
    let mut plan = Plan::of(tiny_of(arch), &[0, 2, 5, 8]);
    plan.slices = dir.to_owned();
    plan.kv_cache.disk_bytes = 1 << 30;
    plan.kv_cache.min_tokens = 16;
    plan.kv_cache.shared_prefix_stride_tokens = 32;
    // Whatever is computed beside what gives the same bits.
    plan.engine.flash_attn = FlashAttention::Off;
    plan.engine.cache_type_k = CacheType::F32;
    plan.engine.cache_type_v = CacheType::F32;
    plan
}

async fn ask(chain: &Chain) -> (String, u64) {
    let (status, answer) = chain.client.whole(request(7, &tiny_prompt(970, 200), 12)).await;
    assert_eq!(status, 200, "{answer}");
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), cached.unwrap_or(0))
}

/// Ends every process and starts it again, with what `between` does in between.
async fn again(chain: &mut Chain, between: impl FnOnce()) {
    chain.until_lanes(0).await;
    chain.end().await;
    between();
    (0..chain.stages.len()).for_each(|stage| chain.restart(stage));
    chain.ready().await;
}

/// Files of a stage's prefixes.
fn files(dir: &Path, stage: usize, extension: &str) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir.join(format!("prefixes/e2e-{stage}"))).unwrap().map(|e| e.unwrap().path());
    all.filter(|p| p.extension().is_some_and(|e| e == extension)).collect()
}

async fn metric(chain: &Chain, stage: usize, outcome: &str) -> Option<f64> {
    let url = format!("http://{}/metrics", chain.configs[stage].metrics.unwrap().bind);
    let text = reqwest::get(url).await.unwrap().text().await.unwrap();
    let outcome = format!("outcome=\"{outcome}\"");
    let line = text.lines().find(|l| l.starts_with("splitmodel_kv_disk_total{") && l.contains(&outcome))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_that_starts_again_begins_where_it_ended() {
    for (arch, least) in [(Arch::Llama, 190), (Arch::FalconH1, 128)] {
        let dir = tempfile::tempdir_in(cache()).unwrap();
        let mut chain = Chain::start(&plan(arch, dir.path())).await;
        let (text, cached) = ask(&chain).await;
        assert_eq!(cached, 0);
        again(&mut chain, || ()).await;
        let (warm, cached) = ask(&chain).await;
        assert!(warm == text && cached >= least, "{arch:?}: {cached} tokens, {warm:?} instead of {text:?}");
        assert_eq!(metric(&chain, 2, "read").await, Some(1.0));

        // One stage's files are not what was written.
        again(&mut chain, || {
            let found = files(dir.path(), 1, "prefix");
            assert!(!found.is_empty());
            for file in found {
                let mut bytes = std::fs::read(&file).unwrap();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                std::fs::write(file, bytes).unwrap();
            }
        })
        .await;
        assert_eq!(ask(&chain).await, (text.clone(), 0), "{arch:?}");
        assert!(metric(&chain, 1, "quarantined").await.unwrap() >= 1.0 && !files(dir.path(), 1, "bad").is_empty());
        let (warm, cached) = ask(&chain).await;
        assert!(warm == text && cached >= least, "{arch:?}: it was recorded anew: {cached} tokens");

        // Stage 0's directory is none; what is kept now is found again nevertheless.
        let directory = dir.path().join("prefixes/e2e-0/directory");
        again(&mut chain, || std::fs::write(&directory, "nonsense").unwrap()).await;
        assert_eq!(ask(&chain).await, (text.clone(), 0), "{arch:?}");
        again(&mut chain, || ()).await;
        let (warm, cached) = ask(&chain).await;
        assert!(warm == text && cached >= least, "{arch:?}: {cached} tokens");
        chain.end().await;
    }
}
