//! Scheduler and workers together: any interleaving gives each session the text of an undisturbed run.

#![cfg(test)]

mod refill;
mod sim;

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use sim::{Chain, Memory, alone, greedy, limits, request};
use splitmodel_chain::scheduler::{AdmissionError, Finish, Limits, Scheduler};
use splitmodel_chain::shadow;
use splitmodel_link::frame::Token;
use splitmodel_sampling::GenerationConfig;

#[derive(Clone, Debug)]
enum Act {
    Submit {
        prompt: Vec<Token>,
        max: usize,
        sampled: bool,
    },
    /// A prompt that begins with the first tokens of an earlier session, prompt and answer.
    Again {
        of: usize,
        keep: usize,
        more: Vec<Token>,
        max: usize,
        sampled: bool,
    },
    Cancel(usize),
    Move(usize, usize),
    Cut,
    Fail(usize),
    FailState(usize),
    Forget(usize),
    ForgetOne(usize, u64, u16),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (prop::collection::vec(0..40i32, 1..60), 1..20usize, any::<bool>())
            .prop_map(|(prompt, max, sampled)| Act::Submit { prompt, max, sampled }),
        3 => (0..16usize, 1..60usize, prop::collection::vec(0..40i32, 1..20), 1..20usize, any::<bool>())
            .prop_map(|(of, keep, more, max, sampled)| Act::Again { of, keep, more, max, sampled }),
        1 => (0..16usize).prop_map(Act::Cancel),
        30 => (0..8usize, 1..6usize).prop_map(|(w, n)| Act::Move(w, n)),
        1 => Just(Act::Cut),
        1 => (0..5usize).prop_map(Act::Fail),
        1 => (0..5usize).prop_map(Act::FailState),
        2 => (0..5usize).prop_map(Act::Forget),
        1 => (0..5usize, 1..12u64, 0..3u16).prop_map(|(stage, page, slot)| Act::ForgetOne(stage, page, slot)),
    ]
}

fn sampled(seed: u64) -> GenerationConfig {
    GenerationConfig {
        seed,
        temperature: 0.9,
        presence_penalty: 0.5,
        repeat_penalty: 1.1,
        ..GenerationConfig::default()
    }
}

fn run(stages: u16, limits: Limits, memory: Memory, acts: &[Act]) {
    // Faults may come thick here; sessions must outlast them.
    let limits = Limits { max_attempts: 1000, ..limits };
    let mut chain = Chain::with(stages, limits, memory);
    let mut sent: Vec<(u64, splitmodel_chain::scheduler::Request)> = Vec::new();
    let mut cancelled = std::collections::HashSet::new();
    for act in acts {
        match act {
            Act::Submit { prompt, max, sampled: s } => {
                let config = if *s { sampled(sent.len() as u64) } else { greedy() };
                let r = request(prompt.clone(), *max, &config);
                sent.push((chain.submit(r.clone()), r));
            }
            Act::Again { of, keep, more, max, sampled: s } => {
                let Some((id, earlier)) = sent.get(*of) else { continue };
                let mut prompt: Vec<Token> =
                    earlier.prompt.iter().chain(&chain.texts[id]).copied().take(*keep).collect();
                prompt.extend(more);
                let config = if *s { sampled(sent.len() as u64) } else { greedy() };
                let r = request(prompt, *max, &config);
                sent.push((chain.submit(r.clone()), r));
            }
            Act::Cancel(i) => {
                if let Some((id, _)) = sent.get(*i) {
                    chain.scheduler.cancel(*id);
                    cancelled.insert(*id);
                }
            }
            Act::Move(which, times) => {
                let which = which % chain.places();
                for _ in 0..*times {
                    chain.advance(which);
                }
            }
            Act::Fail(stage) => {
                chain.fail_next[stage % chain.workers.len()].fetch_add(1, Ordering::Relaxed);
            }
            Act::FailState(stage) => {
                chain.fail_states[stage % chain.workers.len()].fetch_add(1, Ordering::Relaxed);
            }
            Act::ForgetOne(stage, page, slot) => chain.forget_one(stage % usize::from(stages), *page, *slot),
            Act::Forget(stage) => chain.forget(stage % usize::from(stages)),
            Act::Cut => {
                chain.cut();
                chain.form();
            }
        }
    }
    chain.settle();
    let counts = chain.scheduler.counts();
    assert_eq!((counts.running, counts.queued, counts.in_flight), (0, 0, 0));
    for (id, r) in &sent {
        if cancelled.contains(id) {
            continue;
        }
        assert!(chain.ended[id].is_ok(), "{:?}", chain.ended[id]);
        assert_eq!(chain.texts[id], alone(stages, r), "session {id}");
    }
    for worker in &chain.workers {
        assert_eq!(worker.lanes_in_use(), 0, "a lane leaked");
        assert_eq!(worker.runtime().held(), worker.resident_cells(), "cells leaked");
        let kept = worker.prefix_counts();
        assert!(kept.bytes <= sim::MAX_BYTES && kept.kept <= usize::from(limits.cache.max_entries), "{kept:?}");
        assert!(kept.refills.is_none_or(|r| r.bytes <= sim::MAX_BYTES), "{kept:?}");
    }
    for ops in &chain.ops {
        shadow::check(&ops.lock().unwrap(), None).unwrap();
    }
}

