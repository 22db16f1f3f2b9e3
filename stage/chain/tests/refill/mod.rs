//! What another stage has lost is not computed again by stage 0, as long as it has cells and activations of it.

use splitmodel_chain::schedule::Op;
use splitmodel_chain::scheduler::{Limits, Request};
use splitmodel_chain::worker::RefillCounts;
use splitmodel_link::frame::SessionId;

use crate::sim::{Chain, Memory, alone, greedy, limits, request};
use crate::{sampled, turn};

/// A chain of three stages that keeps activations, after the probe.
fn chain(memory: Memory, limits: Limits) -> Chain {
    let cache = splitmodel_cache::Settings { activations: true, ..limits.cache };
    let mut chain = Chain::with(3, Limits { cache, ..limits }, memory);
    chain.settle();
    chain
}

/// Positions of a session that a stage computed, in order.
fn computed(chain: &Chain, stage: usize, id: SessionId) -> Vec<i32> {
    let ops = chain.ops[stage].lock().unwrap();
    let rows = ops.iter().filter_map(|op| if let Op::Decode { rows, .. } = op { Some(rows) } else { None });
    rows.flatten().filter(|row| row.0 == id).map(|row| row.3).collect()
}

fn refills(chain: &Chain) -> RefillCounts {
    assert!(chain.workers[1..].iter().all(|w| w.prefix_counts().refills.is_none()), "it is stage 0's");
    chain.workers[0].prefix_counts().refills.unwrap()
}

/// Runs a session to its end; its number.
fn run(chain: &mut Chain, r: &Request) -> SessionId {
    let id = chain.submit(r.clone());
    chain.settle();
    assert_eq!((chain.ended[&id].is_ok(), &chain.texts[&id]), (true, &alone(3, r)));
    id
}

#[test]
fn what_others_lost_is_not_computed_again_by_stage_0() {
    for (loser, memory) in [1, 2].into_iter().flat_map(|i| Memory::ALL.map(|m| (i, m))) {
        let mut chain = chain(memory, limits(2, 3, 8));
        let hit = if memory.can_be_cut() { 29 } else { 16 };
        let first = request((0..30).collect(), 6, &sampled(1));
        run(&mut chain, &first);
        let counts = refills(&chain);
        assert!(counts.store.stored >= 1 && counts.store.skipped == 0, "{memory:?}: {counts:?}");
        for (round, begin) in [(1_u64, 21), (2, 22)] {
            chain.forget(loser);
            let beside = request((begin..begin + 20).collect(), 9, &sampled(4 + round));
            let other = chain.submit(beside.clone());
            let again = run(&mut chain, &first);
            assert_eq!(chain.restored[&again], 0, "not every stage had it");
            assert_eq!(chain.texts[&other], alone(3, &beside), "a session in the same frames");
            let rows = computed(&chain, 0, again);
            assert!(rows.iter().all(|at| *at >= hit), "stage {loser}, {memory:?}: stage 0 computed {rows:?}");
            assert!(computed(&chain, loser, again).starts_with(&[0, 1, 2]));
            let counts = refills(&chain);
            assert_eq!((counts.served, counts.missed, counts.tokens), (round, 0, round * hit as u64), "{memory:?}");
        }
        // It was recorded anew, with its activations: nothing is lost now.
        let (_, restored) = turn(&mut chain, &first);
        assert_eq!(restored, usize::try_from(hit).unwrap());
        assert!(chain.workers.iter().all(|w| w.lanes_in_use() == 0 && w.runtime().held() == w.resident_cells()));
        for ops in &chain.ops {
            splitmodel_chain::shadow::check(&ops.lock().unwrap(), None).unwrap();
        }
    }
}

#[test]
fn a_longer_prefix_serves_a_shorter_one_where_it_can_be_cut() {
    for memory in [Memory::Dense, Memory::Copied] {
        let mut chain = chain(memory, limits(2, 3, 8));
        run(&mut chain, &request((0..30).collect(), 6, &sampled(1)));
        chain.forget(2);
        let other = request((0..20).chain(30..40).collect(), 6, &sampled(2));
        let id = run(&mut chain, &other);
        assert_eq!(computed(&chain, 0, id).first(), Some(&20), "{memory:?}");
        assert_eq!(refills(&chain).tokens, 20);
    }
}

#[test]
fn an_earlier_answer_is_not_given_where_it_is_made_anew() {
    for memory in [Memory::Dense, Memory::Copied] {
        let mut chain = chain(memory, limits(2, 3, 8));
        let first = request((0..30).collect(), 20, &greedy());
        run(&mut chain, &first);
        chain.forget(1);
        // It begins behind its earlier answer; as a stage has lost that, with its prompt.
        let id = run(&mut chain, &first);
        let rows = computed(&chain, 0, id);
        assert!(rows[0] > 29 && rows.iter().min() == Some(&29), "{memory:?}: {rows:?}");
        assert_eq!((refills(&chain).tokens, chain.scheduler.counts().replays), (29, 0));
    }
}

#[test]
fn what_begins_with_a_kept_prefix_is_kept_whole() {
    for memory in Memory::ALL {
        let mut chain = chain(memory, limits(2, 3, 8));
        run(&mut chain, &request((0..20).collect(), 2, &sampled(1)));
        let longer = request((0..38).collect(), 2, &sampled(2));
        run(&mut chain, &longer);
        assert!(chain.scheduler.counts().hits == 1 && refills(&chain).store.skipped == 0, "{memory:?}");
        chain.forget(1);
        let id = run(&mut chain, &longer);
        let first = if memory.can_be_cut() { 37 } else { 24 };
        assert_eq!(computed(&chain, 0, id).first(), Some(&first), "{memory:?}");
    }
}

#[test]
fn without_cells_or_activations_it_is_computed() {
    for memory in [Memory::Copied, Memory::Recurrent, Memory::Windowed] {
        let mut chain = chain(memory, limits(2, 3, 8));
        let first = request((0..30).collect(), 6, &sampled(1));
        run(&mut chain, &first);
        // Stage 0 is another process, and has neither.
        chain.forget(0);
        let id = run(&mut chain, &first);
        assert_eq!((computed(&chain, 0, id)[0], refills(&chain).missed), (0, 1), "{memory:?}");
        // A later stage fails in the middle of a refill: another attempt, which is computed.
        chain.forget(2);
        chain.fail_next[2].store(2, std::sync::atomic::Ordering::Relaxed);
        let id = run(&mut chain, &first);
        let counts = refills(&chain);
        assert!(counts.served == 1 && computed(&chain, 0, id).contains(&0), "{memory:?}: {counts:?}");
    }
}

#[test]
fn sessions_that_hold_more_than_the_limit_keep_nothing() {
    let mut chain = chain(Memory::Copied, Limits { context: 200, cells: 400, max_rows: 64, ..limits(2, 3, 64) });
    let long = request((0..150).map(|i| i % 40).collect(), 1, &sampled(1));
    let id = chain.submit(long);
    chain.settle();
    assert!(chain.ended[&id].is_ok());
    let counts = refills(&chain);
    assert_eq!((counts.store.stored, counts.bytes), (0, 0));
    assert!(counts.store.skipped >= 1, "{counts:?}");
}
