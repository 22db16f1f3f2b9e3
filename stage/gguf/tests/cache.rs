//! The package cache: bounded, validated, and safe for several processes at once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // helpers of tests are tests too

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};

use splitmodel_gguf::cache::{Cache, key};
use splitmodel_gguf::tiny::{Arch, Tiny};
use splitmodel_gguf::{Error, Model, Package, SlicePlan};

struct Setup {
    dir: tempfile::TempDir,
    model: Model,
}

fn setup() -> Setup {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    Tiny::new(Arch::Llama).write(&path).unwrap();
    Setup { model: Model::open(path).unwrap(), dir }
}

impl Setup {
    fn cache(&self, limit: u64) -> Cache {
        Cache::open(self.dir.path().join("cache"), limit).unwrap()
    }

    fn bytes(&self, package: Package) -> u64 {
        SlicePlan::new(&self.model, package).unwrap().total_bytes()
    }

    /// Whether it was written now, rather than found.
    fn get(&self, cache: &Cache, package: Package) -> bool {
        let mut written = false;
        let entry = cache.get(&self.model, package, &mut |_, _| written = true).unwrap();
        assert_eq!(fs::metadata(entry.path()).unwrap().len(), entry.record().bytes);
        assert_eq!(entry.record().package, package);
        written
    }

    fn entry(&self, package: Package, extension: &str) -> PathBuf {
        let name = format!("{}.{extension}", key(self.model.digest(), package));
        self.dir.path().join("cache/entries").join(name)
    }
}

const fn layers(first: u32, end: u32) -> Package {
    Package::Stage { first, end }
}

#[test]
fn entries_are_written_once_and_listed() {
    let s = setup();
    let cache = s.cache(u64::MAX);
    for package in [layers(0, 4), layers(4, 8), Package::Tokenizer, Package::Embedding] {
        assert!(cache.find(s.model.digest(), package).unwrap().is_none());
        assert!(s.get(&cache, package));
        assert!(!s.get(&cache, package));
        assert!(cache.find(s.model.digest(), package).unwrap().is_some());
    }
    let held = cache.get(&s.model, layers(4, 8), &mut |_, _| {}).unwrap();
    let usage = cache.usage().unwrap();
    assert_eq!(usage.entries.len(), 4);
    assert_eq!(usage.bytes, usage.entries.iter().map(|e| e.bytes).sum::<u64>());
    let last = usage.entries.last().unwrap();
    assert_eq!((last.in_use, last.record.as_ref().unwrap().package), (true, layers(4, 8)));
    assert_eq!(usage.entries.iter().filter(|e| e.in_use).count(), 1);
    drop(held);
    assert!(cache.usage().unwrap().entries.iter().all(|e| !e.in_use));
}

#[test]
fn the_longest_unused_entry_goes_first() {
    let s = setup();
    let [a, b, c] = [layers(0, 2), layers(1, 3), layers(2, 4)];
    let one = s.bytes(a);
    assert_eq!((one, one), (s.bytes(b), s.bytes(c)));
    let cache = s.cache(2 * one);
    assert!(s.get(&cache, a) && s.get(&cache, b));
    assert!(!s.get(&cache, a), "now b is the longest unused");
    assert!(s.get(&cache, c));
    assert!(!s.entry(b, "gguf").exists() && !s.entry(b, "json").exists());
    assert!(!s.get(&cache, a) && !s.get(&cache, c));
    assert!(cache.usage().unwrap().bytes <= cache.limit());
}

#[test]
fn entries_in_use_are_never_evicted() {
    let s = setup();
    let one = s.bytes(layers(0, 2));
    let cache = s.cache(2 * one);
    let first = cache.get(&s.model, layers(0, 2), &mut |_, _| {}).unwrap();
    let second = cache.get(&s.model, layers(1, 3), &mut |_, _| {}).unwrap();
    let e = cache.get(&s.model, layers(2, 4), &mut |_, _| {}).unwrap_err();
    assert!(
        matches!(e, Error::CacheFull { limit, in_use, needed, .. } if (limit, in_use, needed) == (2 * one, 2 * one, one))
    );
    assert!(first.path().exists() && second.path().exists());
    assert!(!s.entry(layers(2, 4), "partial").exists());
    drop(first);
    assert!(s.get(&cache, layers(2, 4)));
    assert!(second.path().exists());
    let e = s.cache(one - 1).get(&s.model, layers(3, 5), &mut |_, _| {}).unwrap_err();
    assert!(matches!(e, Error::CacheFull { .. }), "larger than the whole cache: {e}");
}