/// As many as the environment says, else what a few seconds hold.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(4000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]
    #[test]
    fn any_interleaving_gives_the_undisturbed_text(
        stages in 1..5u16, lanes in 1..5u16, chunk in 1..40usize, memory in prop::sample::select(&Memory::ALL[..]),
        activations: bool, acts in prop::collection::vec(act(), 1..120),
    ) {
        let limits = limits(lanes, usize::from(stages), chunk);
        let cache = splitmodel_cache::Settings { activations: activations && stages > 1, ..limits.cache };
        run(stages, Limits { cache, ..limits }, memory, &acts);
    }
}

#[test]
fn a_failed_computation_costs_time_and_not_text() {
    use Memory::{Copied, Dense, Recurrent, Windowed};
    let dense = [(0, Dense), (1, Dense), (2, Dense), (1, Copied)];
    for (stage, memory) in dense.into_iter().chain([(2, Recurrent), (0, Recurrent), (1, Windowed)]) {
        let mut chain = Chain::with(3, limits(3, 3, 8), memory);
        chain.settle();
        let mut workers = std::mem::take(&mut chain.workers);
        workers[stage] = {
            let mut slice = sim::Arithmetic::new(stage as u64, stage == 2);
            slice.fail_every = Some(13);
            slice.memory = memory;
            let place = splitmodel_chain::worker::Place { stage: stage as u16, stages: 3 };
            let cache = memory.settings(limits(3, 3, 8).cache);
            splitmodel_chain::worker::Worker::new(slice, place, 4, None).with_cache(&cache, sim::MAX_BYTES)
        };
        chain.workers = workers;
        let requests: Vec<_> = (0..3).map(|i| request((i..i + 20).collect(), 6, &greedy())).collect();
        let ids: Vec<_> = requests.iter().map(|r| chain.submit(r.clone())).collect();
        chain.settle();
        for (id, r) in ids.iter().zip(&requests) {
            assert!(chain.ended[id].is_ok(), "stage {stage}: {:?}", chain.ended[id]);
            assert_eq!(chain.texts[id], alone(3, r), "stage {stage}");
        }
        assert!(chain.workers.iter().all(|w| w.lanes_in_use() == 0 && w.runtime().held() == w.resident_cells()));
    }
}

/// Runs a session to its end; its text, and the tokens that it did not compute.
fn turn(chain: &mut Chain, r: &splitmodel_chain::scheduler::Request) -> (Vec<Token>, usize) {
    let id = chain.submit(r.clone());
    chain.settle();
    assert!(chain.ended[&id].is_ok(), "{:?}", chain.ended[&id]);
    (chain.texts[&id].clone(), chain.restored[&id])
}

