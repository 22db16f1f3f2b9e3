//! Exact states: models whose caches cannot be cut begin where an earlier prompt of theirs was recorded, with the bits of a
//! process that does the same, and the text of one that has nothing.

use serde_json::{Value, json};
use splitmodel_chain::schedule::Op;
use splitmodel_control::config::{CacheType, FlashAttention};
use splitmodel_engine::Tokenizer;
use splitmodel_gguf::tiny::Arch;

use crate::harness::chain::Chain;
use crate::harness::client::{request, with};
use crate::harness::history::{self, Sent};
use crate::harness::models::{tiny_of, tiny_prompt};
use crate::harness::plan::Plan;
use crate::harness::reference::Case;
use crate::replay::replays;

/// Architectures whose caches cannot be cut, and one whose can be, and where three stages may part their layers.
const KINDS: [(Arch, &[u32]); 4] = [
    (Arch::Gemma3, &[0, 2, 5, 8]),
    (Arch::FalconH1, &[0, 2, 5, 8]),
    (Arch::GraniteHybrid, &[0, 3, 6, 9]),
    // With whole states for diagnosis.
    (Arch::Llama, &[0, 2, 5, 8]),
];

fn plan(arch: Arch, cuts: &[u32]) -> Plan {
    let mut plan = Plan::of(tiny_of(arch), cuts);
    plan.kv_cache.min_tokens = 16;
    plan.kv_cache.full_states = true;
    plan.kv_cache.shared_prefix_stride_tokens = 32;
    plan.scheduling.prefill_chunk = Some(48);
    plan.scheduling.prefill_chunk_shared = Some(24);
    plan
}

/// Each kind at one and at three stages.
fn plans() -> impl Iterator<Item = Plan> {
    let whole_windows = |arch, cuts: &[u32]| {
        let mut plan = plan(arch, cuts);
        plan.engine.swa_full = true;
        plan.kv_cache.full_states = false;
        plan
    };
    KINDS
        .into_iter()
        .flat_map(|(arch, cuts)| [vec![0, *cuts.last().unwrap()], cuts.to_vec()].map(|c| plan(arch, &c)))
        .chain([whole_windows(Arch::Gemma3, &[0, 2, 5, 8])])
}

/// Prompts of a common start of 150 tokens, as bodies. Seeds a thousand apart ask the same.
fn alike(tails: &[(u64, usize)]) -> Vec<(Vec<i32>, Value)> {
    let body = |&(seed, tail): &(u64, usize)| {
        let prompt = [tiny_prompt(980, 150), tiny_prompt(seed % 1000, tail)].concat();
        let body = request(seed, &prompt, 12);
        (prompt, body)
    };
    tails.iter().map(body).collect()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_states_gave_back_replays_bit_for_bit() {
    for mut plan in plans() {
        plan.schedule = true;
        let mut chain = Chain::start(&plan).await;
        let mut sent = Vec::new();
        // One after the other, then beside each other.
        let mut asked = alike(&[(981, 40), (982, 70), (983, 3), (1981, 40)]);
        let sampled = json!({"temperature": 0.9, "top_p": 0.95, "repeat_penalty": 1.1});
        asked[1].1 = with(asked[1].1.clone(), sampled);
        for (prompt, body) in asked {
            let answer = chain.client.ask(&body).await;
            sent.push(Sent { seed: body["seed"].as_u64().unwrap(), prompt, answer });
        }
        let tasks: Vec<_> = alike(&[(984, 60), (985, 20), (986, 110), (987, 1)])
            .into_iter()
            .map(|(prompt, body)| {
                let client = chain.client.clone();
                tokio::spawn(async move {
                    let answer = client.ask(&body).await;
                    Sent { seed: body["seed"].as_u64().unwrap(), prompt, answer }
                })
            })
            .collect();
        for task in tasks {
            sent.push(task.await.unwrap());
        }
        chain.until_lanes(0).await;
        for name in ["cached_tokens_total", "kv_restored_tokens_total", "kv_state_bytes", "kv_state_blocks_total"] {
            assert!(chain.client.metric(&format!("splitmodel_{name}")).await > 0.0, "{name}");
        }
        chain.end().await;
        let ops = history::operations(&chain.schedule());
        let loads = ops.iter().filter(|op| matches!(op, Op::LoadState { .. })).count();
        assert!(loads >= 5, "{loads} of 8 prompts began with a state");
        history::check(&ops, &sent, &Tokenizer::load(&plan.model).unwrap());
        replays(chain.schedule(), plan.model, &sent).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_goes_on_from_a_state_is_the_text_of_a_cold_run() {
    for mut plan in plans() {
        plan.engine.flash_attn = FlashAttention::Off;
        plan.engine.cache_type_k = CacheType::F32;
        plan.engine.cache_type_v = CacheType::F32;
        let asked = alike(&[(991, 40), (992, 70), (993, 3), (994, 100)]);
        let mut cold = plan.clone();
        cold.cuts = vec![0, *plan.cuts.last().unwrap()];
        cold.kv_cache.enabled = false;
        let mut reference = Chain::start(&cold).await;
        let mut cases = Vec::new();
        for (_, body) in &asked {
            cases.push(Case { body: body.clone(), answer: reference.client.ask(body).await });
            assert_eq!(cached(&reference.client.whole(body.clone()).await.1), 0);
        }
        reference.end().await;
        let cases: &'static [Case] = cases.leak();

        let mut chain = Chain::start(&plan).await;
        let what = format!("{} at {:?}", plan.model.display(), plan.cuts);
        for case in cases {
            case.ask(chain.client.clone(), &what).await;
        }
        // The grid point before the last of 190 tokens, or where prompts parted.
        for (case, least) in cases.iter().zip([128, 128, 128, 128]) {
            let (status, answer) = chain.client.whole(case.body.clone()).await;
            let text = answer["choices"][0]["text"].as_str().unwrap();
            assert_eq!((status, text), (200, case.answer.text.as_str()), "{what}");
            assert!(cached(&answer) >= least, "{what}: {} tokens", cached(&answer));
        }
        let beside = cases.iter().map(|case| tokio::spawn(case.ask(chain.client.clone(), "beside others")));
        for task in beside.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        // A stage that comes back has nothing; the others agree with it.
        if plan.stages() > 1 {
            chain.stages[1].kill();
            chain.restart(1);
            for case in cases {
                case.ask(chain.client.clone(), "after a loss").await;
            }
            let (_, answer) = chain.client.whole(cases[0].body.clone()).await;
            assert!(cached(&answer) >= 96, "{what}: recorded anew");
        }
        chain.until_lanes(0).await;
        chain.end().await;
    }
}