#[test]
fn corrupt_entries_are_quarantined_and_written_again() {
    let s = setup();
    let cache = s.cache(u64::MAX);
    let package = layers(0, 4);
    let path = s.entry(package, "gguf");
    assert!(s.get(&cache, package));
    let good = fs::read(&path).unwrap();
    let damages: [&dyn Fn(); 6] = [
        &|| {
            let mut bytes = good.clone();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&path, bytes).unwrap();
        },
        &|| fs::write(&path, &good[..good.len() / 2]).unwrap(),
        &|| {
            let mut bytes = good.clone();
            bytes[9] = 0xff;
            fs::write(&path, bytes).unwrap();
        },
        &|| fs::write(&path, b"").unwrap(),
        &|| fs::write(s.entry(package, "json"), b"{").unwrap(),
        &|| fs::remove_file(s.entry(package, "json")).unwrap(),
    ];
    for (i, damage) in damages.iter().enumerate() {
        damage();
        assert!(cache.find(s.model.digest(), package).is_err(), "damage {i}");
        assert!(s.get(&cache, package), "damage {i}");
        assert_eq!(fs::read(&path).unwrap(), good);
        assert!(cache.usage().unwrap().quarantine_bytes > 0 || i == 3);
    }
    assert_eq!(fs::read_dir(cache.dir().join("quarantine")).unwrap().count(), 1, "one for each entry at most");
}

#[test]
fn quarantined_files_make_room_first() {
    let s = setup();
    let one = s.bytes(layers(0, 2));
    let cache = s.cache(2 * one);
    assert!(s.get(&cache, layers(0, 2)));
    let path = s.entry(layers(0, 2), "gguf");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(s.get(&cache, layers(0, 2)));
    assert_eq!(cache.usage().unwrap().quarantine_bytes, one);
    assert!(s.get(&cache, layers(1, 3)));
    assert_eq!(cache.usage().unwrap().quarantine_bytes, 0);
    assert!(!s.get(&cache, layers(0, 2)));
}

#[test]
fn a_failing_writer_leaves_nothing() {
    let s = setup();
    let cache = s.cache(u64::MAX);
    let bytes = fs::metadata(s.model.file()).unwrap().len();
    fs::File::options().write(true).open(s.model.file()).unwrap().set_len(bytes / 4).unwrap();
    assert!(cache.get(&s.model, layers(4, 8), &mut |_, _| {}).is_err());
    assert_eq!(fs::read_dir(cache.dir().join("entries")).unwrap().count(), 0);
}

#[test]
fn threads_that_want_the_same_package_write_it_once() {
    let s = setup();
    let (writes, barrier) = (AtomicU32::new(0), Barrier::new(6));
    std::thread::scope(|scope| {
        for i in 0..6 {
            let (s, writes, barrier) = (&s, &writes, &barrier);
            scope.spawn(move || {
                let cache = s.cache(u64::MAX);
                barrier.wait();
                for package in [layers(0, 4), layers(i % 2, 6), Package::Tokenizer] {
                    writes.fetch_add(s.get(&cache, package).into(), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(writes.into_inner(), 4);
}

#[test]
fn threads_in_a_cache_too_small_for_all_never_exceed_it() {
    let s = setup();
    let limit = 5 * s.bytes(layers(0, 2));
    std::thread::scope(|scope| {
        for i in 0..4u32 {
            let s = &s;
            scope.spawn(move || {
                let cache = s.cache(limit);
                for j in 0..6 {
                    let first = (i * 2 + j * 3) % 6;
                    s.get(&cache, layers(first, first + 2));
                    assert!(cache.usage().unwrap().bytes <= limit);
                }
            });
        }
    });
}

/// What the other processes of the tests below run: this test binary, with a task in the environment.
#[test]
#[ignore = "run by other tests, as a process of its own"]
fn child() {
    let Ok(dir) = std::env::var("CACHE_TEST_DIR") else { return };
    let dir = Path::new(&dir);
    let model = Model::open(dir.join("m.gguf")).unwrap();
    let cache = Cache::open(dir.join("cache"), u64::MAX).unwrap();
    let crash = std::env::var("CACHE_TEST_CRASH").is_ok();
    let mut written = false;
    let entry = cache
        .get(&model, layers(0, 4), &mut |done, total| {
            written = true;
            if crash && done > total / 2 {
                std::process::abort();
            }
        })
        .unwrap();
    assert!(entry.path().exists());
    println!("written={written}");
}

fn spawn(s: &Setup, crash: bool) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--ignored", "--nocapture"]).env("CACHE_TEST_DIR", s.dir.path());
    if crash {
        command.env("CACHE_TEST_CRASH", "1");
    }
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn processes_that_want_the_same_package_write_it_once() {
    let s = setup();
    let children: Vec<_> = (0..3).map(|_| spawn(&s, false)).collect();
    let mut writes = 0;
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert!(out.status.success());
        writes += u32::from(String::from_utf8_lossy(&out.stdout).contains("written=true"));
    }
    assert_eq!(writes, 1);
    assert!(!s.get(&s.cache(u64::MAX), layers(0, 4)));
}

#[test]
fn what_a_crashed_writer_left_is_cleaned_and_written_again() {
    let s = setup();
    let cache = s.cache(u64::MAX);
    let crash = || assert!(!spawn(&s, true).wait().unwrap().success());
    crash();
    assert!(s.entry(layers(0, 4), "partial").exists());
    assert_eq!(cache.usage().unwrap().partial_bytes, s.bytes(layers(0, 4)));
    s.cache(u64::MAX);
    assert!(!s.entry(layers(0, 4), "partial").exists(), "opening the cache cleans");
    crash();
    assert!(s.get(&cache, layers(0, 4)));
    assert!(!s.entry(layers(0, 4), "partial").exists());
    assert_eq!(cache.usage().unwrap().partial_bytes, 0);
}