#[test]
fn a_prefix_is_computed_once_and_the_text_is_that_of_a_cold_chain() {
    for stages in [1, 3] {
        let mut chain = Chain::new(stages, limits(2, usize::from(stages), 8));
        chain.settle();
        let first = request((0..30).collect(), 6, &sampled(1));
        assert_eq!(turn(&mut chain, &first), (alone(stages, &first), 0));
        // The same again: all but the last token of the prompt is there.
        assert_eq!(turn(&mut chain, &first), (alone(stages, &first), 29));
        let other = request((0..20).chain(30..40).collect(), 6, &sampled(2));
        assert_eq!(turn(&mut chain, &other), (alone(stages, &other), 20));
        let mut elsewhere = first.clone();
        elsewhere.namespace = another();
        assert_eq!(turn(&mut chain, &elsewhere).1, 0, "namespaces share nothing");
        let mut next = first.prompt.clone();
        next.extend(alone(stages, &first));
        let told = next.len();
        next.extend([11, 12, 13]);
        let next = request(next, 6, &sampled(3));
        // The answer's last token was never sent as a row.
        assert_eq!(turn(&mut chain, &next), (alone(stages, &next), told - 1));
    }
}

fn another() -> splitmodel_cache::Namespace {
    splitmodel_cache::Identity::default().namespace(Some("another"), None)
}

#[test]
fn exact_states_serve_their_length_and_the_text_is_that_of_a_cold_chain() {
    for (stages, memory) in
        [(1, Memory::Recurrent), (3, Memory::Recurrent), (1, Memory::Windowed), (3, Memory::Windowed)]
    {
        let mut chain = Chain::with(stages, limits(2, usize::from(stages), 32), memory);
        chain.settle();
        let first = request((0..30).collect(), 6, &sampled(1));
        assert_eq!(turn(&mut chain, &first), (alone(stages, &first), 0));
        // The grid point before the last: others will probably have that much in common.
        assert_eq!(turn(&mut chain, &first), (alone(stages, &first), 16));
        let other = request((0..12).chain(20..38).collect(), 6, &sampled(2));
        assert_eq!(turn(&mut chain, &other), (alone(stages, &other), 0), "twelve tokens are in no state");
        let third = request((0..12).chain(30..40).collect(), 6, &sampled(3));
        assert_eq!(turn(&mut chain, &third), (alone(stages, &third), 12), "where prompts parted");
        let elsewhere = splitmodel_chain::scheduler::Request { namespace: another(), ..first.clone() };
        assert_eq!(turn(&mut chain, &elsewhere).1, 0, "namespaces share nothing");
        for worker in &chain.workers {
            let counts = worker.prefix_counts();
            assert_eq!((counts.hits, counts.misses, counts.errors, counts.tokens), (2, 0, 0, 28), "{counts:?}");
        }
        let counts = chain.scheduler.counts();
        assert_eq!((counts.hits, counts.misses, counts.shortened, counts.kept_cells), (2, 3, 0, 0), "{counts:?}");
    }
}

#[test]
fn a_stage_that_lost_the_longest_state_shortens_the_hit() {
    for loser in 0..3 {
        let limits = limits(2, 3, 32);
        let cache = splitmodel_cache::Settings { max_entries: 6, ..limits.cache };
        let mut chain = Chain::with(3, Limits { cache, ..limits }, Memory::Recurrent);
        chain.settle();
        let first = request((0..40).collect(), 6, &sampled(1));
        turn(&mut chain, &first);
        let other = request((0..12).chain(20..40).collect(), 1, &greedy());
        turn(&mut chain, &other);
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 32));
        chain.forget_one(loser, 1, 0);
        let beside = request((20..40).collect(), 9, &sampled(5));
        let id = chain.submit(beside.clone());
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 12), "stage {loser}");
        assert_eq!(chain.texts[&id], alone(3, &beside), "a session in the same frames");
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 32), "it was recorded anew");
        assert_eq!(chain.scheduler.counts().shortened, 1);
    }
}

