//! What clients sent and got, against what a schedule log says was in the lanes.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use splitmodel_chain::schedule::{Op, read};
use splitmodel_chain::shadow;
use splitmodel_engine::Tokenizer;

use super::client::Answer;

/// A request of the past, named by its seed.
pub struct Sent {
    pub seed: u64,
    pub prompt: Vec<i32>,
    pub answer: Answer,
}

/// The operations of a log.
pub fn operations(log: &Path) -> Vec<Op> {
    read(std::io::BufReader::new(std::fs::File::open(log).unwrap())).unwrap().1
}

/// Seed of every session in a log.
fn seeds(ops: &[Op]) -> BTreeMap<u64, u64> {
    ops.iter()
        .filter_map(|op| match op {
            Op::Config { session, config, .. } => Some((*session, config["seed"].as_u64().unwrap())),
            _ => None,
        })
        .collect()
}

/// Tokens sampled for every session, by the position they take.
fn sampled(ops: &[Op]) -> HashMap<u64, BTreeMap<usize, i32>> {
    let mut out: HashMap<u64, BTreeMap<usize, i32>> = HashMap::new();
    for op in ops {
        let Op::Decode { rows, logits, .. } = op else { continue };
        for l in logits {
            assert!(!l.nan, "NaN in {op:?}");
            let row = &rows[l.row];
            out.entry(row.0).or_default().insert(row.3 as usize + 1, l.token);
        }
    }
    out
}

/// Checks that the lanes held exactly the sessions' true histories at every step: the prompts as they were sent, then the
/// tokens that the clients were shown. Gives the number of sessions that were compared.
pub fn check(ops: &[Op], sent: &[Sent], tokenizer: &Tokenizer) -> usize {
    let sampled = sampled(ops);
    let mut histories = HashMap::new();
    let mut compared = 0;
    for (session, seed) in seeds(ops) {
        let empty = BTreeMap::new();
        let made = sampled.get(&session).unwrap_or(&empty);
        let Some(sent) = sent.iter().find(|s| s.seed == seed) else {
            assert_eq!(seed, 0, "session {session} is neither a probe's nor one of ours");
            let probe = tokenizer.bos().or(tokenizer.eos()).unwrap();
            histories.insert(session, vec![probe]);
            continue;
        };
        let begin = sent.prompt.len();
        let made: Vec<i32> = (begin..).map_while(|at| made.get(&at).copied()).collect();
        let seen = &sent.answer.pieces;
        assert!(seen.len() <= made.len(), "seed {seed}: {} tokens shown, {} made", seen.len(), made.len());
        for (i, (piece, token)) in seen.iter().zip(&made).enumerate() {
            assert_eq!(
                piece.text,
                shown(tokenizer, *token),
                "seed {seed}: token {i} was shown as another than was made"
            );
        }
        if let Some(finish) = &sent.answer.finish {
            let ended = usize::from(finish == "stop");
            assert!(made.len() - seen.len() <= ended, "seed {seed}: {made:?} made, {} shown", seen.len());
        }
        histories.insert(session, [sent.prompt.as_slice(), made.as_slice()].concat());
        compared += 1;
    }
    for sent in sent {
        let begun = !sent.answer.pieces.is_empty();
        assert!(!begun || seeds(ops).values().any(|s| *s == sent.seed), "seed {} is not in the log", sent.seed);
    }
    shadow::check(ops, Some(histories)).unwrap();
    compared
}

/// A token as the API shows it.
fn shown(tokenizer: &Tokenizer, token: i32) -> String {
    match String::from_utf8(tokenizer.token_bytes(token, true)) {
        Ok(text) => text,
        Err(e) => e.as_bytes().iter().fold("bytes:".to_owned(), |out, b| out + &format!("\\x{b:02x}")),
    }
}
