//! What the scheduler refuses or holds back so that nothing grows and every frame can be sent; pure.

#![cfg(test)]

use splitmodel_cache::{Payload, Settings};
use splitmodel_chain::scheduler::{AdmissionError, Limits, Request, Scheduler};
use splitmodel_link::frame::{Predictions, Section};

const LIMITS: Limits = Limits {
    lanes: 6,
    context: 64,
    max_in_flight: 2,
    max_rows: 32,
    prefill_chunk: 32,
    prefill_chunk_shared: 8,
    max_queue: 3,
    max_attempts: 4,
    cells: 512,
    cache: Settings {
        payload: Payload::Resident,
        max_entries: 0,
        min_tokens: 1,
        stride: 128,
        max_records: 1,
        replays: 0,
        activations: false,
        first_page: 1,
    },
};

fn request(config: usize) -> Request {
    Request { prompt: vec![1], config: vec![b' '; config], max_tokens: 4, ..Request::default() }
}

/// A scheduler whose chain is formed and probed.
fn formed() -> Scheduler {
    let mut s = Scheduler::new(LIMITS);
    s.formed(request(2));
    let probe = s.next_frame(&mut Vec::new()).unwrap();
    let row = probe.rows[0];
    let prediction = splitmodel_link::frame::Prediction {
        session: row.session,
        epoch: row.epoch,
        ordinal: row.ordinal,
        position: row.position,
        token: 1,
        logprob: f32::NAN,
        entropy: f32::NAN,
        margin: f32::NAN,
        mu: f32::NAN,
        draws: 0,
        flags: 0,
        top: Vec::new(),
    };
    s.answered(Predictions { seq: probe.seq, sections: Vec::new(), records: vec![prediction] }).unwrap();
    s
}

#[test]
fn the_queue_is_bounded_while_the_chain_is_broken() {
    let mut s = Scheduler::new(LIMITS);
    for _ in 0..LIMITS.max_queue + usize::from(LIMITS.lanes) {
        s.submit(request(2)).unwrap();
    }
    assert!(matches!(s.submit(request(2)), Err(AdmissionError::QueueFull(_))));
}

#[test]
fn a_config_that_fits_no_frame_is_refused() {
    let too_large = s_submit(3 << 20);
    assert!(matches!(too_large, Err(AdmissionError::ConfigTooLarge { bytes }) if bytes == 3 << 20));
    s_submit(1 << 20).unwrap();
}

fn s_submit(config: usize) -> Result<u64, AdmissionError> {
    Scheduler::new(LIMITS).submit(request(config))
}

#[test]
fn large_configs_are_spread_over_frames() {
    let mut s = formed();
    let sent: Vec<_> = (0..LIMITS.lanes).map(|_| s.submit(request(1 << 20)).unwrap()).collect();
    let mut started = Vec::new();
    while started.len() < sent.len() {
        let frame = s.next_frame(&mut Vec::new()).unwrap();
        let configs = frame.sections.iter().filter_map(|section| match section {
            Section::Config { target, json } => Some((target.session, json.len())),
            _ => None,
        });
        let configs: Vec<_> = configs.collect();
        assert!(!configs.is_empty() && configs.iter().map(|(_, bytes)| bytes).sum::<usize>() <= 2 << 20);
        started.extend(configs.into_iter().map(|(id, _)| id));
        s.answered(Predictions { seq: frame.seq, sections: Vec::new(), records: Vec::new() }).unwrap();
    }
    assert_eq!(started, sent);
}