#[test]
fn a_conversation_that_goes_on_takes_its_lane_and_copies_nothing() {
    let mut chain = Chain::with(3, limits(2, 3, 8), Memory::Copied);
    chain.settle();
    let counts = |chain: &Chain| chain.workers.iter().map(|w| w.prefix_counts()).collect::<Vec<_>>();
    let conversation = |from: Token| request((from..from + 20).collect(), 6, &sampled(1));
    let (one, other) = (conversation(0), conversation(20));
    let further = |first: &splitmodel_chain::scheduler::Request| {
        let mut next = first.prompt.clone();
        let answer = alone(3, first);
        // The last token of an answer of full length was never sent as a row.
        let told = next.len() + answer.len().min(5);
        next.extend(answer.into_iter().chain([11, 12]));
        (request(next, 6, &sampled(2)), told)
    };
    turn(&mut chain, &one);
    turn(&mut chain, &other);
    for first in [&one, &other] {
        let (next, told) = further(first);
        assert_eq!(turn(&mut chain, &next), (alone(3, &next), told));
    }
    assert!(counts(&chain).iter().all(|c| (c.hits, c.in_place) == (2, 2)), "{:?}", counts(&chain));
    // A part of it, too: what comes after goes.
    let again = request((0..20).chain([30]).collect(), 6, &sampled(3));
    assert_eq!(turn(&mut chain, &again), (alone(3, &again), 20));
    assert!(counts(&chain).iter().all(|c| (c.hits, c.in_place) == (3, 3)), "{:?}", counts(&chain));
    // Where its lane was taken it is copied.
    let mut chain = Chain::with(3, limits(1, 3, 8), Memory::Copied);
    chain.settle();
    turn(&mut chain, &one);
    turn(&mut chain, &other);
    let (next, told) = further(&one);
    assert_eq!(turn(&mut chain, &next), (alone(3, &next), told));
    assert!(counts(&chain).iter().all(|c| (c.hits, c.in_place) == (1, 0)), "{:?}", counts(&chain));
}

#[test]
fn branches_of_a_new_prefix_compute_it_once() {
    for memory in [Memory::Dense, Memory::Copied] {
        let mut chain = Chain::with(3, limits(4, 3, 8), memory);
        chain.settle();
        let branch = |tail: Token| request((0..40).chain([tail, 45, 46]).collect(), 6, &sampled(1));
        let branches: Vec<_> = [41, 42, 43].map(branch).to_vec();
        let other = request((20..50).collect(), 6, &sampled(2));
        let ids: Vec<_> = branches.iter().map(|r| chain.submit(r.clone())).collect();
        let beside = chain.submit(other.clone());
        chain.settle();
        let restored: Vec<_> = ids.iter().map(|id| chain.restored[id]).collect();
        assert_eq!(restored, [0, 40, 40]);
        assert_eq!(chain.restored[&beside], 0);
        for (id, r) in ids.iter().zip(&branches).chain([(&beside, &other)]) {
            assert_eq!(chain.texts[id], alone(3, r));
        }
    }
}

#[test]
fn a_branch_whose_time_runs_out_waits_no_more() {
    let mut chain = Chain::with(3, limits(4, 3, 8), Memory::Copied);
    chain.settle();
    let [first, branch] = [41, 42].map(|tail| request((0..40).chain([tail, 45, 46]).collect(), 6, &sampled(1)));
    chain.submit(first);
    let id = chain.submit(branch.clone());
    while chain.advance(0) {}
    let counts = chain.scheduler.counts();
    assert_eq!((counts.running, counts.queued), (1, 1), "it waits");
    assert!(chain.scheduler.hurry(id) && !chain.scheduler.hurry(id));
    chain.settle();
    assert_eq!((chain.restored[&id], &chain.texts[&id]), (0, &alone(3, &branch)));
}

