//! Prefixes as files: what a stage that starts again finds, whatever happened to them meanwhile.
#![cfg(test)]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use splitmodel_cache::{Directory, DiskCounts, DiskError, DiskStore, Identity, Payload, Settings, SnapshotError};

const SETTINGS: Settings = Settings {
    payload: Payload::Copied,
    max_entries: 3,
    min_tokens: 2,
    stride: 8,
    max_records: 2,
    replays: 0,
    activations: false,
    first_page: 7,
};

fn state(page: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| (i as u64 * 31 + page) as u8).collect()
}

fn open(dir: &Path) -> DiskStore {
    DiskStore::open(dir, "model a", 10_000).unwrap()
}

fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    let mut found: Vec<_> = all.filter(|p| p.extension().is_some_and(|e| e == extension)).collect();
    found.sort();
    found
}

#[test]
fn a_stage_that_starts_again_finds_what_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path());
    for (slot, page) in [(2, 5), (0, 9), (1, 12)] {
        store.insert((slot, page, 100), state(page, 1000));
    }
    store.remove(9);
    assert!(matches!(DiskStore::open(dir.path(), "model a", 1), Err(DiskError::Used(_))));
    drop(store);
    let mut store = open(dir.path());
    assert_eq!((store.list(), store.bytes()), (vec![(2, 5, 100), (1, 12, 100)], 2000));
    let mut out = vec![1];
    assert!(store.get(5, &mut out) && out == state(5, 1000));
    assert!(!store.get(9, &mut out) && out.is_empty() && !store.holds(9));
    assert_eq!(store.counts(), DiskCounts { read: 1, ..DiskCounts::default() });
    drop(store);
    // Of another model nothing is found, nor left.
    fs::write(DiskStore::directory(dir.path()), "what stage 0 wrote").unwrap();
    let store = DiskStore::open(dir.path(), "model b", 10_000).unwrap();
    assert!(store.list().is_empty() && files(dir.path(), "prefix").is_empty());
    assert!(!DiskStore::directory(dir.path()).exists());
}

#[test]
fn the_limit_holds_here_and_at_the_next_start() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path());
    store.insert((0, 1, 9), state(1, 10_001));
    assert_eq!((store.holds(1), store.counts().dropped), (false, 1));
    for page in 2..=3 {
        store.insert((0, page, 9), state(page, 4000));
    }
    drop(store);
    let mut store = open(dir.path());
    assert!(store.get(2, &mut Vec::new()), "it is used");
    store.insert((0, 4, 9), state(4, 4000));
    assert_eq!((store.holds(2), store.holds(3), store.bytes(), store.counts().evictions), (true, false, 8000, 1));
    drop(store);
    assert_eq!(files(dir.path(), "prefix").len(), 2);
    let store = DiskStore::open(dir.path(), "model a", 4000).unwrap();
    assert_eq!(store.list().len(), 1);
    drop(store);
    assert_eq!(files(dir.path(), "prefix").len(), 1);
}

#[test]
fn what_is_not_what_was_written_is_put_aside() {
    let dir = tempfile::tempdir().unwrap();
    let mut store = open(dir.path());
    for page in 0..4 {
        store.insert((0, page, 9), state(page, 1000));
        // Only so many wait at once.
        while store.counts().written <= page {
            std::thread::yield_now();
        }
    }
    drop(store);
    let written = files(dir.path(), "prefix");
    let change = |file: &Path, at: usize| {
        let mut bytes = fs::read(file).unwrap();
        bytes[at] ^= 1;
        fs::write(file, bytes).unwrap();
    };
    change(&written[0], 500); // in the state
    change(&written[1], 20); // in the head
    let whole = fs::read(&written[2]).unwrap();
    fs::write(&written[2], &whole[..700]).unwrap();
    fs::write(dir.path().join("0000000000000063.part"), "half").unwrap();
    let mut store = open(dir.path());
    assert_eq!(store.list().len(), 2, "the others cannot be");
    let mut out = Vec::new();
    assert!(!store.get(0, &mut out) && out.is_empty() && !store.holds(0));
    assert!(store.get(3, &mut out) && out == state(3, 1000));
    assert_eq!(store.counts().quarantined, 3);
    assert_eq!((files(dir.path(), "bad").len(), files(dir.path(), "part").len()), (3, 0));
    // Somebody took one away, or it never was: no error of anybody's.
    fs::remove_file(&written[3]).unwrap();
    assert!(!store.get(3, &mut out) && out.is_empty());
    drop(store);
    // No more than a few are left to be looked at.
    for page in 100..120 {
        fs::write(dir.path().join(format!("{page:016x}.prefix")), "no head").unwrap();
    }
    drop(open(dir.path()));
    assert_eq!(files(dir.path(), "bad").len(), 8);
}

#[test]
fn a_disk_that_takes_nothing_costs_nothing_but_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let inside = dir.path().join("kept");
    let mut store = open(&inside);
    fs::remove_dir_all(&inside).unwrap();
    store.insert((0, 1, 9), state(1, 1000));
    while store.counts().errors == 0 {
        std::thread::yield_now();
    }
    assert!(!store.get(1, &mut Vec::new()));
    store.remove(1);
    assert_eq!((store.counts().written, store.bytes()), (0, 0));
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = DiskStore::open(&file, "model a", 1).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
}

proptest! {
    #[test]
    fn a_directory_comes_back_from_its_snapshot(
        texts in prop::collection::vec((prop::collection::vec(any::<i32>(), 2..40), 0..3u32), 0..8),
        at in any::<prop::sample::Index>(),
        bit in 0..8u8,
    ) {
        let owner = |n: u32| Identity { stages: n, ..Identity::default() }.namespace(None, None);
        let mut before = Directory::new(SETTINGS);
        for (tokens, n) in &texts {
            before.record(owner(*n), tokens);
        }
        let bytes = before.snapshot();
        let mut after = Directory::restore(SETTINGS, &bytes).unwrap();
        prop_assert_eq!((after.len(), after.tokens()), (before.len(), before.tokens()));
        for (tokens, n) in &texts {
            let prompt = [&tokens[..], &[1, 2, 3]].concat();
            prop_assert_eq!(after.lookup(owner(*n), &prompt, 8), before.lookup(owner(*n), &prompt, 8));
        }
        // The same goes; and what was recorded after the snapshot, on a clock that went back, has other numbers.
        for _ in 0..3 {
            before.record(owner(8), &[3, 2, 1]).and_then(|place| before.forget(&place).then_some(()));
        }
        let new = before.record(owner(9), &[1, 2, 3]).unwrap();
        let other = after.record(owner(9), &[1, 2, 3]).unwrap();
        prop_assert!(other.slot == new.slot && other.page > new.page, "{other:?}, {new:?}");
        // One place less: the one used longest ago is left out, if it stood there.
        let fewer = Directory::restore(Settings { max_entries: 2, ..SETTINGS }, &bytes).unwrap();
        prop_assert!(fewer.len() <= 2);
        let mut damaged = bytes.clone();
        damaged[at.index(bytes.len())] ^= 1 << bit;
        prop_assert_eq!(Directory::restore(SETTINGS, &damaged).unwrap_err(), SnapshotError::Damaged);
        let cut = at.index(bytes.len());
        prop_assert_eq!(Directory::restore(SETTINGS, &bytes[..cut]).unwrap_err(), SnapshotError::Damaged);
    }
}
