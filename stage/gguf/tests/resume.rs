//! Interrupted copies from far away: gone on with where they were, and never with bytes that are not the right ones.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)] // helpers of tests are tests too

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use splitmodel_gguf::cache::{Cache, key};
use splitmodel_gguf::tiny::{Arch, Tiny};
use splitmodel_gguf::{Error, Model, ModelFacts, Package, SlicePlan, Source};

const STAGE: Package = Package::Stage { first: 0, end: 5 };

/// A file as if it were far away: it has a version, counts what is read, and breaks down.
struct Far {
    bytes: Vec<u8>,
    version: String,
    read: Arc<AtomicU64>,
    /// Bytes until it breaks down.
    left: Arc<AtomicU64>,
}

impl Source for Far {
    fn len(&self) -> io::Result<u64> {
        Source::len(&self.bytes)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.bytes.read_at(offset, buf)?;
        self.read.fetch_add(buf.len() as u64, Relaxed);
        let n = buf.len() as u64;
        self.left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(n)).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(())
    }

    fn stream(&self, offset: u64, len: u64) -> io::Result<Option<Box<dyn io::Read + '_>>> {
        Ok(Some(Box::new(Stream { far: self, at: offset, end: offset + len })))
    }

    fn version(&self) -> Option<String> {
        Some(self.version.clone())
    }

    fn describe(&self) -> String {
        "far".to_owned()
    }
}

struct Stream<'a> {
    far: &'a Far,
    at: u64,
    end: u64,
}

impl io::Read for Stream<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = buf.len().min((self.end - self.at) as usize).min(10_000);
        self.far.read_at(self.at, &mut buf[..n])?;
        self.at += n as u64;
        Ok(n)
    }
}

struct Setup {
    dir: tempfile::TempDir,
    bytes: &'static [u8],
    want: &'static [u8],
}

struct Opened {
    model: Model,
    read: Arc<AtomicU64>,
    left: Arc<AtomicU64>,
}

fn open(bytes: &[u8], version: &str) -> Opened {
    let (read, left) = (Arc::<AtomicU64>::default(), Arc::new(AtomicU64::new(u64::MAX)));
    let far = Far { bytes: bytes.to_vec(), version: version.to_owned(), read: read.clone(), left: left.clone() };
    let model = Model::from_sources(vec![Arc::new(far)]).unwrap();
    read.store(0, Relaxed);
    Opened { model, read, left }
}

/// A model and the package that is to be made of it.
fn tiny() -> &'static (Vec<u8>, Vec<u8>) {
    static TINY: OnceLock<(Vec<u8>, Vec<u8>)> = OnceLock::new();
    TINY.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.gguf");
        Tiny::new(Arch::Llama).write(&path).unwrap();
        let bytes = fs::read(path).unwrap();
        let mut want = Vec::new();
        let model = open(&bytes, "").model;
        SlicePlan::new(&model, STAGE).unwrap().write_to("", &mut want, &mut |_, _| {}).unwrap();
        (bytes, want)
    })
}

fn setup() -> Setup {
    let (bytes, want) = tiny();
    Setup { dir: tempfile::tempdir().unwrap(), bytes, want }
}

impl Setup {
    fn cache(&self) -> Cache {
        Cache::open(self.dir.path().join("cache"), u64::MAX).unwrap()
    }

    fn path(&self, opened: &Opened, extension: &str) -> PathBuf {
        self.dir.path().join("cache/entries").join(format!("{}.{extension}", key(opened.model.digest(), STAGE)))
    }

    /// Copies until `bytes` were read.
    fn interrupt(&self, version: &str, bytes: u64) -> Opened {
        let opened = open(self.bytes, version);
        opened.left.store(bytes, Relaxed);
        let error = self.cache().get(&opened.model, STAGE, &mut |_, _| {}).unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        opened
    }

    /// Copies the rest; gives the bytes read, and how many were done at the start.
    fn finish(&self, version: &str) -> (u64, u64) {
        let opened = open(self.bytes, version);
        let mut first = None;
        let entry = self.cache().get(&opened.model, STAGE, &mut |done, total| {
            assert_eq!(total, self.want.len() as u64);
            first.get_or_insert(done);
        });
        assert!(fs::read(entry.unwrap().path()).unwrap() == *self.want);
        for extension in ["partial", "journal"] {
            assert!(!self.path(&opened, extension).exists());
        }
        (opened.read.load(Relaxed), first.unwrap())
    }

    fn total(&self) -> u64 {
        self.want.len() as u64
    }
}

#[test]
fn a_copy_goes_on_where_it_broke_off() {
    let s = setup();
    let opened = s.interrupt("one", 1_000_000);
    assert!(s.path(&opened, "partial").exists());
    assert_eq!(s.cache().usage().unwrap().partial_bytes, s.total());
    let again = s.interrupt("one", 500_000);
    assert!(again.read.load(Relaxed) <= 510_000);
    let (read, begun) = s.finish("one");
    assert!(begun > 1_000_000 && read + begun <= s.total() + 10_000, "{begun} were done, {read} read");
}