#[test]
fn a_repeated_greedy_request_begins_with_its_first_tokens() {
    for memory in [Memory::Dense, Memory::Copied] {
        let mut chain = Chain::with(3, limits(2, 3, 8), memory);
        chain.settle();
        let first = request((0..30).collect(), 20, &greedy());
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0));
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 30), "the whole prompt and what follows it are there");
        let counts = chain.scheduler.counts();
        assert!(counts.replays == 1 && (1..=8).contains(&counts.replayed_tokens), "{counts:?}");
        // One that lost it: nothing is shown of what was known, and the text is the same.
        chain.forget(1);
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0));
        assert_eq!(chain.scheduler.counts().replays, 1);
        // No more than is asked for, and nothing of it with random numbers.
        for (most, config) in [(1, greedy()), (2, greedy()), (20, sampled(3))] {
            let other = request((0..30).collect(), most, &config);
            assert_eq!(turn(&mut chain, &other).0, alone(3, &other), "{most}");
        }
        assert_eq!(chain.scheduler.counts().replays, 2);
    }
}

#[test]
fn states_that_cannot_be_taken_or_set_cost_time_and_not_text() {
    let mut chain = Chain::with(3, limits(2, 3, 32), Memory::Windowed);
    chain.settle();
    let first = request((0..40).collect(), 6, &sampled(1));
    chain.fail_states[1].store(1, Ordering::Relaxed);
    assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "not taken at stage 1");
    assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "nothing to set there");
    chain.fail_states[2].store(1, Ordering::Relaxed);
    assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "not set at stage 2");
    assert_eq!(turn(&mut chain, &first), (alone(3, &first), 32));
    let errors: Vec<_> = chain.workers.iter().map(|w| w.prefix_counts().errors).collect();
    assert_eq!(errors, [0, 1, 1]);
}

#[test]
fn a_stage_that_lost_its_residents_costs_time_and_not_text() {
    for (loser, memory) in (0..3).flat_map(|i| Memory::ALL.map(|m| (i, m))) {
        let mut chain = Chain::with(3, limits(2, 3, 8), memory);
        let hit = if memory.can_be_cut() { 29 } else { 16 };
        chain.settle();
        let first = request((0..30).collect(), 6, &sampled(1));
        turn(&mut chain, &first);
        chain.forget(loser);
        let beside = request((20..40).collect(), 9, &sampled(5));
        let other = chain.submit(beside.clone());
        // A forced miss at one stage: the answer of a cold run, and the next request on that lane works.
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "stage {loser}");
        assert_eq!(chain.texts[&other], alone(3, &beside), "a session in the same frames");
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), hit), "it was recorded anew");
        assert!(chain.workers.iter().all(|w| w.lanes_in_use() == 0 && w.runtime().held() == w.resident_cells()));
    }
}

#[test]
fn copies_and_states_outlive_a_formation_where_their_stage_does() {
    for memory in Memory::ALL {
        let limits = limits(2, 3, 8);
        let mut chain = Chain::with(3, limits, memory);
        let hit = if memory.can_be_cut() { 29 } else { 16 };
        chain.settle();
        let first = request((0..30).collect(), 6, &sampled(1));
        turn(&mut chain, &first);
        chain.cut();
        chain.form();
        chain.settle();
        let stays = if memory == Memory::Dense { 0 } else { hit };
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), stays), "{memory:?}");
        // One stage is another process.
        chain.cut();
        chain.forget(2);
        chain.form();
        chain.settle();
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "{memory:?}");
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), hit), "{memory:?}");
        // Stage 0 is: what it numbers is never mistaken for what others kept of its predecessor.
        chain.cut();
        chain.forget(0);
        let cache = splitmodel_cache::Settings { first_page: 1000, ..memory.settings(limits.cache) };
        chain.scheduler = Scheduler::new(Limits { cache, ..limits });
        (chain.restored, chain.ended) = Default::default();
        chain.form();
        chain.settle();
        let other = request((30..60).collect(), 6, &sampled(2));
        assert_eq!(turn(&mut chain, &other), (alone(3, &other), 0), "{memory:?}");
        assert_eq!(turn(&mut chain, &other), (alone(3, &other), hit), "{memory:?}");
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "{memory:?}");
        assert!(chain.workers.iter().all(|w| w.prefix_counts().kept <= limits.cache.max_entries.into()));
    }
}

