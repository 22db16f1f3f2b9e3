//! The tokenizer package against ids that an independent tokenizer gives.
#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::sync::Arc;

use splitmodel_engine::{EngineError, Tokenizer};
use splitmodel_gguf::Package;

fn tokenizer() -> Tokenizer {
    Tokenizer::load(&common::package(Package::Tokenizer)).unwrap()
}

const TEXTS: &[(&str, &[i32])] = &[
    ("", &[]),
    ("Hello, world!", &[19556, 28, 905, 17]),
    (
        "In 2026 there were 365 days, 1,234,567 minutes.",
        &[
            788, 216, 34, 32, 34, 38, 665, 592, 216, 35, 38, 37, 2009, 28, 216, 33, 28, 34, 35, 36, 28, 37, 38, 39,
            3487, 30,
        ],
    ),
    (
        "  two  spaces\tand\ttabs\n\n\nnewlines  ",
        &[216, 827, 216, 5600, 197, 397, 197, 100, 7366, 1116, 198, 2241, 5110, 256],
    ),
    (
        "Ça alors, l'été naïf où ÿ",
        &[142, 225, 81, 360, 579, 28, 303, 23, 19380, 2756, 15486, 25972, 86, 263, 45586, 5549, 140],
    ),
    (
        "def f(x):\n    return x**2  # comment\n",
        &[1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 5189, 198],
    ),
    ("مرحبا بالعالم", &[21706, 20602, 44626, 31462, 10805, 45726, 22208, 34966, 22208, 21706]),
    ("I'll can't WE'RE they've 'S", &[57, 3060, 416, 982, 26587, 23, 3256, 502, 3543, 637, 67]),
    (
        "안녕하세요 세계",
        &[183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238, 18601, 222, 133, 181, 128, 222],
    ),
    ("a\u{a0}b\u{200b}c — “quoted” … ½", &[81, 15442, 82, 321, 229, 83, 1841, 619, 385, 5036, 573, 5548, 216, 16738]),
];

#[test]
fn known_texts_have_known_ids_and_come_back() {
    let t = tokenizer();
    for &(text, ids) in TEXTS {
        assert_eq!(t.tokenize(text, false, false).unwrap(), ids, "{text:?}");
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| t.token_bytes(id, true)).collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), text);
    }
}

#[test]
fn the_vocabulary_is_known() {
    let t = tokenizer();
    // llama.cpp takes <reponame> (4) for an end too, whatever the model.
    assert_eq!((t.n_vocab(), t.eog(), t.eos()), (49152, &[0, 2, 4][..], Some(2)));
    assert!(t.is_eog(2) && !t.is_eog(1) && !t.is_eog(-1));
    assert!(!t.add_bos() && !t.add_eos());
    for (text, id) in [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2), ("<empty_output>", 16)] {
        assert_eq!(t.tokenize(text, false, true).unwrap(), [id], "{text}");
        assert!(t.tokenize(text, false, false).unwrap().len() > 1, "{text} as plain text");
        let special = t.special_tokens().iter().find(|s| s.id == id).unwrap();
        assert_eq!((special.text.as_str(), special.control), (text, true));
        assert_eq!(t.token_bytes(id, true), text.as_bytes());
        assert!(t.token_bytes(id, false).is_empty());
    }
    // Parts of characters are exact bytes.
    for (id, byte) in [(187, 0xf0), (174, 0xe3), (249, 0x9f), (232, 0x8e), (142, 0xc3), (218, 0x80)] {
        assert_eq!(t.token_bytes(id, false), [byte]);
    }
    for id in [-1, 49152, i32::MAX, i32::MIN] {
        assert!(!t.contains(id));
        assert!(t.token_bytes(id, true).is_empty());
    }
}

#[test]
fn every_token_has_bytes_and_threads_share_the_vocabulary() {
    let t = Arc::new(tokenizer());
    let threads: Vec<_> = (0..4)
        .map(|part| {
            let t = Arc::clone(&t);
            std::thread::spawn(move || {
                for id in (part..49152).step_by(4) {
                    assert!(!t.token_bytes(id, true).is_empty(), "{id}");
                }
                t.tokenize(TEXTS[1].0, false, false).unwrap()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().unwrap(), TEXTS[1].1);
    }
}

#[test]
fn odd_texts_are_tokenised() {
    let t = tokenizer();
    let texts =
        ["\0a\0".to_owned(), "a".repeat(200_000), "1".repeat(100_000), " ".repeat(100_000), "é\u{301}".repeat(20_000)];
    for text in texts {
        let ids = t.tokenize(&text, false, true).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| t.token_bytes(id, true)).collect();
        assert!(bytes == text.as_bytes(), "{} bytes of {:?}", text.len(), text.chars().next());
    }
}

#[test]
fn a_stage_package_is_no_tokenizer() {
    let path = common::package(Package::Stage { first: 0, end: 22 });
    assert!(matches!(Tokenizer::load(&path), Err(EngineError::File { .. })));
}