#[test]
fn what_is_whole_has_the_facts_beside_it() {
    let s = setup();
    s.finish("one");
    let opened = open(s.bytes, "one");
    let entry = s.cache().find(opened.model.digest(), STAGE).unwrap().unwrap();
    let facts = ModelFacts::from_compact(entry.record().facts.as_ref().unwrap()).unwrap();
    assert_eq!(facts, opened.model.facts().unwrap());
}

#[test]
fn another_version_begins_anew() {
    let s = setup();
    s.interrupt("one", 1_000_000);
    let (read, _) = s.finish("two");
    assert!(read > s.total() - 100_000);
}

#[test]
fn a_file_without_its_journal_is_of_no_use() {
    let s = setup();
    let opened = s.interrupt("one", 1_000_000);
    fs::remove_file(s.path(&opened, "journal")).unwrap();
    s.cache();
    assert!(!s.path(&opened, "partial").exists());
}

#[test]
fn unfinished_files_wait_for_a_while_and_give_way_when_room_is_needed() {
    let s = setup();
    let opened = s.interrupt("one", 1_000_000);
    s.cache();
    assert!(s.path(&opened, "partial").exists());
    let old = SystemTime::now() - Duration::from_secs(8 * 24 * 3600);
    let journal = fs::File::options().write(true).open(s.path(&opened, "journal")).unwrap();
    journal.set_modified(old).unwrap();
    s.cache();
    assert!(!s.path(&opened, "partial").exists() && !s.path(&opened, "journal").exists());

    let opened = s.interrupt("one", 1_000_000);
    let cache = Cache::open(s.dir.path().join("cache"), s.total()).unwrap();
    let other = Package::Stage { first: 5, end: 8 };
    cache.get(&opened.model, other, &mut |_, _| {}).unwrap_err(); // it is broken down for good
    assert!(!s.path(&opened, "partial").exists(), "it made room");
    let opened = open(s.bytes, "one");
    cache.get(&opened.model, other, &mut |_, _| {}).unwrap();
    assert!(cache.usage().unwrap().bytes <= cache.limit());
}

#[test]
fn a_limit_that_shrank_counts_for_unfinished_files_too() {
    let s = setup();
    let opened = s.interrupt("one", 1_000_000);
    let cache = Cache::open(s.dir.path().join("cache"), s.total() - 1).unwrap();
    let error = cache.get(&opened.model, STAGE, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::CacheFull { .. }), "{error}");
}

/// What the process of the test below runs.
#[test]
#[ignore = "run by other tests, as a process of its own"]
fn child() {
    let Ok(dir) = std::env::var("RESUME_TEST_DIR") else { return };
    let dir = Path::new(&dir);
    let opened = open(&fs::read(dir.join("m.gguf")).unwrap(), "one");
    let cache = Cache::open(dir.join("cache"), u64::MAX).unwrap();
    let _ = cache.get(&opened.model, STAGE, &mut |done, total| {
        if done > total / 2 {
            println!("half");
            std::thread::sleep(Duration::from_secs(600));
        }
    });
}

#[test]
fn a_killed_process_leaves_its_bytes_to_the_next() {
    let s = setup();
    fs::write(s.dir.path().join("m.gguf"), s.bytes).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("RESUME_TEST_DIR", s.dir.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("half") {
        line.clear();
        assert!(io::BufRead::read_line(&mut out, &mut line).unwrap() > 0);
    }
    // While it lives nobody takes its file.
    s.cache();
    child.kill().unwrap();
    child.wait().unwrap();
    let (read, begun) = s.finish("one");
    assert!(begun > s.total() / 2 - 300_000 && read < s.total() - begun + 10_000, "{begun} were done, {read} read");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Wherever it breaks off and whatever happens to the files meanwhile: the package is the right one.
    #[test]
    fn damage_costs_time_and_never_bytes(
        cut in 0u64..2_400_000, place in any::<prop::sample::Index>(), bit in 0u8..8, what in 0u8..5,
    ) {
        let s = setup();
        let opened = s.interrupt("one", cut);
        let damaged = s.path(&opened, if what < 2 { "partial" } else { "journal" });
        let mut bytes = fs::read(&damaged).unwrap();
        let place = place.index(bytes.len());
        match what {
            0 | 2 => bytes[place] ^= 1 << bit,
            1 | 3 => bytes.truncate(place),
            _ => bytes.extend(bytes.clone()),
        }
        fs::write(&damaged, &bytes).unwrap();
        let (read, begun) = s.finish("one");
        prop_assert!(read + begun <= s.total() + 10_000);
    }
}