#[test]
fn what_stands_on_disk_outlives_every_process() {
    for memory in [Memory::Copied, Memory::Recurrent, Memory::Windowed] {
        let dir = tempfile::tempdir().unwrap();
        let limits = limits(2, 3, 8);
        let mut chain = Chain::on_disk(3, limits, memory, Some(dir.path().to_owned()));
        let hit = if memory.can_be_cut() { 29 } else { 16 };
        chain.settle();
        let first = request((0..30).collect(), 6, &sampled(1));
        turn(&mut chain, &first);
        let directory = chain.scheduler.directory().snapshot();
        chain.cut();
        (0..3).for_each(|stage| chain.forget(stage));
        chain.scheduler = Scheduler::new(Limits { cache: memory.settings(limits.cache), ..limits });
        (chain.restored, chain.ended) = Default::default();
        chain.scheduler.remember(&directory).unwrap();
        chain.form();
        chain.settle();
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), hit), "{memory:?}");
        // A file that one stage has no more shortens the hit and changes no text.
        chain.cut();
        chain.forget(1);
        for file in std::fs::read_dir(dir.path().join("1")).unwrap() {
            let file = file.unwrap().path();
            if file.extension().is_some_and(|e| e == "prefix") {
                std::fs::remove_file(file).unwrap();
            }
        }
        chain.form();
        chain.settle();
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), 0), "{memory:?}");
        assert_eq!(turn(&mut chain, &first), (alone(3, &first), hit), "{memory:?}");
        let on_disk: Vec<_> = chain.workers.iter().map(|w| w.prefix_counts().disk).collect();
        assert!(on_disk.iter().all(|d| d.errors == 0) && on_disk[0].read > 0, "{on_disk:?}");
    }
}

#[test]
fn residents_give_way_to_sessions() {
    let mut chain = Chain::new(2, Limits { cells: 96, ..limits(1, 2, 16) });
    chain.settle();
    turn(&mut chain, &request((0..40).collect(), 1, &greedy()));
    turn(&mut chain, &request((0..40).rev().collect(), 1, &greedy()));
    assert_eq!(chain.scheduler.counts().kept, 2);
    let long = request((0..80).map(|i| 40 + i % 7).collect(), 4, &greedy());
    assert_eq!(turn(&mut chain, &long), (alone(2, &long), 0));
    let counts = chain.scheduler.counts();
    assert_eq!((counts.kept, counts.evictions), (1, 2));
    for worker in &chain.workers {
        assert_eq!(worker.resident_cells(), counts.kept_cells);
        assert!(worker.runtime().held() <= 96);
    }
}

#[test]
fn a_session_that_fails_for_ever_ends_with_the_reason_and_harms_nobody() {
    let mut chain = Chain::new(2, limits(2, 2, 8));
    chain.settle();
    let mut bad = request(vec![1, 2, 3], 4, &greedy());
    bad.config = br#"{"no_such_field": 1}"#.to_vec();
    let bad = chain.submit(bad);
    let good = request(vec![4, 5], 8, &greedy());
    let id = chain.submit(good.clone());
    chain.settle();
    let reason = chain.ended[&bad].clone().unwrap_err();
    assert!(reason.contains("no_such_field") && reason.contains("stage 1"), "{reason}");
    assert_eq!(chain.texts[&id], alone(2, &good));
}

#[test]
fn a_request_that_allows_no_token_is_tried_once() {
    let mut chain = Chain::new(2, limits(2, 2, 8));
    chain.settle();
    let bans = (0..i32::try_from(sim::VOCAB).unwrap()).map(|t| (t, -100.0)).collect();
    let id = chain.submit(request(vec![1, 2, 3], 4, &GenerationConfig { logit_bias: bans, ..greedy() }));
    chain.settle();
    let reason = chain.ended[&id].clone().unwrap_err();
    assert!(reason.contains("no token is allowed"), "{reason}");
    let ops = chain.ops[0].lock().unwrap();
    let runs = ops.iter().filter(|op| match op {
        splitmodel_chain::schedule::Op::Decode { rows, .. } => rows.iter().any(|r| r.0 == id),
        _ => false,
    });
    assert_eq!(runs.count(), 1);
}

#[test]
fn frames_in_flight_are_bounded_and_spread_over_the_stages() {
    let mut chain = Chain::new(3, limits(6, 3, 8));
    chain.settle();
    for i in 0..6 {
        chain.submit(request(vec![i, i + 1], 10, &greedy()));
    }
    let mut most = 0;
    while (0..chain.places()).fold(false, |moved, w| {
        let moved = chain.advance(w) || moved;
        while w == 0 && chain.advance(0) {}
        most = most.max(chain.scheduler.counts().in_flight);
        moved
    }) {}
    assert_eq!(most, 3);
    let ops = chain.ops[0].lock().unwrap();
    let widest = ops.iter().filter_map(|op| match op {
        splitmodel_chain::schedule::Op::Decode { rows, .. } if rows.iter().all(|r| r.3 > 2) => Some(rows.len()),
        _ => None,
    });
    assert_eq!(widest.max(), Some(2), "six answers over three frames in flight are two rows a frame");
}

#[test]
fn a_long_prompt_leaves_running_answers_their_turn() {
    let mut chain = Chain::new(2, limits(2, 2, 8));
    chain.settle();
    let short =
        chain.submit(request(vec![3], 60, &GenerationConfig { logit_bias: vec![(sim::EOG, -100.0)], ..greedy() }));
    for _ in 0..20 {
        (0..chain.places()).for_each(|w| {
            chain.advance(w);
        });
    }
    let before = chain.texts[&short].len();
    assert!(before > 2);
    let long = chain.submit(request((0..80).map(|i| i % 40).collect(), 1, &greedy()));
    while chain.texts[&long].is_empty() {
        (0..chain.places()).for_each(|w| {
            chain.advance(w);
        });
    }
    let frames = chain.ops[0].lock().unwrap();
    let mixed: Vec<_> = frames
        .iter()
        .filter_map(|op| match op {
            splitmodel_chain::schedule::Op::Decode { rows, .. } => {
                Some((rows.iter().filter(|r| r.0 == long).count(), rows.iter().filter(|r| r.0 == short).count()))
            }
            _ => None,
        })
        .filter(|(l, _)| *l > 0)
        .collect();
    assert!(mixed.iter().all(|(l, _)| *l <= 4), "{mixed:?}: one chunk of 8 over two frames in flight");
    assert!(chain.texts[&short].len() >= before + mixed.len() / 3, "the answer stood still");
}

#[test]
fn admission_says_why() {
    let mut chain = Chain::new(1, limits(1, 1, 8));
    chain.settle();
    let scheduler = &mut chain.scheduler;
    assert_eq!(scheduler.submit(request(vec![], 1, &greedy())), Err(AdmissionError::EmptyPrompt));
    let long = request(vec![1; 96], 1, &greedy());
    assert_eq!(scheduler.submit(long), Err(AdmissionError::TooLong { prompt: 96, context: 96 }));
    let full =
        chain.submit(request(vec![1; 90], 50, &GenerationConfig { logit_bias: vec![(sim::EOG, -100.0)], ..greedy() }));
    chain.settle();
    assert_eq!(chain.ended[&full], Ok(Finish::Length));
    assert_eq!(chain.texts[&full].len(), 6, "prompt and answer fill the context exactly");
}
